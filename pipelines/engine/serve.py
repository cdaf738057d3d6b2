"""One server process: the socket is bound first, and at the end everything is gone within about a second."""

from __future__ import annotations

import argparse
import contextlib
import json
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
from pipelines.engine.settings import Settings, check_exposure
from stages.errors import ConfigError

API_KEY = "WEIGHTSTREAM_ENGINE_API_KEY"
ADMIN_KEY = "WEIGHTSTREAM_ENGINE_ADMIN_KEY"
GRACE_SECONDS = 0.7
BACKLOG = 1024


def serve(arguments: argparse.Namespace) -> None:
    """Serve until a signal, or the end of standard input where that was asked for. Raises ConfigError at the start."""
    settings = Settings(
        model=arguments.model,
        backend=arguments.backend,
        tp=arguments.tp,
        dtype=arguments.dtype,
        device=arguments.device,
        on_fatal=arguments.on_fatal,
        engine_version=arguments.engine_version,
        prefix_cache=arguments.prefix_cache,
        group_timeout=arguments.group_timeout,
        max_body_bytes=arguments.max_body_bytes,
        api_key=os.environ.pop(API_KEY, None) or None,
        admin_key=os.environ.pop(ADMIN_KEY, None) or None,
    )
    check_exposure(arguments.host, settings.api_key)
    listener = bind(arguments.host, arguments.port)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os._exit(0))
    if arguments.exit_with_parent:
        threading.Thread(target=_exit_with_parent, daemon=True).start()
    engine = Engine(settings)
    _Server(engine, listener).run_to_the_end()


def bind(host: str, port: int) -> socket.socket:
    """A socket that holds its port from here on. Raises ConfigError where it is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Named, not left to 0: only then does asyncio turn Nagle off, which else delays every answer by 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(f"port: cannot listen on {host} port {port}: {error.strerror}") from error
    return listener


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
