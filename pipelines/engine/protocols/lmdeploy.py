"""LMDeploy 0.18.0, PyTorch engine: sleep, wake, update, finish; no version, no session, errors without words."""

from __future__ import annotations

from typing import Any

from starlette.datastructures import Headers
from starlette.responses import JSONResponse, PlainTextResponse, Response

from pipelines.engine.engine import Engine
from pipelines.engine.loading.base import Outcome
from pipelines.engine.loading.lmdeploy import LmdeployLoader
from pipelines.engine.protocols.base import Protocol
from pipelines.engine.protocols.completions import Completions, token_answer
from pipelines.engine.schema import (
    Field,
    InvalidRequestError,
    Problem,
    boolean,
    either,
    integer,
    list_of,
    mapping,
    number,
    optional,
    text,
)
from pipelines.engine.web import Call, Endpoint, answer, has_key, note_header

_OPEN_PREFIXES = ("/health", "/docs", "/redoc", "/nodes")
_INFERENCE = {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/generate"}
_TAGS = {"weights", "kv_cache"}
_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    500: "server_error",
    501: "server_error",
    503: "server_error",
}
_PARTIAL = "The model weights are partially updated; please discard them and reload."


class Lmdeploy(Protocol):
    """Sleep bookkeeping and the update routes. `asleep` holds the tags that are not awake."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.asleep: set[str] = set()
        self._completions = Completions(engine, self.error, requires_model=True)

    @property
    def _loader(self) -> LmdeployLoader:
        assert isinstance(self.engine.loader, LmdeployLoader)
        return self.engine.loader

    def endpoints(self) -> list[Endpoint]:
        return [
            Endpoint("/health", self.health, ("GET",)),
            Endpoint("/v1/models", self._completions.models, ("GET",)),
            Endpoint("/v1/completions", self.json_only(self._completions.create)),
            Endpoint("/generate", self.json_only(self.generate)),
            Endpoint("/update_weights", self.json_only(self.update_weights)),
            Endpoint("/update_weights_from_ipc", self.ipc_status, ("GET",)),
            Endpoint("/update_weights_from_ipc", self.json_only(self.update_ipc)),
            Endpoint("/init_weights_update_group", self.json_only(self.init_group)),
            Endpoint("/update_weights_from_distributed", self.json_only(self.update_distributed)),
            Endpoint("/destroy_weights_update_group", self.json_only(self.destroy_group)),
            Endpoint("/sleep", self.json_only(self.sleep)),
            Endpoint("/wakeup", self.json_only(self.wakeup)),
            Endpoint("/is_sleeping", self.is_sleeping, ("GET",)),
            Endpoint("/abort_request", self.abort_request),
        ]

    def error(self, status: int, message: str) -> dict[str, Any]:
        kind = _TYPES.get(status, "invalid_request_error")
        return {"message": message, "type": kind, "code": status, "param": None, "object": "error"}

    def invalid(self, problem: InvalidRequestError) -> Response:
        first = problem.problems[0]
        where = ".".join(part for part in first.where if part != "body")
        return JSONResponse(self.error(400, f"{where}: {first.what}" if where else first.what), 400)

    def crash(self, error: Exception) -> Response:
        """LMDeploy's answer carries no reason; ours adds it in a header."""
        return PlainTextResponse("Internal Server Error", 500, headers=note_header(f"logs only: {error}"))

    def gate(self, method: str, path: str, headers: Headers, admin: bool) -> Response | None:
        if method == "POST" and path in _INFERENCE and (refusal := self.refuses_generation()):
            return refusal
        key = self.settings.api_key
        if key and not path.startswith(_OPEN_PREFIXES) and not has_key(headers, key):
            return JSONResponse(self.error(401, "Unauthorized."), 401)
        return None

    def refuses_generation(self) -> Response | None:
        if not self.asleep:
            return None
        words = "Engine is sleeping; call POST /wakeup before inference (e.g. tags=weights&tags=kv_cache)."
        return JSONResponse(self.error(503, words), 503)

    def state(self) -> dict[str, Any]:
        return {"paused": bool(self.asleep), "sleeping": sorted(self.asleep), "session": None}

    def json_only(self, handler: Any) -> Any:
        """POST routes want a JSON media type, also those without a body."""

        def checked(call: Call) -> Response:
            if call.headers.get("content-type", "").lower().split(";", 1)[0] != "application/json":
                words = "Unsupported Media Type: Only 'application/json' is allowed"
                raise InvalidRequestError(Problem((), words, "value_error"))
            response: Response = handler(call)
            return response

        return checked

    def generate(self, call: Call) -> Response:
        body = call.read(
            Field("input_ids", list_of(integer)),
            Field("max_tokens", integer, 128),
            Field("temperature", optional(number), None),
            Field("return_logprob", optional(boolean), None),
            Field("ignore_eos", optional(boolean), False),
        )
        temperature = 1.0 if body["temperature"] is None else body["temperature"]
        try:
            request = self.engine.request(
                body["input_ids"], body["max_tokens"], temperature=temperature, ignore_eos=bool(body["ignore_eos"])
            )
        except ValueError as error:
            return JSONResponse(self.error(400, str(error)), 400)
        done = self.engine.generate(request, call.gone)
        content = token_answer(done, logprobs=bool(body["return_logprob"]))
        content["meta_info"]["finish_reason"] = {"type": done.finish}
        return answer(content)

    def health(self, call: Call) -> Response:
        return answer({"status": "sleeping" if self.asleep else "healthy", "message": ""})

    def update_weights(self, call: Call) -> Response:
        body = call.read(
            Field("serialized_named_tensors", either(text, list_of(text), mapping)),
            Field("load_format", optional(text), None),
            Field("finished", boolean, False),
        )
        payload, load_format = body["serialized_named_tensors"], body["load_format"]
        if isinstance(payload, dict):
            raise TypeError("a dict passes the schema, and the PyTorch engine cannot decode it")
        outcome = self.engine.apply("update", payload, load_format, body["finished"])
        if outcome.error is not None:
            if any("unpickles without limits" in note for note in outcome.notes):
                words = "executes the payload: it unpickles without limits"
                return PlainTextResponse("Internal Server Error", 500, headers=note_header(words))
            raise RuntimeError(outcome.error)
        notes = self._notes(outcome, body["finished"])
        if load_format not in (None, "flattened_bucket"):
            notes.insert(0, f"load_format {load_format!r} is not known and counts as null")
        if isinstance(payload, list) and len(payload) > self.settings.tp:
            notes.insert(0, f"{len(payload)} payloads for {self.settings.tp} ranks")
        return answer(None, notes=notes)

    def ipc_status(self, call: Call) -> Response:
        """checkpoint-engine's plane, which ours does not have."""
        return answer(
            {
                "ready": False,
                "message": 'checkpoint-engine IPC updates require backend="pytorch" and device_type="cuda".',
                "backend": "pytorch",
                "device_type": self.settings.device.partition(":")[0],
                "checkpoint_engine_version": None,
                "is_sleeping": bool(self.asleep),
                "sleeping_tags": sorted(self.asleep),
                "device_uuids": [],
                "worker_ranks": [],
            }
        )

    def update_ipc(self, call: Call) -> Response:
        call.read(Field("zmq_handles", mapping))
        words = f'checkpoint-engine IPC updates require device_type="cuda", got {self.settings.device!r}.'
        return JSONResponse(self.error(501, words), 501)

    def init_group(self, call: Call) -> Response:
        body = call.read(
            Field("master_address", text),
            Field("master_port", integer),
            Field("rank_offset", integer),
            Field("world_size", integer),
            Field("group_name", text),
            Field("backend", text, "nccl"),
        )
        name = body["group_name"]
        if not name:
            return self._failed("init_weights_update_group", "group_name cannot be empty")
        if name in self._loader.groups:
            return self._failed("init_weights_update_group", f"group {name!r} already initialized")
        outcome = self.engine.join_group(body)
        if outcome.error is not None:
            words = f"Failed to initialize weights update group: {outcome.error}"
            return self._failed("init_weights_update_group", words)
        return self._succeeded("Succeeded to initialize weights update group.")

    def update_distributed(self, call: Call) -> Response:
        body = call.read(
            Field("names", list_of(text)),
            Field("dtypes", list_of(text)),
            Field("shapes", list_of(list_of(integer))),
            Field("group_name", text),
            Field("load_format", optional(text), None),
            Field("finished", boolean, False),
        )
        name = body["group_name"]
        if name not in self._loader.groups:
            words = f"group {name!r} not initialized. Call init_weights_update_group first."
            return self._failed("update_weights_from_distributed", words)
        outcome = self.engine.apply("update_distributed", *body.values())
        if outcome.error is not None:
            words = f"Failed to update parameter online: {outcome.error}. {_PARTIAL}"
            return self._failed("update_weights_from_distributed", words)
        notes = self._notes(outcome, body["finished"])
        return self._succeeded("Succeeded to update parameter online.", notes)

    def destroy_group(self, call: Call) -> Response:
        name = call.read(Field("group_name", text))["group_name"]
        if name not in self._loader.groups:
            return self._failed("destroy_weights_update_group", f"group {name!r} not initialized")
        self.engine.control("leave_group", name)
        return self._succeeded(f"Succeeded to destroy group {name!r}.")

    def sleep(self, call: Call) -> Response:
        given = call.query.get("level", "1")
        try:
            level = int(given)
        except ValueError:
            return JSONResponse(self.error(400, 'The "level" query parameter must be an integer.'), 400)
        if level not in (1, 2):
            return JSONResponse(self.error(400, 'The "level" query parameter must be 1 or 2.'), 400)
        self.asleep = set(_TAGS)
        self.engine.scheduler.freeze()
        self.engine.scheduler.abort()
        self.engine.control("sleep", level)
        if level == 2:
            self.engine.ledger.spoil("a level-2 sleep dropped the weights, and nothing replaced them yet")
        return Response(status_code=200)

    def wakeup(self, call: Call) -> Response:
        tags = set(call.query.getlist("tags")) or set(self.asleep)
        if wrong := sorted(tags - self.asleep):
            words = f"accepts silently: tags {wrong} are unknown or awake, so nothing was done"
            return Response(status_code=200, headers=note_header(words))
        if "weights" in tags:
            self.engine.control("wake_weights")
        self.asleep -= tags
        if self.asleep:
            return Response(status_code=200)
        self.engine.scheduler.thaw()
        spoilt = self.engine.ledger.half_loaded
        note = note_header(f"accepts silently: it serves although {spoilt}") if spoilt else None
        return Response(status_code=200, headers=note)

    def is_sleeping(self, call: Call) -> Response:
        return answer({"is_sleeping": bool(self.asleep)})

    def abort_request(self, call: Call) -> Response:
        body = call.read(Field("abort_all", boolean, False), Field("session_id", optional(integer), -1))
        if not body["abort_all"]:
            return JSONResponse(self.error(400, f"Session {body['session_id']} not found."), 400)
        self.engine.scheduler.abort()
        return Response(status_code=200)

    def _notes(self, outcome: Outcome, finished: bool) -> list[str]:
        return outcome.notes + (self.engine.ledger.commit() if finished else [])

    def _succeeded(self, message: str, notes: list[str] | None = None) -> Response:
        return answer({"success": True, "message": message}, notes=notes)

    def _failed(self, method: str, message: str) -> Response:
        """The executor names the call and every rank."""
        per_rank = " | ".join(f"rank{rank}: {message}" for rank in range(self.settings.tp))
        return answer({"success": False, "message": f"{method}: {per_rank}"}, 400)
