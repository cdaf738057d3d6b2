"""vLLM 0.32.0 in developer mode, with weightstream's plug-in as its transfer engine. 0.33.0 differs in /pause only.

Between start and finish the parameters are on the meta device: a forward pass ends the engine. So does one after a
failed update, until a complete one has gone through.
"""

from __future__ import annotations

import json
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response

from pipelines.engine.engine import Engine
from pipelines.engine.protocols.base import Protocol
from pipelines.engine.protocols.completions import Completions
from pipelines.engine.protocols.vllm_updates import HttpError, VllmUpdates, WorkerError
from pipelines.engine.schema import (
    Field,
    InvalidRequestError,
    boolean,
    integer,
    list_of,
    mapping,
    one_of,
    optional,
    text,
)
from pipelines.engine.web import Call, Endpoint, answer, has_key

_GUARDED_PREFIXES = ("/v1", "/v2", "/inference", "/cohere")
_PAUSE_MODES = one_of("abort", "wait", "keep")
_TAGS = {"weights", "kv_cache"}


class Vllm(Protocol):
    """Pause, sleep, caches and generation; the weight routes are in `VllmUpdates`."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.pause_mode: str | None = None
        self.asleep: set[str] = set()
        self.rejects = engine.settings.version == "0.33.0"
        engine.scheduler.version = "default"
        self.updates = VllmUpdates(self)
        engine.guard = self._step_kills
        self._completions = Completions(
            engine,
            self.error,
            requires_model=False,
            unused=("service_tier", "system_fingerprint", "kv_transfer_params", "ec_transfer_params", "metrics"),
            unused_in_choice=("stop_reason", "token_ids", "prompt_logprobs", "prompt_token_ids", "routed_experts"),
        )

    def endpoints(self) -> list[Endpoint]:
        return [
            Endpoint("/health", self.health, ("GET",)),
            Endpoint("/version", lambda call: answer({"version": self.settings.version}), ("GET",)),
            Endpoint("/v1/models", self._completions.models, ("GET",)),
            Endpoint("/v1/completions", self._unless_paused(self._completions.create)),
            Endpoint("/inference/v1/generate", self._unless_paused(self.generate)),
            *self.updates.endpoints(),
            Endpoint("/pause", self.pause),
            Endpoint("/resume", self.resume),
            Endpoint("/is_paused", lambda call: answer({"is_paused": self.pause_mode is not None}), ("GET",)),
            Endpoint("/abort_requests", self.abort_requests),
            Endpoint("/get_world_size", self.world_size, ("GET",)),
            Endpoint("/sleep", self.sleep),
            Endpoint("/wake_up", self.wake_up),
            Endpoint("/is_sleeping", self.is_sleeping, ("GET",)),
            Endpoint("/reset_prefix_cache", self.reset_prefix_cache),
            Endpoint("/reset_mm_cache", lambda call: Response(status_code=200)),
            Endpoint("/reset_encoder_cache", lambda call: Response(status_code=200)),
        ]

    def error(self, status: int, message: str) -> dict[str, Any]:
        kinds = {
            400: "BadRequestError",
            403: "PermissionDeniedError",
            404: "NotFoundError",
            503: "ServiceUnavailableError",
        }
        kind = kinds.get(status, "InternalServerError")
        return {"error": {"message": message, "type": kind, "param": None, "code": status}}

    def invalid(self, problem: InvalidRequestError) -> Response:
        lines = "\n".join(f"  {p.pydantic()}" for p in problem.problems)
        count = len(problem.problems)
        body = self.error(400, f"{count} validation error{'s' if count > 1 else ''}:\n{lines}")
        body["error"] |= {"type": "Bad Request", "param": ".".join(problem.problems[0].where)}
        return JSONResponse(body, 400)

    def gate(self, method: str, path: str, headers: Headers, admin: bool) -> Response | None:
        key = self.settings.api_key
        if key and path.startswith(_GUARDED_PREFIXES) and not has_key(headers, key):
            return JSONResponse({"error": "Unauthorized"}, 401)
        return None

    def crash(self, error: Exception) -> Response:
        if isinstance(error, HttpError):
            body = self.error(error.status, str(error))
            body["error"]["type"] = "Bad Request"
            return JSONResponse(body, error.status)
        if isinstance(error, WorkerError):
            return JSONResponse(self.error(500, str(error)), 500)
        status = 400 if isinstance(error, ValueError | TypeError | OverflowError) else 500
        return JSONResponse(self.error(status, str(error)), status)

    def state(self) -> dict[str, Any]:
        return {"paused": self.pause_mode, "sleeping": sorted(self.asleep), "session": self.updates.open}

    def refuses_generation(self) -> Response | None:
        """0.33.0 rejects new requests in abort and wait mode; 0.32.0 queues them in all modes."""
        if not self.rejects or self.pause_mode not in ("abort", "wait"):
            return None
        body = self.error(503, "The engine is paused; retry after /resume.")
        body["error"]["code"] = "engine_paused"
        return JSONResponse(body, 503)

    def health(self, call: Call) -> Response:
        return Response(status_code=200)

    # pause, sleep, caches

    def pause(self, call: Call) -> Response:
        mode = call.argument("mode", _PAUSE_MODES, "abort")
        self._pause(mode, call.argument("clear_cache", boolean, True))
        return answer({"status": "paused"})

    def resume(self, call: Call) -> Response:
        self.pause_mode = None
        self.engine.scheduler.thaw()
        notes = (
            ["a forward pass now ends the engine: the weights are on the meta device"] if self.updates.on_meta else None
        )
        return answer({"status": "resumed"}, notes=notes)

    def abort_requests(self, call: Call) -> Response:
        try:
            body = json.loads(call.data)
        except ValueError as error:
            raise HttpError(400, "Invalid JSON format") from error
        if not isinstance(body, dict):
            raise HttpError(400, "Request body must be a JSON object")
        ids = body.get("request_ids")
        count = self.engine.scheduler.abort(ids or None)
        return answer({"status": "aborted", "aborted": len(ids) if ids else count})

    def sleep(self, call: Call) -> Response:
        level = call.argument("level", _sleep_level, 1)
        self._pause(call.argument("mode", _PAUSE_MODES, "abort"), clear_cache=level >= 1)
        self.asleep = set(_TAGS) if level >= 1 else set()
        return answer({"status": "sleeping", "level": level})

    def wake_up(self, call: Call) -> Response:
        tags = call.query.getlist("tags") or None
        self.asleep -= set(tags) if tags else set(_TAGS)
        if not self.asleep:
            self.pause_mode = None
            self.engine.scheduler.thaw()
        return answer({"status": "sleeping" if self.asleep else "awake", "tags": tags})

    def is_sleeping(self, call: Call) -> Response:
        return answer({"is_sleeping": bool(self.asleep) or self.pause_mode is not None})

    def reset_prefix_cache(self, call: Call) -> Response:
        scheduler = self.engine.scheduler
        if call.argument("reset_running_requests", boolean, False):
            scheduler.retract()
        if scheduler.running:
            return answer({"success": False})
        scheduler.flush()
        return answer({"success": True})

    def world_size(self, call: Call) -> Response:
        call.argument("include_dp", boolean, True)
        return answer({"world_size": self.settings.tp})

    # generation

    def generate(self, call: Call) -> Response:
        """Tokens in, tokens out, with a version per token."""
        if not self.settings.scale_out:
            words = "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them."
            return JSONResponse(self.error(403, words), 403)
        body = call.read(
            Field("token_ids", list_of(integer)),
            Field("sampling_params", mapping),
            Field("request_id", optional(text), None),
        )
        sampling = body["sampling_params"]
        request = self.engine.request(
            body["token_ids"],
            integer(sampling.get("max_tokens") or 16),
            rid=body["request_id"] or "",
            temperature=float(sampling.get("temperature", 1.0)),
            ignore_eos=boolean(sampling.get("ignore_eos", False)),
        )
        done = self.engine.generate(request, call.gone)
        choice: dict[str, Any] = {"index": 0, "finish_reason": done.finish, "token_ids": done.output}
        choice |= {"logprobs": None, "weight_versions": done.spans()}
        if sampling.get("logprobs") is not None:
            content = [
                {"token": f"token_id:{token}", "logprob": logprob}
                for token, logprob in zip(done.output, done.json_logprobs(), strict=True)
            ]
            choice["logprobs"] = {"content": content}
        return answer({"request_id": done.rid, "choices": [choice]})

    # shared

    def _pause(self, mode: str, clear_cache: bool) -> None:
        scheduler = self.engine.scheduler
        self.pause_mode = mode
        if mode == "wait":
            scheduler.drain()
        scheduler.freeze()
        if mode == "abort":
            scheduler.abort()
        if clear_cache:
            scheduler.retract()
            scheduler.flush()

    def _unless_paused(self, handler: Any) -> Any:
        def checked(call: Call) -> Response:
            response: Response = self.refuses_generation() or handler(call)
            return response

        return checked

    def _step_kills(self) -> str | None:
        if not self.updates.on_meta:
            return None
        return "NotImplementedError: a forward pass met parameters on the meta device (a weight update is not finished)"


def _sleep_level(value: Any) -> int:
    level = integer(value)
    if not 0 <= level <= 2:
        raise ValueError("Input should be between 0 and 2")
    return level
