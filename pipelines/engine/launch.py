"""Start an embedded engine from Python, as a process of its own."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

from stages.errors import WaitTimeout, WeightstreamError

ROOT = Path(__file__).resolve().parents[2]


class EngineStartError(WeightstreamError):
    """The engine ended before it listened; the message holds its last words."""


class EmbeddedEngine:
    """A running server. `options` are the command line's, in its spelling: `EmbeddedEngine(dir, "sglang", tp=2)`.

    It ends with this process, however this process ends. Output goes to `log`.
    """

    def __init__(
        self,
        model: str | Path,
        backend: str,
        *,
        log: Path,
        api_key: str | None = None,
        admin_key: str | None = None,
        **options: object,
    ) -> None:
        command = [sys.executable, "-m", "pipelines.engine", "--model", str(model), "--backend", backend]
        for name, value in options.items():
            command += [f"--{name.replace('_', '-')}", str(value)]
        environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
        for variable, key in (("API_KEY", api_key), ("ADMIN_KEY", admin_key)):
            environment.pop(f"WEIGHTSTREAM_ENGINE_{variable}", None)
            if key is not None:
                environment[f"WEIGHTSTREAM_ENGINE_{variable}"] = key
        self.log = log
        with log.open("wb") as errors:
            self.process = subprocess.Popen(
                [*command, "--exit-with-parent"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
                start_new_session=True,
            )
        self.url = ""
        self.incarnation = ""

    def wait(self, timeout: float = 120.0) -> EmbeddedEngine:
        """Wait until it listens. Raises EngineStartError where it ended instead, WaitTimeout where it took too long."""
        assert self.process.stdout is not None
        deadline = time.monotonic() + timeout
        ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            self.close()
            raise WaitTimeout(f"the embedded engine did not listen within {timeout} s; see {self.log}")
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            words = self.log.read_text(errors="replace").strip()[-2000:]
            raise EngineStartError(f"the embedded engine ended with code {self.process.returncode}: {words}")
        said = json.loads(line)
        self.url, self.incarnation = said["url"], said["incarnation"]
        return self

    def close(self, timeout: float = 3.0) -> None:
        """End it and all its ranks. Safe to call twice."""
        self.process.terminate()
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()

    def __enter__(self) -> EmbeddedEngine:
        return self.wait()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
