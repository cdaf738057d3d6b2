"""Servers without engines: a real HTTP server on a free port that answers as told and writes down what it was asked."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import AF_INET, AF_INET6, SHUT_RDWR
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest


@dataclass
class Asked:
    """One request."""

    method: str
    path: str
    query: dict[str, list[str]]
    headers: dict[str, str]
    body: Any
    port: int = 0  # of the client

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


@dataclass
class Answer:
    """One answer. `body` is JSON unless it is bytes or text; None is an empty body.

    `drop` closes the connection instead, `closes` after it.
    """

    status: int = 200
    body: Any = None
    kind: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    drop: bool = False
    closes: bool = False


Reply = Answer | Callable[[Asked], Answer]


class Server:
    """`answers` maps paths to what they answer: one answer for ever, or a list of which each is used once, the last kept."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self.asked: list[Asked] = []
        self.answers: dict[str, Reply | list[Reply]] = {}
        self.closed = threading.Semaphore(0)  # released once per connection that an answer with `closes` ended
        self._lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True
            wbufsize = -1  # head and body in one packet

            def do_GET(self) -> None:
                outer._handle(self)

            do_POST = do_PUT = do_HEAD = do_GET  # noqa: N815

            def log_message(self, *args: Any) -> None:
                pass

        class Bound(ThreadingHTTPServer):
            address_family = AF_INET6 if ":" in host else AF_INET
            daemon_threads = True
            allow_reuse_address = True

            def handle_error(self, *args: Any) -> None:
                pass

        self._server = Bound((host, port), Handler)
        self.port = self._server.server_port
        self.url = f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def paths(self, *, without: tuple[str, ...] = ()) -> list[str]:
        return [str(a) for a in self.asked if a.path not in without]

    def last(self, path: str) -> Asked:
        return next(a for a in reversed(self.asked) if a.path == path)

    def _handle(self, request: BaseHTTPRequestHandler) -> None:
        parts = urlsplit(request.path)
        data = request.rfile.read(int(request.headers.get("content-length") or 0))
        body: Any = None
        if data:
            try:
                body = json.loads(data)
            except ValueError:
                body = data
        headers = {k.lower(): v for k, v in request.headers.items()}
        asked = Asked(request.command, parts.path, parse_qs(parts.query), headers, body, request.client_address[1])
        with self._lock:
            self.asked.append(asked)
            known = self.answers.get(parts.path, Answer(404, {"detail": "Not Found"}))
            if isinstance(known, list):
                known = known.pop(0) if len(known) > 1 else known[0]
        answer = known(asked) if callable(known) else known
        if answer.drop:
            request.close_connection = True
            request.connection.close()
            return
        _send(request, answer)
        if answer.closes:
            request.close_connection = True
            request.connection.shutdown(SHUT_RDWR)
            self.closed.release()


def _send(request: BaseHTTPRequestHandler, answer: Answer) -> None:
    if answer.body is None:
        content, kind = b"", ""
    elif isinstance(answer.body, bytes | str):
        content, kind = answer.body if isinstance(answer.body, bytes) else answer.body.encode(), "text/plain"
    else:
        content, kind = json.dumps(answer.body).encode(), "application/json"
    request.send_response(answer.status)
    request.send_header("content-type", answer.kind if answer.kind is not None else kind)
    request.send_header("content-length", str(len(content)))
    for name, value in answer.headers.items():
        request.send_header(name, value)
    request.end_headers()
    request.wfile.write(content)
    request.wfile.flush()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()
