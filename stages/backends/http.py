"""The one HTTP client: pooled, bounded in time, no proxy, no redirects, errors that carry the engine's words."""

from __future__ import annotations

import http.client
import io
import json
import select
import socket
import ssl
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from stages.backends.actor import Actor
from stages.errors import EngineError, EngineUnreachable

_IDLE_CONNECTIONS = 16  # kept per engine and key
_LARGEST_ANSWER = 64 << 20  # bytes; the digests of 100,000 tensors are 8 MB


@dataclass(frozen=True, slots=True)
class Answer:
    """What an engine answered, whatever its status."""

    status_code: int
    content: bytes
    content_type: str

    @property
    def text(self) -> str:
        return self.content.decode("utf-8", "replace")

    def json(self) -> Any:
        """Raises ValueError for anything else."""
        return json.loads(self.content)


class Http:
    """Requests to one engine with one key. Thread-safe for concurrent calls.

    Raises EngineUnreachable when no answer came, EngineError for any answer that is not 2xx. Straight over http.client, which
    knows of no proxies, redirects or .netrc and takes an eighth of the time per call that the usual packages take: it is
    what an engine waits for between two buckets.
    """

    def __init__(self, base: str, key: str | None, connect_timeout: float, secrets: Iterable[str | None] = ()) -> None:
        """`secrets` are further texts, besides the key, that must not come back in an error."""
        self.base = base.rstrip("/")
        self._secrets = sorted({form for s in (key, *secrets) if s for form in (s, json.dumps(s)[1:-1])}, key=len)
        self._connect = connect_timeout
        parts = urlsplit(self.base)
        self._host, self._port, self._path = (
            parts.hostname or "",
            parts.port,
            quote(parts.path, safe="/%:@!$&'()*+,;=~"),
        )
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._idle: list[http.client.HTTPConnection] = []
        self._lock = threading.Lock()

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

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
        if "json" not in response.content_type:
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
    ) -> Answer:
        """The answer whatever its status, whole within `timeout` seconds.

        Idempotent requests are tried again once if a pooled connection was stale.
        """
        # LMDeploy demands a JSON content type even where there is no body.
        headers = self._headers | ({"Content-Type": "application/json"} if method == "POST" else {})
        data = None if body is None else json.dumps(body).encode()
        target = self._path + path + (f"?{urlencode(query)}" if query else "")
        tries = 2 if method == "GET" else 1
        for attempt in range(tries):
            try:
                return self._exchange(method, target, data, headers, timeout)
            except TimeoutError as error:
                raise EngineUnreachable(self.base, phase, f"{method} {path}: no answer within {timeout} s") from error
            except (OSError, http.client.HTTPException) as error:
                if attempt + 1 == tries:
                    raise EngineUnreachable(
                        self.base, phase, f"{method} {path}: connection failed or dropped: {_cause(error)}"
                    ) from error
        raise AssertionError("unreachable")

    def _exchange(
        self, method: str, target: str, data: bytes | None, headers: dict[str, str], timeout: float
    ) -> Answer:
        deadline = time.monotonic() + timeout
        connection = self._connection()
        try:
            connection.sock.settimeout(timeout)
            connection.request(method, target, data, headers)
            connection.response_class = partial(_Response, deadline)  # type: ignore[assignment]
            response = connection.getresponse()
            answer = Answer(response.status, _body(response), response.headers.get("content-type", ""))
        except BaseException:
            connection.close()
            raise
        with self._lock:
            # A server may close after an error, a moment after it said so: too late for the next call to notice.
            keep = response.status < 400 and not response.will_close and len(self._idle) < _IDLE_CONNECTIONS
            if keep:
                self._idle.append(connection)
        if not keep:
            connection.close()
        return answer

    def _connection(self) -> http.client.HTTPConnection:
        """One that is open: the last one used, unless the engine has closed it meanwhile (some do after 5 s)."""
        while True:
            with self._lock:
                connection = self._idle.pop() if self._idle else None
            if connection is None:
                break
            if not _readable(connection.sock):
                return connection
            connection.close()
        if self._tls is None:
            connection = http.client.HTTPConnection(self._host, self._port, timeout=self._connect)
        else:
            connection = http.client.HTTPSConnection(self._host, self._port, timeout=self._connect, context=self._tls)
        connection.connect()
        return connection

    def clean(self, text: str) -> str:
        """Without our keys, should the answer repeat them."""
        for secret in reversed(self._secrets):
            text = text.replace(secret, "***")
        return text


class _Response(http.client.HTTPResponse):
    """One that has to be whole by a point in time: a server that drips a byte now and then does not get more."""

    def __init__(self, deadline: float, sock: socket.socket, *args: Any, **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        raw = self.fp.detach()
        self.fp = io.BufferedReader(_Until(deadline, sock, raw))


class _Until(io.RawIOBase):
    """What a socket still brings before `deadline` (time.monotonic)."""

    def __init__(self, deadline: float, sock: socket.socket, raw: io.RawIOBase) -> None:
        self._deadline, self._sock, self._raw = deadline, sock, raw

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        self._sock.settimeout(left)
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


def _body(response: http.client.HTTPResponse) -> bytes:
    """Raises HTTPException for one that is too large, cut short, or of two lengths."""
    if len(set(response.headers.get_all("content-length", ()))) > 1:
        raise http.client.HTTPException("the answer states two lengths")
    data = response.read(_LARGEST_ANSWER + 1)
    if len(data) > _LARGEST_ANSWER:
        raise http.client.HTTPException(f"the answer is larger than {_LARGEST_ANSWER >> 20} MiB")
    if response.length:
        raise http.client.IncompleteRead(data, response.length)
    return data


def expect_dict(http: Http | Actor, answer: Any, phase: str, path: str) -> dict[str, Any]:
    """The answer if it is a JSON object. Raises EngineError otherwise (an HTML page with 200, a list, nothing)."""
    if isinstance(answer, dict):
        return answer
    words = http.clean(str(answer))
    raise EngineError(http.base, phase, f"{path} answered no JSON object: {words[:200]!r}", body=words)


def _words(response: Answer) -> str:
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


def _readable(sock: socket.socket) -> bool:
    """Whether something waits to be read: on an idle connection that can only be its end."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))
