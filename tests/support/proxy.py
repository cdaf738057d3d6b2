"""A proxy in front of one engine that can spoil one answer: what a network, a load balancer or a dying server does."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit


@dataclass
class Fault:
    """What happens to request `nth` (from 0) of `path` after it is armed; `hits` counts those of this path.

    Kinds, the engine never having heard: `lost` (the connection ends), `unheard 503`, `unheard html` and `unheard empty`
    (200). And after it did as asked: `dropped`, `500`, `refused` (200, success false), `redirect`, `truncated`, `late` (after
    `seconds`).
    """

    path: str
    kind: str
    nth: int = 0
    seconds: float = 0.0
    hits: int = 0
    struck: bool = False


class FaultProxy:
    """Forwards to `target`, an http URL; `url` is its own."""

    def __init__(self, target: str) -> None:
        parts = urlsplit(target)
        self.fault: Fault | None = None
        self.paths: list[str] = []
        self._lock = threading.Lock()
        self._ended = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True
            wbufsize = -1

            def do_GET(self) -> None:
                outer._pass_on(self, parts.hostname or "", parts.port or 80)

            do_POST = do_GET  # noqa: N815

            def log_message(self, *args: Any) -> None:
                pass

        class Bound(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *args: Any) -> None:
                pass

        self._server = Bound(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self._ended.set()
        self._server.shutdown()
        self._server.server_close()

    def _strikes(self, path: str) -> Fault | None:
        with self._lock:
            self.paths.append(path)
            fault = self.fault
            if fault is None or fault.struck or path != fault.path:
                return None
            fault.hits += 1
            if fault.hits <= fault.nth:
                return None
            fault.struck = True
            return fault

    def _pass_on(self, request: BaseHTTPRequestHandler, host: str, port: int) -> None:
        body = request.rfile.read(int(request.headers.get("content-length") or 0))
        fault = self._strikes(request.path)
        if fault is not None and fault.kind == "lost":
            self._drop(request)
            return
        if fault is not None and fault.kind == "unheard 503":
            _answer(request, 503, "text/html", b"<html>no healthy upstream</html>")
            return
        if fault is not None and fault.kind.startswith("unheard"):
            _answer(request, 200, "text/html", b"<html>Welcome!</html>" if fault.kind == "unheard html" else b"")
            return
        headers = {k: v for k, v in request.headers.items() if k.lower() in ("content-type", "authorization")}
        connection = http.client.HTTPConnection(host, port, timeout=60)
        with contextlib.closing(connection):
            connection.request(request.command, request.path, body or None, headers)
            answer = connection.getresponse()
            status, kind, content = answer.status, answer.headers.get("content-type", ""), answer.read()
        match fault.kind if fault is not None else "":
            case "dropped":
                self._drop(request)
                return
            case "500":
                status, kind, content = 500, "application/json", b'{"detail": "Internal Server Error"}'
            case "refused":
                refusal = {"success": False, "message": "not now", "is_paused": False, "is_sleeping": False}
                status, kind, content = 200, "application/json", json.dumps(refusal).encode()
            case "redirect":
                status, kind, content = 307, "text/html", b"<html>moved</html>"
            case "truncated":
                status, kind, content = 200, "application/json", b'{"success": tr'
            case "late":
                assert fault is not None
                self._ended.wait(fault.seconds)
        _answer(request, status, kind, content)

    @staticmethod
    def _drop(request: BaseHTTPRequestHandler) -> None:
        request.close_connection = True
        request.connection.close()


def _answer(request: BaseHTTPRequestHandler, status: int, kind: str, content: bytes) -> None:
    request.send_response(status)
    if status == 307:
        request.send_header("location", "http://127.0.0.1:9/elsewhere")
    request.send_header("content-type", kind)
    request.send_header("content-length", str(len(content)))
    request.end_headers()
    request.wfile.write(content)
    request.wfile.flush()
