"""A client of an embedded engine, and engines served from inside the test process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import requests
import uvicorn

from pipelines.engine.__main__ import bind
from pipelines.engine.app import make_app
from pipelines.engine.engine import Engine
from pipelines.engine.settings import Settings

PROMPT = [5, 17, 42, 99, 7, 300, 211, 64, 8, 33]
LONG_PROMPT = [(7 * i + 3) % 500 for i in range(40)]  # two full blocks of the prefix cache


class Client:
    """Requests to one engine; every call may take at most a minute."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._session = requests.Session()
        self._session.trust_env = False
        self._pool = ThreadPoolExecutor(8)

    def get(self, path: str, *, key: str | None = None) -> requests.Response:
        return self._session.get(self.url + path, headers=_auth(key), timeout=60)

    def post(self, path: str, body: Any = None, *, key: str | None = None, **more: Any) -> requests.Response:
        headers = {"Content-Type": "application/json"} | _auth(key) | more.pop("headers", {})
        if body is not None:
            more["json"] = body
        return self._session.post(self.url + path, headers=headers, timeout=60, **more)

    def later(self, path: str, body: Any = None) -> Future[requests.Response]:
        """The same, in a thread."""
        return self._pool.submit(self.post, path, body)

    def state(self) -> dict[str, Any]:
        return self.get("/weightstream/state").json()

    def digest(self) -> dict[str, Any]:
        return self.get("/weightstream/digest").json()

    def probe(self, prompt: list[int] = PROMPT, tokens: int = 8) -> dict[str, Any]:
        answer = self.post("/weightstream/generate", {"input_ids": prompt, "max_new_tokens": tokens})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def probe_later(self, tokens: int, prompt: list[int] = PROMPT) -> Future[requests.Response]:
        """A long generation that is certainly running when this returns."""
        before = self.state()["running"]
        future = self.later("/weightstream/generate", {"input_ids": prompt, "max_new_tokens": tokens})
        wait_until(lambda: self.state()["running"] > before or future.done())
        return future

    def close(self) -> None:
        self._pool.shutdown()
        self._session.close()


class LocalEngine(Client):
    """A real engine behind real HTTP, in this process: starts in a fraction of a second."""

    def __init__(self, settings: Settings) -> None:
        self.engine = Engine(settings)
        listener = bind("127.0.0.1", 0)
        listener.listen()
        self._server = uvicorn.Server(uvicorn.Config(make_app(self.engine), log_level="error", access_log=False))
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [listener]}, daemon=True)
        self._thread.start()
        super().__init__(f"http://127.0.0.1:{listener.getsockname()[1]}")

    def close(self) -> None:
        self.engine.scheduler.fail("the test is over")
        super().close()
        self._server.should_exit = True
        self._thread.join(10)
        self.engine.close()


def wait_until(condition: Callable[[], bool], timeout: float = 20) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.005)


def _auth(key: str | None) -> dict[str, str]:
    return {} if key is None else {"Authorization": f"Bearer {key}"}
