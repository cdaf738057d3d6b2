"""The report: a stable contract, returned by the API and written as report.json.

    {"outcome": committed | aborted | tainted | refused, "version": str or null,
     "updates": [{"version", "outcome", "attempts", "bytes", "tensors", "buckets", "error",
                  "seconds": {"pause", "begin", "gather", "quantize", "pack", "wire", "apply", "commit", "resume",
                              "transfer", "total"},
                  "gb_per_s", "limit_gb_per_s", "limit_fraction",
                  "engines": [{"url", "outcome", "version", "verified", "digest", "restarted", "error"}]}],
     "config": {...}, "libraries": {name: version}}

Seconds are self-times, null where a phase did not happen or an engine merges it into another call; phases overlap, so they
may add up to more than `transfer` (first bucket to last answer) and `total`. GB are 1e9 bytes; `gb_per_s` is bytes / transfer,
and `limit_fraction` compares it with one memcpy of this machine, measured in this process.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import os
import time
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from pipelines.redact import redacted
from stages.errors import WeightstreamError

COMMITTED, ABORTED, TAINTED, REFUSED = "committed", "aborted", "tainted", "refused"
_WORST_FIRST = (TAINTED, ABORTED, REFUSED, COMMITTED)
PHASES = (
    "pause",
    "begin",
    "gather",
    "quantize",
    "pack",
    "wire",
    "apply",
    "commit",
    "resume",
    "transfer",
    "total",
)


@dataclass
class EngineReport:
    """One engine's part in one update. `verified` is one of stages.backends.base.PROOFS or null.

    `restarted`: since the update before it had become a new process, which served the weights that it started with.
    """

    url: str
    outcome: str = ABORTED
    version: str | None = None
    verified: str | None = None
    digest: str | None = None
    restarted: bool = False
    error: str | None = None


@dataclass
class UpdateReport:
    """One update. Truthy when it was committed."""

    version: str
    outcome: str = ABORTED
    attempts: int = 1
    bytes: int = 0
    tensors: int = 0
    buckets: int = 0
    seconds: dict[str, float | None] = field(default_factory=lambda: dict.fromkeys(PHASES))
    gb_per_s: float | None = None
    limit_gb_per_s: float | None = None
    limit_fraction: float | None = None
    engines: list[EngineReport] = field(default_factory=list)
    error: str | None = None

    def __bool__(self) -> bool:
        return self.outcome == COMMITTED

    def measure(self) -> None:
        """Fill in the rates from bytes and seconds."""
        transfer = self.seconds.get("transfer")
        if self.outcome == COMMITTED and transfer:
            self.gb_per_s = self.bytes / transfer / 1e9
            self.limit_gb_per_s = copy_limit()
            self.limit_fraction = self.gb_per_s / self.limit_gb_per_s


@dataclass
class Report:
    """All updates of one run."""

    config: dict[str, Any] = field(default_factory=dict)
    updates: list[UpdateReport] = field(default_factory=list)

    @property
    def outcome(self) -> str:
        """The worst outcome of any update; "refused" when there was none."""
        seen = {u.outcome for u in self.updates}
        return next((o for o in _WORST_FIRST if o in seen), REFUSED)

    @property
    def version(self) -> str | None:
        """The last version that was committed."""
        return next((u.version for u in reversed(self.updates) if u.outcome == COMMITTED), None)

    def to_json(self) -> dict[str, Any]:
        return redacted(
            {
                "outcome": self.outcome,
                "version": self.version,
                "updates": [asdict(u) for u in self.updates],
                "config": self.config,
                "libraries": library_versions(),
            }
        )

    def write(self, path: Path) -> None:
        """Write atomically: a reader sees the old file or the new one."""
        write_report(self.to_json(), path)


def write_report(report: dict[str, Any], path: Path) -> None:
    """What `Report.to_json` returned, atomically."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(report, indent=1) + "\n")
    os.replace(temporary, path)


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises WeightstreamError for anything else."""
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise WeightstreamError(f"{path} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise WeightstreamError(f"{path} holds no JSON object")
    return values


def read_report(path: Path) -> dict[str, Any]:
    """A report.json, its parts of the right kinds. Raises WeightstreamError for a file that is no report."""
    report = read_object(path)
    try:
        _check(report, _REPORT)
        for update in report["updates"]:
            _check(update, _UPDATE)
            for seconds in update["seconds"].values():
                _check({"seconds": seconds}, {"seconds": _NUMBER})
            for engine in update["engines"]:
                _check(engine, _ENGINE)
    except TypeError as error:
        raise WeightstreamError(f"{path} is no report: {error}") from error
    return report


_TEXT: Any = str | None
_NUMBER: Any = float | int | None
_REPORT = {"outcome": str, "version": _TEXT, "updates": list}
_UPDATE: dict[str, Any] = {
    "version": str,
    "outcome": str,
    "error": _TEXT,
    "seconds": dict,
    "engines": list,
    "bytes": int,
}
_UPDATE |= dict.fromkeys(("gb_per_s", "limit_gb_per_s", "limit_fraction"), _NUMBER)
_ENGINE = {"url": str, "outcome": str, "version": _TEXT, "verified": _TEXT, "error": _TEXT}


def _check(values: Any, kinds: dict[str, Any]) -> None:
    if not isinstance(values, dict):
        raise TypeError(f"a {type(values).__name__} where an object belongs")
    for name, kind in kinds.items():
        value = values.get(name, _check)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise TypeError(f"{name} is {'missing' if value is _check else f'a {type(value).__name__}'}")


@cache
def library_versions() -> dict[str, str]:
    """Versions of what was installed when this ran."""
    found = {}
    for name in ("weightstream", "torch", "transformers", "safetensors", "hydra-core", "numpy", "xxhash"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


@cache
def copy_limit(nbytes: int = 64 << 20) -> float:
    """GB/s of one single-threaded memcpy between touched buffers of this process, best of five."""
    source, target = bytearray(nbytes), bytearray(nbytes)
    here = (ctypes.c_char * nbytes).from_buffer(source)
    there = (ctypes.c_char * nbytes).from_buffer(target)
    best = float("inf")
    for _ in range(6):
        start = time.perf_counter()
        ctypes.memmove(there, here, nbytes)
        best = min(best, time.perf_counter() - start)
    return nbytes / best / 1e9
