"""Where reports go besides report.json: callbacks, Prometheus metrics, a timeline. Each costs nothing while it is off.

Metrics are a file in Prometheus' text format for the node exporter's textfile collector, replaced after each update.
"""

from __future__ import annotations

import json
import logging
import os
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pipelines.config import build
from pipelines.report import COMMITTED, TAINTED, UpdateReport
from stages.trace import Trace

log = logging.getLogger("weightstream")


class Callback(ABC):
    """Gets each update's report on rank 0, whatever its outcome. What it raises is logged and does no harm."""

    @abstractmethod
    def __call__(self, report: UpdateReport) -> None: ...

    def close(self) -> None:
        """The last update has been reported."""


class Outlets:
    """The `report` node: what to do with each update's report. Raises ConfigError for a callback that is none."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._metrics = Path(settings["metrics"]) if settings["metrics"] else None
        self._timeline = Path(settings["timeline"]) if settings["timeline"] else None
        self._callbacks: list[Callback] = [build(node, Callback) for node in settings["callbacks"]]  # type: ignore[type-abstract]
        self._outcomes: Counter[str] = Counter()
        self.trace = Trace() if self._timeline else None
        if self.trace is not None:
            self.trace.row("session")  # the first one

    def take(self, report: UpdateReport) -> None:
        """On rank 0, after every update."""
        self._outcomes[report.outcome] += 1
        for callback in self._callbacks:
            try:
                callback(report)
            except Exception:
                log.exception("report.callbacks: %s failed", type(callback).__name__)
        if self._metrics is not None:
            self._write(self._metrics, "".join(metrics(report, self._outcomes)))

    def close(self) -> None:
        """On rank 0, at the end."""
        for callback in self._callbacks:
            try:
                callback.close()
            except Exception:
                log.exception("report.callbacks: %s did not close", type(callback).__name__)
        if self._timeline is not None and self.trace is not None:
            self._write(self._timeline, json.dumps(self.trace.to_json()))

    @staticmethod
    def _write(path: Path, text: str) -> None:
        """A reader sees the old file or the new one; a folder that is gone or full is no reason to fail an update."""
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(text)
            os.replace(temporary, path)
        except OSError as error:
            log.warning("%s cannot be written: %s", path, error)


def metrics(report: UpdateReport, outcomes: Mapping[str, int]) -> Iterable[str]:
    """The lines of the metrics file: counts of all updates, values of the last one. Seconds, bytes, GB of 1e9 bytes."""
    yield from _family(
        "updates_total", "counter", "updates by outcome", [({"outcome": o}, n) for o, n in outcomes.items()]
    )
    yield from _family("update_timestamp_seconds", "gauge", "when the last update ended", [({}, time.time())])
    yield from _family(
        "update_committed", "gauge", "whether the last update was", [({}, int(report.outcome == COMMITTED))]
    )
    yield from _family("update_bytes", "gauge", "bytes of the last update", [({}, report.bytes)])
    phases: list[tuple[dict[str, str], float | None]] = [({"phase": p}, s) for p, s in report.seconds.items()]
    yield from _family("update_seconds", "gauge", "self-time of each phase of the last update", phases)
    yield from _family("update_gb_per_second", "gauge", "its rate", [({}, report.gb_per_s)])
    yield from _family(
        "update_limit_fraction", "gauge", "rate over this machine's copy limit", [({}, report.limit_fraction)]
    )
    for outcome in (COMMITTED, TAINTED):
        values = [({"engine": e.url}, int(e.outcome == outcome)) for e in report.engines]
        yield from _family(
            f"engine_{outcome}", "gauge", f"whether the engine is {outcome} since the last update", values
        )


def _family(
    name: str, kind: str, words: str, values: Iterable[tuple[Mapping[str, str], float | None]]
) -> Iterable[str]:
    known = [(labels, value) for labels, value in values if value is not None]
    if not known:
        return
    yield f"# HELP weightstream_{name} {words}\n# TYPE weightstream_{name} {kind}\n"
    for labels, value in known:
        inner = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
        yield f"weightstream_{name}{f'{{{inner}}}' if inner else ''} {value!r}\n"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
