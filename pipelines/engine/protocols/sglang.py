"""SGLang 0.5.23: sessions, three pause modes, versions, two keys. 0.5.20 is the same without session routes.

An unpaused update waits for running requests and keeps new ones out; a paused one goes at once. What raises inside the
scheduler ends the whole server.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import xxhash
from starlette.datastructures import Headers
from starlette.responses import JSONResponse, PlainTextResponse, Response

from pipelines.engine.engine import Engine, FatalError
from pipelines.engine.generation import Generation
from pipelines.engine.loading.base import Outcome
from pipelines.engine.protocols.base import Protocol
from pipelines.engine.protocols.rwlock import ReadersWriter
from pipelines.engine.protocols.sglang_generate import SglangGenerate
from pipelines.engine.schema import (
    Field,
    InvalidRequestError,
    boolean,
    integer,
    list_of,
    number,
    one_of,
    optional,
    text,
)
from pipelines.engine.web import Call, Endpoint, answer, has_key

_OPEN_PREFIXES = ("/health", "/ready", "/metrics")
_PARTIAL = "The full weights of the ModelRunner are partially updated. Please discard the whole weights."
_NOT_FLUSHED = (
    "Weights were updated, but the cache was not flushed because requests are still running or queued. "
    "Retract or finish them, then call /flush_cache."
)
_SELECTOR = Field("selector", one_of("target", "draft", "all"), "all")
_UPDATE = (
    Field("load_format", optional(text), None),
    Field("flush_cache", boolean, True),
    Field("abort_all_requests", boolean, False),
    Field("weight_version", optional(text), None),
)


class Sglang(Protocol):
    """`model_version` is what /model_info shows; the scheduler's own version labels tokens and moves first."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.sessions = engine.settings.version != "0.5.20"
        self.session = False
        self.pause_mode: str | None = None
        self.lock = ReadersWriter()
        self.model_path = engine.settings.model
        self.released: set[str] = set()
        engine.scheduler.version = "default"
        self.generation = SglangGenerate(self)

    def endpoints(self) -> list[Endpoint]:
        both = ("GET", "POST")
        routes = [
            *self.generation.endpoints(),
            Endpoint("/flush_cache", self.flush_cache, both, admin=True),
            Endpoint("/pause_generation", self.pause, admin=True),
            Endpoint("/continue_generation", self.resume, admin=True),
            Endpoint("/abort_request", self.abort_request, admin=True),
            Endpoint("/update_weights_from_tensor", self.update_tensor, admin=True),
            Endpoint("/update_weights_from_distributed", self.update_distributed, admin=True),
            Endpoint("/update_weights_from_disk", self.update_disk, admin=True),
            Endpoint("/update_weights_from_ipc", self.update_ipc, admin=True),
            Endpoint("/init_weights_update_group", self.init_group, admin=True),
            Endpoint("/destroy_weights_update_group", self.destroy_group, admin=True),
            Endpoint("/update_weight_version", self.update_version, admin=True),
            Endpoint("/weights_checker", self.check_weights, both, admin=True),
            Endpoint("/get_weights_by_name", self.weights_by_name, both, admin=True),
            Endpoint("/release_memory_occupation", self.release_memory, both, admin=True),
            Endpoint("/resume_memory_occupation", self.resume_memory, both, admin=True),
        ]
        if self.sessions:
            routes.append(Endpoint("/begin_weight_update", self.begin, admin=True))
            routes.append(Endpoint("/end_weight_update", self.end, admin=True))
        else:
            routes.append(Endpoint("/get_weight_version", self.weight_version, ("GET",)))
        return routes

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
        return {"paused": self.pause_mode, "sleeping": sorted(self.released), "session": self.session}

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
        if self._flush(timeout):
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

    # the session

    def begin(self, call: Call) -> Response:
        call.read(_SELECTOR)
        with self._control():
            if self.session:
                return self._result(False, "a weight-update session is already open; call end_weight_update() first")
            self.session = True
            return self._result(True, "Success")

    def end(self, call: Call) -> Response:
        call.read()
        with self._control():
            if not self.session:
                return self._result(False, "no weight-update session is open; call begin_weight_update() first")
            self.engine.control("post_process")
            self.session = False
            return self._result(True, "Success", self.engine.ledger.commit())

    # updates

    def update_tensor(self, call: Call) -> Response:
        body = call.read(
            Field("serialized_named_tensors", list_of(_base64)),
            *_UPDATE,
            _SELECTOR,
            Field("torch_empty_cache", boolean, False),
        )
        self._abort_if(body)
        with self._control():
            if refused := self._needs_session("update_weights_from_tensor"):
                return refused
            payloads = body["serialized_named_tensors"]
            outcome = self.engine.apply("update_tensor", payloads, body["load_format"])
            if outcome.error is not None:
                raise FatalError(outcome.error, "the scheduler raises, and the server's whole process tree ends")
            return self._updated(outcome, "Success", body)

    def update_distributed(self, call: Call) -> Response:
        body = call.read(
            Field("names", list_of(text)),
            Field("dtypes", list_of(text)),
            Field("shapes", list_of(list_of(integer))),
            Field("group_name", text, "weight_update_group"),
            *_UPDATE,
            _SELECTOR,
            Field("torch_empty_cache", boolean, False),
        )
        self._abort_if(body)
        with self._control():
            if refused := self._needs_session("update_weights_from_distributed"):
                return refused
            arguments = [body[k] for k in ("names", "dtypes", "shapes", "group_name", "load_format")]
            outcome = self.engine.apply("update_distributed", *arguments)
            if outcome.error is not None and outcome.stage == "receive":
                return self._result(False, f"Failed to receive weights: {outcome.error}")
            if outcome.error is not None:
                return self._result(False, f"Failed to update parameter online: {outcome.error}. {_PARTIAL}")
            return self._updated(outcome, "Succeeded to update parameter online.", body)

    def update_disk(self, call: Call) -> Response:
        body = call.read(
            Field("model_path", text),
            *_UPDATE,
            Field("is_async", boolean, False),
            Field("torch_empty_cache", boolean, False),
            Field("keep_pause", boolean, False),
            Field("recapture_cuda_graph", boolean, False),
            Field("token_step", integer, 0),
        )
        self._abort_if(body)
        with self._control():
            outcome = self.engine.apply("update_disk", body["model_path"])
            extra = {"num_paused_requests": 0}
            if outcome.error is not None and outcome.stage == "receive":
                return self._result(False, f"Failed to get weights iterator: {outcome.error}.", extra=extra)
            if outcome.error is not None:
                words = f"Failed to update weights: {outcome.error}.\nRolling back to original weights."
                return self._result(False, words, ["the rollback reads the new path again"], extra=extra)
            self.model_path = body["model_path"]
            notes = outcome.notes + self.engine.ledger.commit()
            outcome = Outcome(outcome.applied, notes)
            return self._updated(outcome, "Succeeded to update model weights.", body, extra=extra)

    def update_ipc(self, call: Call) -> Response:
        call.read(Field("zmq_handles", lambda value: value))
        words = "IPC weight update failed: ImportError checkpoint-engine is not installed"
        return self._result(False, words)

    def init_group(self, call: Call) -> Response:
        body = call.read(
            Field("master_address", text),
            Field("master_port", integer),
            Field("rank_offset", integer),
            Field("world_size", integer),
            Field("group_name", text, "weight_update_group"),
            Field("backend", text, "nccl"),
        )
        if not body["group_name"]:
            raise FatalError("Group name cannot be empty", "an assertion in the scheduler ends the server")
        if body["group_name"] in self.engine.loader.groups:
            words = "The specified group name has already been created, please use a different group name"
            return self._result(False, f"Failed to initialize custom process group: {words}.")
        outcome = self.engine.join_group(body)
        if outcome.error is not None:
            return self._result(False, f"Failed to initialize custom process group: {outcome.error}.")
        return self._result(True, "Succeeded to initialize custom process group.")

    def destroy_group(self, call: Call) -> Response:
        name = call.read(Field("group_name", text, "weight_update_group"))["group_name"]
        if name not in self.engine.loader.groups:
            return self._result(False, "The group to be destroyed does not exist.")
        self.engine.control("leave_group", name)
        return self._result(True, "Succeeded to destroy custom process group.")

    # version and verification

    def update_version(self, call: Call) -> Response:
        body = call.read(Field("new_version", text), Field("abort_all_requests", boolean, True))
        self._abort_if(body)
        self.engine.set_version(body["new_version"])
        words = f"Weight version updated to {body['new_version']}"
        return self._result(True, words, extra={"new_version": body["new_version"]})

    def weight_version(self, call: Call) -> Response:
        return answer({"weight_version": self.engine.version or "default"})

    def check_weights(self, call: Call) -> Response:
        body = {"action": "checksum", "skip_tensor_list": None}
        if call.data:
            body = call.read(
                Field("action", text, "checksum"),
                Field("allow_quant_error", boolean, False),
                Field("skip_tensor_list", optional(list_of(text)), None),
                _SELECTOR,
            )
        if body["action"] != "checksum":
            return self._result(False, f"Unsupported action={body['action']!r}")
        per_rank = self.engine.control("checksums", body["skip_tensor_list"] or [])
        return self._result(True, "Success.", extra=_checksum_report(per_rank))

    def weights_by_name(self, call: Call) -> Response:
        body = call.read(Field("name", text), Field("truncate_size", integer, 100))
        tensor = self.engine.model.weights.tensors.get(body["name"])
        if "llama" not in str(self.engine.model.config.model_type) or tensor is None:
            return JSONResponse({"error": {"message": "Get parameter by name failed"}}, 400)
        return answer(tensor[: body["truncate_size"]].float().tolist())

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
    def _control(self) -> Iterator[None]:
        """Paused: at once. Otherwise alone, after the running requests, with new ones kept out."""
        if self.paused:
            yield
        else:
            with self.lock.writing():
                yield

    def _needs_session(self, route: str) -> Response | None:
        if not self.sessions or self.session:
            return None
        return self._result(False, f"{route} must run between begin_weight_update() and end_weight_update()")

    def _abort_if(self, body: dict[str, Any]) -> None:
        if body["abort_all_requests"]:
            self.engine.scheduler.abort()

    def _updated(
        self,
        outcome: Outcome,
        message: str,
        body: dict[str, Any],
        *,
        extra: dict[str, Any] | None = None,
    ) -> Response:
        """The end of every update that went in: version, flush, answer."""
        version = body["weight_version"]
        if version is not None:
            self.engine.scheduler.version = version
        if not self.sessions:
            self.engine.ledger.half_loaded = None
        if body["flush_cache"] and not self._flush(0):
            return self._result(False, _NOT_FLUSHED, ["the weights have changed all the same"], extra=extra)
        if version is not None:
            self.engine.version = version
            message += f" Weight version updated to {version}."
        return self._result(True, message, outcome.notes, extra=extra)

    def _flush(self, timeout: float) -> bool:
        """Refused while something runs; what waits does not matter while paused in the scheduler."""
        scheduler = self.engine.scheduler
        frozen = self.pause_mode in ("retract", "in_place")
        idle: Callable[[], bool] = lambda: not scheduler.running and (frozen or not scheduler.waiting)  # noqa: E731
        deadline = time.monotonic() + timeout
        while not idle() and time.monotonic() < deadline:
            time.sleep(0.01)
        if not idle():
            return False
        scheduler.flush()
        return True

    def _result(
        self, success: bool, message: str, notes: list[str] | None = None, *, extra: dict[str, Any] | None = None
    ) -> Response:
        content = {"success": success, "message": message} | (extra or {})
        return answer(content, 200 if success else 400, notes)


def _base64(value: Any) -> bytes:
    try:
        return base64.b64decode(text(value), validate=True)
    except binascii.Error as error:
        raise ValueError(f"Base64 decoding error: {error}") from error


def _checksum_report(per_rank: list[dict[str, str]]) -> dict[str, Any]:
    ranks: list[dict[str, Any]] = []
    totals: list[str] = []
    for rank, checksums in enumerate(per_rank):
        place = {"role": "target", "tp_rank": rank, "tp_size": len(per_rank), "rank": rank, "size": len(per_rank)}
        place |= {"dp_rank": 0, "dp_size": 1, "pp_rank": 0, "pp_size": 1}
        total = xxhash.xxh3_64_hexdigest("".join(checksums[name] for name in sorted(checksums)).encode())
        totals.append(total)
        ranks.append({"checksums": checksums, "per_gpu_checksum": total, "parallelism_info": [place]})
    engine = xxhash.xxh3_64_hexdigest("".join(totals).encode())
    return {"ranks": ranks, "per_engine_checksum": engine}
