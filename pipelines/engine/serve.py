"""One server process, from a bound socket to an end that leaves nothing behind within about a second."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from types import FrameType

import uvicorn

from pipelines.engine.app import make_app
from pipelines.engine.engine import Engine
from pipelines.engine.settings import Settings

GRACE_SECONDS = 0.7
BACKLOG = 1024


def serve(settings: Settings, listener: socket.socket, *, exit_with_parent: bool) -> None:
    """Serve until a signal, or the end of standard input where that was asked for. Raises ConfigError at the start."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _end_early)
    if exit_with_parent:
        threading.Thread(target=_exit_with_parent, daemon=True).start()
    _Server(Engine(settings), listener).run_to_the_end()


def _end_early(number: int, frame: FrameType | None) -> None:
    """Before it listens there is nothing to finish."""
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(0)


def _exit_with_parent() -> None:
    sys.stdin.buffer.read()
    os.kill(os.getpid(), signal.SIGTERM)


class _Server(uvicorn.Server):
    """uvicorn over our socket, with an end that does not wait for whoever is stuck in a collective."""

    def __init__(self, engine: Engine, listener: socket.socket) -> None:
        super().__init__(uvicorn.Config(make_app(engine), log_level="warning", access_log=False))
        self._engine = engine
        self._listener = listener

    def run_to_the_end(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._end)
        self._listener.listen(BACKLOG)
        host, port = self._listener.getsockname()[:2]
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        ready = {"url": url, "pid": os.getpid(), "incarnation": self._engine.incarnation}
        sys.stdout.write(json.dumps(ready) + "\n")
        sys.stdout.flush()
        self.run(sockets=[self._listener])
        self._engine.exit_now(0)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn would install its own handlers here, which wait for running requests."""
        yield

    def _end(self, number: int, frame: FrameType | None) -> None:
        self.should_exit = True
        timer = threading.Timer(GRACE_SECONDS, self._engine.exit_now, (0,))
        timer.daemon = True
        timer.start()
