"""An engine that is a Ray actor instead of a server: the same calls as stages/backends/http.py makes, to the actor's methods.

A route is the method of that name: POST /update_weights is `update_weights`, GET /v1/models is `v1_models`; fields of the body
and of the query are its keyword arguments, and what it returns is the answer. An actor without such a method may have
`request(method, path, body, query)`, which takes any route and returns `(status, answer)`: handy for one that wraps a server.
An exception with an attribute `status` stands for that HTTP status, any other for 500.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from stages.errors import EngineError, EngineUnreachable

SCHEME = "ray://"

_handles: dict[str, Any] = {}  # address -> handle that a caller gave us


@dataclass(frozen=True, slots=True)
class Answer:
    """The part of a `requests.Response` that adapters read."""

    status_code: int
    value: Any

    @property
    def text(self) -> str:
        return self.value if isinstance(self.value, str) else json.dumps(self.value, default=str)

    def json(self) -> Any:
        return self.value


def is_handle(engine: Any) -> bool:
    """Whether this is what `ray.remote(Class).remote(...)` returns. Does not import Ray."""
    return type(engine).__name__ == "ActorHandle" and type(engine).__module__.startswith("ray.")


def address_of(handle: Any) -> str:
    """The address under which an actor's handle is known from here on."""
    address = f"{SCHEME}{handle._actor_id.hex()}"
    _handles[address] = handle
    return address


class Actor:
    """Calls of one actor; the counterpart of `Http`. Thread-safe as far as the actor is.

    `base` is ray://[namespace/]name, or what `address_of` returned.
    """

    def __init__(self, base: str) -> None:
        self.base = base
        self._handle = _handles.get(base)
        self._given = self._handle is not None

    def close(self) -> None:
        _handles.pop(self.base, None)

    @property
    def identity(self) -> str:
        """The address by id: a name is one within its cluster only. Raises EngineUnreachable."""
        return f"{SCHEME}{self._find('probe')._actor_id.hex()}"

    def clean(self, text: str) -> str:
        """The same: an actor is sent no keys."""
        return text

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
        """What the actor answers. Raises EngineUnreachable when it is dead or silent, EngineError when it refuses."""
        answer = self.raw(method, path, phase, timeout, body=body, query=query)
        if not 200 <= answer.status_code < 300:
            words = f"{method} {path} answered {answer.status_code}: {_words(answer)}"
            raise EngineError(self.base, phase, words, status=answer.status_code, body=answer.text)
        return answer.value

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
        """The answer whatever its status."""
        import ray
        from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

        handle, route = self._find(phase), path.strip("/").replace("/", "_")
        try:
            if hasattr(handle, route):
                return Answer(
                    200, ray.get(getattr(handle, route).remote(**(query or {}), **(body or {})), timeout=timeout)
                )
            if hasattr(handle, "request"):
                status, value = ray.get(handle.request.remote(method, path, body, query), timeout=timeout)
                return Answer(status, value)
        except GetTimeoutError as error:
            raise EngineUnreachable(self.base, phase, f"{method} {path}: no answer within {timeout} s") from error
        except RayActorError as error:
            if not self._given:
                self._handle = None  # a new actor may take the name
            raise EngineUnreachable(self.base, phase, f"{method} {path}: the actor is dead: {brief(error)}") from error
        except RayTaskError as error:
            cause = error.cause if isinstance(error.cause, BaseException) else error
            return Answer(int(getattr(cause, "status", 500)), f"{type(cause).__name__}: {brief(cause)}")
        return Answer(404, f"the actor has no method {route!r}, and no method 'request' that takes any route")

    def _find(self, phase: str) -> Any:
        if self._handle is None:
            import ray

            namespace, _, name = self.base.removeprefix(SCHEME).rpartition("/")
            try:
                self._handle = ray.get_actor(name, namespace=namespace or None)
            except Exception as error:  # ValueError where there is none; else what ray says of its own state
                raise EngineUnreachable(self.base, phase, f"there is no such actor: {brief(error)}") from error
        return self._handle


def _words(answer: Answer) -> str:
    if isinstance(answer.value, dict):
        error = answer.value.get("error", answer.value)
        for name in ("message", "detail"):
            if isinstance(error, dict) and error.get(name):
                return str(error[name])[:500]
    return answer.text[:500]


def brief(error: BaseException) -> str:
    """Ray's messages are pages; the part that says what happened, in one line."""
    return " ".join(str(error).split())[:500]
