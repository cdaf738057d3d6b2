"""Starting embedded engines as processes of their own, and ending them whatever happens to us."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from stages.errors import ConfigError, WaitTimeout, WeightstreamError

_START_SECONDS = 120.0


@dataclass
class Launched:
    """One running embedded engine."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path


class EngineLauncher:
    """Starts `python -m pipelines.engine` processes. Each ends when our end of its stdin closes, so also when we are killed."""

    def __init__(self) -> None:
        self._running: list[Launched] = []
        self._logs: tempfile.TemporaryDirectory[str] | None = None

    def start(
        self, model: Path, backend: str, count: int = 1, tp: int = 1, device: str = "cpu", on_fatal: str = "answer"
    ) -> list[str]:
        """Start `count` engines of `tp` ranks at once; returns their URLs once all of them answer.

        Raises ConfigError when the engine extra is not installed, WeightstreamError with the engine's last words when one ends.
        """
        _require_engine_extra()
        if self._logs is None:
            self._logs = tempfile.TemporaryDirectory(prefix="weightstream-")
        command = [sys.executable, "-m", "pipelines.engine", "--model", str(model), "--backend", backend]
        command += ["--tp", str(tp), "--device", device, "--on-fatal", on_fatal, "--exit-with-parent"]
        started = [self._spawn(command) for _ in range(count)]
        return [self._await_url(process, log) for process, log in started]

    def close(self) -> None:
        """End all engines; kill those that do not within 5 s."""
        running, self._running = self._running, []
        for engine in running:
            engine.process.terminate()
            if engine.process.stdin:
                engine.process.stdin.close()
        deadline = time.monotonic() + 5.0
        for engine in running:
            try:
                engine.process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                engine.process.kill()
                engine.process.wait()
        logs, self._logs = self._logs, None
        if logs is not None:
            logs.cleanup()

    @property
    def processes(self) -> list[subprocess.Popen[bytes]]:
        return [e.process for e in self._running]

    def _spawn(self, command: list[str]) -> tuple[subprocess.Popen[bytes], Path]:
        assert self._logs is not None
        log = Path(self._logs.name) / f"engine-{len(self._running)}.log"
        environment = dict(os.environ)
        for role in ("API", "ADMIN"):  # one source of keys: the engine wants what the trainer will send
            if key := environment.get(f"WEIGHTSTREAM_{role}_KEY"):
                environment[f"WEIGHTSTREAM_ENGINE_{role}_KEY"] = key
        root = str(Path(__file__).resolve().parent.parent)
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, environment.get("PYTHONPATH")]))
        with open(log, "wb") as stream:
            # A session of its own: Ctrl-C reaches us alone, and we end the engines in order.
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stream,
                env=environment,
                start_new_session=True,
            )
        self._running.append(Launched("", process, log))
        return process, log

    def _await_url(self, process: subprocess.Popen[bytes], log: Path) -> str:
        assert process.stdout is not None
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline:
            readable, _, _ = select.select([process.stdout], [], [], 0.2)
            if readable:
                line = process.stdout.readline()
                if line.startswith(b"{"):
                    url: str = json.loads(line)["url"]
                    next(e for e in self._running if e.process is process).url = url
                    return url
            if process.poll() is not None:
                words = log.read_text(errors="replace").strip().splitlines()[-5:]
                raise WeightstreamError(
                    f"an embedded engine ended with exit code {process.returncode} before it served: "
                    + " | ".join(words)
                )
        raise WaitTimeout(f"an embedded engine did not answer within {_START_SECONDS} s; its log: {log}")


def _require_engine_extra() -> None:
    try:
        import starlette  # noqa: F401
        import transformers  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"engines=embedded needs the 'engine' extra ({error.name} is missing): pip install 'weightstream[engine]', "
            f"or point engines=remote engines.urls=[...] at engines that run"
        ) from error
