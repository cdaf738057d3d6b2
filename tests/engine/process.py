"""An embedded engine as a process of its own, as users start it."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.engine.client import Client

ROOT = Path(__file__).resolve().parents[2]


def spawn(model: Path, backend: str, log: Path, *flags: str, **environment: str) -> subprocess.Popen[bytes]:
    """Start it; standard output is a pipe, errors go to `log`."""
    command = [sys.executable, "-m", "pipelines.engine", "--model", str(model), "--backend", backend, *flags]
    with log.open("wb") as errors:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            cwd=ROOT,
            env=dict(os.environ, **environment),
        )


def hello(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    """The line that it prints when it listens."""
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], 120)
    assert ready, "it did not listen within two minutes"
    line = process.stdout.readline()
    assert line, f"it ended with code {process.wait()}"
    said: dict[str, Any] = json.loads(line)
    return said


class ProcessEngine(Client):
    """Started by the constructor, reachable after `ready`, so that several can start at once."""

    def __init__(self, model: Path, backend: str, log: Path, *flags: str, **environment: str) -> None:
        self.log = log
        self.process = spawn(model, backend, log, *flags, **environment)

    def ready(self) -> ProcessEngine:
        said = hello(self.process)
        self.incarnation = said["incarnation"]
        super().__init__(said["url"])
        return self

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(5)
        finally:
            self.process.kill()
            self.process.wait()
            for stream in (self.process.stdin, self.process.stdout):
                if stream is not None:
                    stream.close()
        if hasattr(self, "url"):
            super().close()
