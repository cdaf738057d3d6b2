"""Our own updates, as a trainer makes them, into `tests.bench.engine` processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from pipelines import WeightUpdater
from pipelines.report import UpdateReport
from tests.bench.limits import Way
from tests.bench.models import Weights

ROOT = Path(__file__).resolve().parents[2]


class EngineProcess:
    """A receiving process; see tests.bench.engine."""

    def __init__(self, model: str) -> None:
        command = [sys.executable, "-m", "tests.bench.engine", "--model", model]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        assert self._process.stdout is not None
        self.url: str = json.loads(self._process.stdout.readline())["url"]
        self.pid = self._process.pid

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


class Ours(Way):
    """One updater and its engines; `move` is one update."""

    def __init__(
        self, name: str, model: Weights, listed: str, settings: list[str], engines: int = 1, folder: Path | None = None
    ) -> None:
        self.name = name
        self.model = model
        self.engines = [EngineProcess(listed) for _ in range(engines)]
        urls = ",".join(e.url for e in self.engines)
        places = [f"transport.path={folder}", "transport.keep=1"] if folder else []
        self.updater = WeightUpdater.from_config([*settings, *places, "engines=remote", f"engines.urls=[{urls}]"])
        self.updater.open()

    def move(self) -> None:
        self.updater.update(self.model)

    @property
    def last(self) -> UpdateReport:
        return self.updater.report.updates[-1]

    def close(self) -> None:
        self.updater.close()
        for engine in self.engines:
            engine.close()
