"""What the HTTP sides of all engines share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response

from pipelines.engine.engine import Engine, FatalError
from pipelines.engine.generation import Generation
from pipelines.engine.schema import InvalidRequestError
from pipelines.engine.web import REAL_ENGINE, Call, Endpoint, has_key


class Protocol(ABC):
    """One engine's routes over an `Engine`. Its errors have that engine's shape."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.settings = engine.settings

    @abstractmethod
    def endpoints(self) -> list[Endpoint]:
        """Every route of the engine."""

    @abstractmethod
    def error(self, status: int, message: str) -> dict[str, Any]:
        """The body of an error answer."""

    @abstractmethod
    def invalid(self, problem: InvalidRequestError) -> Response:
        """The answer to a request that the framework refuses."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """`paused`, `sleeping` and `session`."""

    def gate(self, method: str, path: str, headers: Headers, admin: bool) -> Response | None:
        """The answer to a request that must not reach its handler: no key, asleep. None lets it pass."""
        return None

    def refuses_generation(self) -> Response | None:
        """The answer to a new request that the engine does not even queue now."""
        return None

    def run(self, generation: Generation, call: Call) -> Generation:
        """Run a request under the engine's own rules for pauses."""
        return self.engine.generate(generation, call.gone)

    def guarded_by_key(self, headers: Headers) -> Response | None:
        """Our own routes ask for the key of the generation routes."""
        key = self.settings.api_key
        return JSONResponse(self.error(401, "Unauthorized"), 401) if key and not has_key(headers, key) else None

    def fatal(self, fatal: FatalError) -> Response:
        """The answer where the real engine's process ends."""
        return JSONResponse(self.error(500, str(fatal)) | {REAL_ENGINE: fatal.real_engine}, 500)

    def crash(self, error: Exception) -> Response:
        """The answer to an exception that the engine's framework turns into a 500."""
        return JSONResponse(self.error(500, f"{type(error).__name__}: {error}"), 500)

    def dead(self) -> Response:
        """The answer of an engine that would not be there any more."""
        reason = f"the engine is dead: {self.engine.dead}; restart it"
        return JSONResponse(self.error(503, reason) | {REAL_ENGINE: "the connection is refused"}, 503)
