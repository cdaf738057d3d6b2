"""The embedded engine as a Ray actor: `ray.remote(EngineActor).options(max_concurrency=16).remote(model=..., backend=...)`.

It has no port: callers hold its handle and use `request`, see stages/backends/actor.py.
"""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any
from urllib.parse import urlencode


class EngineActor:
    """Takes the settings of `pipelines.engine.settings.Settings`. Raises ConfigError for those that cannot work."""

    def __init__(self, **settings: Any) -> None:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        from pipelines.engine.app import make_app
        from pipelines.engine.engine import Engine
        from pipelines.engine.settings import Settings

        self._engine = Engine(Settings(**settings))
        self._app = make_app(self._engine)

    def request(
        self, method: str, path: str, body: dict[str, Any] | None = None, query: dict[str, Any] | None = None
    ) -> tuple[int, Any]:
        """`(status, answer)` of one of the engine's routes. Blocks; give the actor several threads."""
        data = b"" if body is None else json.dumps(body).encode()
        return asyncio.run(_ask(self._app, method, path, urlencode(query or {}, doseq=True), data))

    def ready(self) -> None:
        """Return as soon as it serves."""

    def close(self) -> None:
        """End the processes of the other ranks."""
        self._engine.close()


# Not a method: Ray would take an actor that has coroutines for one that runs on an event loop.
async def _ask(app: Any, method: str, path: str, query: str, data: bytes) -> tuple[int, Any]:
    """One request of the ASGI application, without a connection."""
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": query.encode(),
        "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())],
        "client": None,
        "server": None,
    }
    sent = [{"type": "http.request", "body": data, "more_body": False}]
    answer: dict[str, Any] = {"status": 500, "headers": [], "body": b""}

    async def receive() -> dict[str, Any]:
        return sent.pop() if sent else await asyncio.Future()  # the caller never hangs up

    async def send(message: Any) -> None:
        answer["status"] = message.get("status", answer["status"])
        answer["headers"] += message.get("headers", [])
        answer["body"] += message.get("body", b"")

    await app(scope, receive, send)
    kind = dict(answer["headers"]).get(b"content-type", b"")
    if not answer["body"]:
        return answer["status"], None
    return answer["status"], json.loads(answer["body"]) if b"json" in kind else answer["body"].decode()
