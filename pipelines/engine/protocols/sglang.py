"""SGLang 0.5.23: sessions, three pause modes, versions, two keys. 0.5.20 is the same without session routes.

An unpaused update waits for running requests and keeps new ones out; a paused one goes at once. What raises inside the
scheduler ends the whole server.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import JSONResponse, PlainTextResponse, Response

from pipelines.engine.engine import Engine, FatalError
from pipelines.engine.generation import Generation
from pipelines.engine.protocols.base import Protocol
from pipelines.engine.protocols.rwlock import ReadersWriter
from pipelines.engine.protocols.sglang_generate import SglangGenerate
from pipelines.engine.protocols.sglang_updates import SglangUpdates
from pipelines.engine.schema import Field, InvalidRequestError, boolean, list_of, number, one_of, optional, text
from pipelines.engine.web import Call, Endpoint, answer, has_key

_OPEN_PREFIXES = ("/health", "/ready", "/metrics")


class Sglang(Protocol):
    """`model_path` is what /model_info shows: an update from a folder moves it."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.pause_mode: str | None = None
        self.lock = ReadersWriter()
        self.model_path = engine.settings.model
        self.released: set[str] = set()
        engine.scheduler.version = "default"
        self.generation = SglangGenerate(self)
        self.updates = SglangUpdates(self)
        self._paused_calls = threading.Lock()

    def endpoints(self) -> list[Endpoint]:
        both = ("GET", "POST")
        return [
            *self.generation.endpoints(),
            *self.updates.endpoints(),
            Endpoint("/flush_cache", self.flush_cache, both, admin=True),
            Endpoint("/pause_generation", self.pause, admin=True),
            Endpoint("/continue_generation", self.resume, admin=True),
            Endpoint("/abort_request", self.abort_request, admin=True),
            Endpoint("/release_memory_occupation", self.release_memory, both, admin=True),
            Endpoint("/resume_memory_occupation", self.resume_memory, both, admin=True),
        ]

    def error(self, status: int, message: str) -> dict[str, Any]:
        kind = "Bad Request" if status == 400 else str(status)
        return {"object": "error", "message": message, "type": kind, "param": None, "code": status}

    def invalid(self, problem: InvalidRequestError) -> Response:
        lines = "\n".join(f"  {p.pydantic()}" for p in problem.problems)
        count = len(problem.problems)
        return JSONResponse(self.error(400, f"{count} validation error{'s' if count > 1 else ''}:\n{lines}"), 400)

    def gate(self, method: str, path: str, headers: Headers, admin: bool) -> Response | None:
        keys = self.settings
        wanted = (keys.admin_key or keys.api_key) if admin else keys.api_key
        if path.startswith(_OPEN_PREFIXES) or not wanted or has_key(headers, wanted):
            return None
        return JSONResponse({"error": "Unauthorized"}, 401)

    def crash(self, error: Exception) -> Response:
        return PlainTextResponse("Internal Server Error", 500)

    def state(self) -> dict[str, Any]:
        return {"paused": self.pause_mode, "sleeping": sorted(self.released), "session": self.updates.open}

    def run(self, generation: Generation, call: Call) -> Generation:
        return self.generation.run(generation, call)

    @property
    def paused(self) -> bool:
        return self.pause_mode is not None

    # pause, flush, abort

    def pause(self, call: Call) -> Response:
        mode = call.read(Field("mode", one_of("abort", "retract", "in_place"), "abort"))["mode"]
        self.pause_mode = mode
        scheduler = self.engine.scheduler
        if mode == "abort":
            while self.lock.held:
                scheduler.abort()
                time.sleep(0.02)
        else:
            scheduler.freeze()
            if mode == "retract":
                scheduler.retract()
        return answer({"message": "Generation paused successfully.", "status": "ok"})

    def resume(self, call: Call) -> Response:
        call.read(Field("torch_empty_cache", boolean, True))
        self.pause_mode = None
        self.engine.scheduler.thaw()
        self.generation.wake()
        words = self.engine.ledger.half_loaded
        notes = [f"it serves although {words}"] if words else None
        return answer({"message": "Generation continued successfully.", "status": "ok"}, notes=notes)

    def flush_cache(self, call: Call) -> Response:
        timeout = call.argument("timeout", number, 0.0)
        if self.flush(timeout):
            words = (
                "Cache flushed.\nPlease check backend logs for more details. "
                "(When there are running or waiting requests, the operation will not be performed.)\n"
            )
            return PlainTextResponse(words)
        return PlainTextResponse("Flush cache failed.\n", 400)

    def abort_request(self, call: Call) -> Response:
        body = call.read(Field("rid", optional(text), None), Field("abort_all", boolean, False))
        self.engine.scheduler.abort(None if body["abort_all"] else [body["rid"] or ""])
        return Response(status_code=200)

    # memory: bookkeeping only, as without --enable-memory-saver

    def release_memory(self, call: Call) -> Response:
        tags = call.read(Field("tags", optional(list_of(text)), None))["tags"]
        scheduler = self.engine.scheduler
        if scheduler.running or (scheduler.waiting and not scheduler.frozen):
            raise FatalError(
                "release_memory_occupation should be called only when server is idle.",
                "an assertion in the scheduler ends the server",
            )
        self.released |= set(tags or ("kv_cache", "weights", "cuda_graph"))
        if "kv_cache" in self.released:
            scheduler.flush()
        return answer(None)

    def resume_memory(self, call: Call) -> Response:
        tags = call.read(Field("tags", optional(list_of(text)), None))["tags"]
        wanted = set(tags or ("kv_cache", "weights", "cuda_graph"))
        if wanted - self.released:
            raise FatalError(
                f"KeyError: {sorted(wanted - self.released)[0]!r}", "the scheduler raises and the server ends"
            )
        self.released -= wanted
        return answer(None)

    # shared

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """One call at a time. Paused: at once. Otherwise after the running requests, with new ones kept out."""
        with self._paused_calls if self.paused else self.lock.writing():
            yield

    def abort_if(self, body: dict[str, Any]) -> None:
        if body["abort_all_requests"]:
            self.engine.scheduler.abort()

    def flush(self, timeout: float) -> bool:
        """Refused while something runs; what waits does not matter while paused in the scheduler.

        With a timeout it does matter: the wait is for a scheduler without any request.
        """
        scheduler = self.engine.scheduler
        deadline = time.monotonic() + timeout
        while timeout and (scheduler.running or scheduler.waiting):
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.01)
        if scheduler.running or (scheduler.waiting and self.pause_mode not in ("retract", "in_place")):
            return False
        scheduler.flush()
        return True
