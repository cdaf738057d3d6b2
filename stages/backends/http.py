"""The one HTTP client: pooled, bounded in time, no proxy, no redirects, errors that carry the engine's words."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import requests
from requests.adapters import HTTPAdapter

from stages.errors import EngineError, EngineUnreachable


class Http:
    """Requests to one engine with one key. Thread-safe for concurrent calls.

    Raises EngineUnreachable when no answer came, EngineError for any answer that is not 2xx.
    """

    def __init__(self, base: str, key: str | None, connect_timeout: float, secrets: Iterable[str | None] = ()) -> None:
        """`secrets` are further texts, besides the key, that must not come back in an error."""
        self.base = base.rstrip("/")
        self._secrets = sorted({form for s in (key, *secrets) if s for form in (s, json.dumps(s)[1:-1])}, key=len)
        self._connect = connect_timeout
        self._session = requests.Session()
        self._session.trust_env = False  # proxy variables and .netrc never apply to engines
        if key:
            self._session.headers["Authorization"] = f"Bearer {key}"
        adapter = HTTPAdapter(pool_connections=1, pool_maxsize=16)
        self._session.mount("http://", adapter)
        self._session.mount("https://", adapter)

    def close(self) -> None:
        self._session.close()

    def get(self, path: str, phase: str, timeout: float, query: dict[str, Any] | None = None) -> Any:
        return self.call("GET", path, phase, timeout, query=query)

    def post(self, path: str, phase: str, timeout: float, body: Any = None, query: dict[str, Any] | None = None) -> Any:
        return self.call("POST", path, phase, timeout, body=body, query=query)

    def call(
        self,
        method: str,
        path: str,
        phase: str,
        timeout: float,
        *,
        body: Any = None,
        query: dict[str, Any] | None = None,
    ) -> Any:
        """The parsed JSON answer, or its text where the engine answers text. None for an empty body."""
        response = self.raw(method, path, phase, timeout, body=body, query=query)
        if not 200 <= response.status_code < 300:
            raise EngineError(
                self.base,
                phase,
                f"{method} {path} answered {response.status_code}: {self.clean(_words(response))}",
                status=response.status_code,
                body=self.clean(response.text),
            )
        if not response.content:
            return None
        if "json" not in response.headers.get("content-type", ""):
            return response.text
        try:
            return response.json()
        except ValueError as error:
            raise EngineError(
                self.base,
                phase,
                f"{method} {path} answered {response.status_code} with broken JSON: {self.clean(_words(response))}",
                status=response.status_code,
                body=self.clean(response.text),
            ) from error

    def raw(
        self,
        method: str,
        path: str,
        phase: str,
        timeout: float,
        *,
        body: Any = None,
        query: dict[str, Any] | None = None,
    ) -> requests.Response:
        """The answer whatever its status. Idempotent requests are tried again once if a pooled connection was stale."""
        # LMDeploy demands a JSON content type even where there is no body.
        headers = {"Content-Type": "application/json"} if method == "POST" else {}
        data = None if body is None else json.dumps(body)
        tries = 2 if method == "GET" else 1
        for attempt in range(tries):
            try:
                return self._session.request(
                    method,
                    self.base + path,
                    data=data,
                    params=query,
                    headers=headers,
                    timeout=(self._connect, timeout),
                    allow_redirects=False,
                )
            except requests.Timeout as error:
                raise EngineUnreachable(self.base, phase, f"{method} {path}: no answer within {timeout} s") from error
            except requests.RequestException as error:
                if attempt + 1 == tries:
                    raise EngineUnreachable(
                        self.base, phase, f"{method} {path}: connection failed or dropped: {_cause(error)}"
                    ) from error
        raise AssertionError("unreachable")

    def clean(self, text: str) -> str:
        """Without our keys, should the answer repeat them."""
        for secret in reversed(self._secrets):
            text = text.replace(secret, "***")
        return text


def expect_dict(http: Http, answer: Any, phase: str, path: str) -> dict[str, Any]:
    """The answer if it is a JSON object. Raises EngineError otherwise (an HTML page with 200, a list, nothing)."""
    if isinstance(answer, dict):
        return answer
    words = http.clean(str(answer))
    raise EngineError(http.base, phase, f"{path} answered no JSON object: {words[:200]!r}", body=words)


def _words(response: requests.Response) -> str:
    """What the engine said, wherever it put it."""
    try:
        data = response.json()
    except ValueError:
        return response.text.strip()[:500] or "(empty body)"
    if isinstance(data, dict):
        error = data.get("error")
        for holder in (error if isinstance(error, dict) else data, data):
            for name in ("message", "detail", "error"):
                if holder.get(name):
                    return str(holder[name])[:500]
    return str(data)[:500]


def _cause(error: Exception) -> str:
    root: BaseException = error
    while root.__cause__ or root.__context__:
        root = root.__cause__ or root.__context__  # type: ignore[assignment]
    return f"{type(root).__name__}: {root}"
