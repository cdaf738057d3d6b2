"""What handlers get and give: a plain call in, a JSON response out."""

from __future__ import annotations

import hashlib
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers, QueryParams
from starlette.responses import JSONResponse, Response

from pipelines.engine.schema import Field, InvalidRequestError, Problem, parse_json, read

REAL_ENGINE = "real_engine"
REAL_ENGINE_HEADER = "x-weightstream-real-engine"
NOTES_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Call:
    """One request, read whole. Its parts raise InvalidRequestError for what the engine's framework would refuse.

    `gone` is set when the client closed its connection.
    """

    method: str
    path: str
    query: QueryParams
    headers: Headers
    data: bytes
    gone: threading.Event

    def json(self) -> Any:
        return parse_json(self.data, self.headers.get("content-type", ""))

    def read(self, *fields: Field) -> dict[str, Any]:
        return read(self.json(), *fields)

    def argument(self, name: str, check: Callable[[Any], Any], default: Any) -> Any:
        """A query argument."""
        value = self.query.get(name)
        if value is None:
            return default
        try:
            return check(value)
        except ValueError as error:
            raise InvalidRequestError(Problem(("query", name), str(error), "value_error")) from error


Handler = Callable[[Call], Response]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A path, its methods and its handler. `admin` routes are guarded by the admin key where an engine has one."""

    path: str
    handler: Handler
    methods: tuple[str, ...] = ("POST",)
    admin: bool = False


def answer(content: Any, status: int = 200, notes: list[str] | None = None) -> JSONResponse:
    """A JSON answer; `notes` are what the real engine accepts without a word."""
    if not notes:
        return JSONResponse(content, status)
    shown = notes[:NOTES_SHOWN] + ([f"and {len(notes) - NOTES_SHOWN} more"] if len(notes) > NOTES_SHOWN else [])
    words = "accepts silently: " + "; ".join(shown)
    if isinstance(content, dict):
        return JSONResponse(content | {REAL_ENGINE: words}, status)
    return JSONResponse(content, status, headers=note_header(words))


def note_header(words: str) -> dict[str, str]:
    """The note as a header, for answers whose body has no place for it."""
    plain = words[:500].encode("ascii", "backslashreplace").decode().replace("\n", " ").replace("\r", " ")
    return {REAL_ENGINE_HEADER: plain}


def has_key(headers: Headers, key: str) -> bool:
    """Whether the request carries this bearer key; compared in constant time."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    same = secrets.compare_digest(_hash(token), _hash(key))
    return scheme.lower() == "bearer" and same


def _hash(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()
