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
from pipelines.engine.loading.base import Outcome, merge
from pipelines.engine.protocols.base import Protocol
from pipelines.engine.protocols.completions import Completions
from pipelines.engine.schema import (
    Field,
    InvalidRequestError,
    boolean,
    either,
    integer,
    list_of,
    mapping,
    one_of,
    optional,
    read,
    text,
)
from pipelines.engine.web import Call, Endpoint, answer, has_key

_GUARDED_PREFIXES = ("/v1", "/v2", "/inference", "/cohere")
_PAUSE_MODES = one_of("abort", "wait", "keep")
_TAGS = {"weights", "kv_cache"}


class WorkerError(Exception):
    """What a worker raised inside a collective call."""

    def __init__(self, message: str, call: str = "collective_rpc") -> None:
        super().__init__(
            f"Call to {call} method failed: Worker failed with error '{message}', "
            f"please check the stack trace above for the root cause"
        )


class HttpError(Exception):
    """An error that the handler itself answers with a status."""

    def __init__(self, status: int, message: str) -> None:
        self.status = status
        super().__init__(message)


class Vllm(Protocol):
    """`session`: between start and finish. `on_meta`: no forward pass may run, also after a failed update."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.session = False
        self.on_meta = False
        self.pause_mode: str | None = None
        self.asleep: set[str] = set()
        self.rejects = engine.settings.version == "0.33.0"
        engine.scheduler.version = "default"
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
            Endpoint("/init_weight_transfer_engine", self.init_transfer),
            Endpoint("/shutdown_weight_transfer_engine", self.shutdown_transfer),
            Endpoint("/start_weight_update", self.start),
            Endpoint("/start_draft_weight_update", self.start_draft),
            Endpoint("/update_weights", self.update),
            Endpoint("/finish_weight_update", self.finish),
            Endpoint("/update_weight_version", self.update_version),
            Endpoint("/weight_info", self.weight_info, ("GET",)),
            Endpoint("/weight_checker", self.weight_checker),
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
            Endpoint("/collective_rpc", self.collective_rpc),
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
        return {"paused": self.pause_mode, "sleeping": sorted(self.asleep), "session": self.session}

    def refuses_generation(self) -> Response | None:
        """0.33.0 rejects new requests in abort and wait mode; 0.32.0 queues them in all modes."""
        if not self.rejects or self.pause_mode not in ("abort", "wait"):
            return None
        body = self.error(503, "The engine is paused; retry after /resume.")
        body["error"]["code"] = "engine_paused"
        return JSONResponse(body, 503)

    def health(self, call: Call) -> Response:
        return Response(status_code=200)

    # weights

    def init_transfer(self, call: Call) -> Response:
        info = _embedded(call, Field("init_info", mapping))["init_info"]
        self._worker(merge(self.engine.control("init", info)))
        return answer({"message": "Weight transfer initialized"})

    def shutdown_transfer(self, call: Call) -> Response:
        if self.session:
            raise WorkerError("Cannot release a trainer connection during a weight update")
        self.engine.control("shutdown")
        return answer({"message": "Weight transfer shut down"})

    def start(self, call: Call) -> Response:
        if self.session:
            raise WorkerError(
                "start_weight_update called while a weight update is already active. Call finish_weight_update first."
            )
        self._worker(merge(self.engine.control("start")))
        self.session = self.on_meta = True
        return answer({"message": "Weight update started"})

    def start_draft(self, call: Call) -> Response:
        raise WorkerError("no speculative draft model is loaded")

    def update(self, call: Call) -> Response:
        info = _embedded(call, Field("update_info", either(mapping, list_of(mapping))))["update_info"]
        if not self.session:
            raise WorkerError("start_weight_update must be called before update_weights.")
        outcome = self.engine.apply("receive", info)
        if outcome.error is not None:
            self.session = False
        self._worker(outcome)
        return answer({"message": "Weights updated"}, notes=outcome.notes)

    def finish(self, call: Call) -> Response:
        version = _embedded(call, Field("weight_version", optional(text), None))["weight_version"]
        if not self.session:
            raise WorkerError("finish_weight_update called without a matching start_weight_update.")
        outcome = merge(self.engine.control("finish"))
        self._worker(outcome)
        notes = outcome.notes + self.engine.ledger.commit()
        self.session = self.on_meta = False
        if version is not None:
            self.engine.set_version(version)
        return answer({"message": "Weight update finished"}, notes=notes)

    def update_version(self, call: Call) -> Response:
        version = _embedded(call, Field("new_version", text))["new_version"]
        self.engine.set_version(version)
        return answer({"success": True, "new_version": version})

    def weight_info(self, call: Call) -> Response:
        return answer({"weight_version": self.engine.version or "default"})

    def weight_checker(self, call: Call) -> Response:
        action = Field("action", one_of("checksum", "reset", "compare"))
        body = _embedded(call, action, Field("baseline", optional(mapping), None))
        if body["action"] == "reset":
            self.engine.control("fill", 0.0)
            self.engine.ledger.spoil("/weight_checker reset the weights to zero")
            return answer({"status": "reset"})
        if body["action"] == "compare" and body["baseline"] is None:
            raise HttpError(400, "action='compare' requires a 'baseline' object")
        checksums = self._checksums()
        if body["action"] == "checksum":
            return answer({"checksums": checksums})
        baseline = body["baseline"]
        wrong = sorted(k for k in checksums.keys() | baseline.keys() if checksums.get(k) != baseline.get(k))
        return answer({"match": not wrong, "mismatches": wrong})

    def collective_rpc(self, call: Call) -> Response:
        try:
            body = json.loads(call.data)
        except ValueError as error:
            raise HttpError(400, f"JSON decode error: {error}") from error
        if not isinstance(body, dict):
            raise HttpError(400, "Request body must be a JSON object")
        if body.get("method") is None:
            raise HttpError(400, "Missing 'method' in request body")
        if body["method"] != "reload_weights":
            raise WorkerError(f"the embedded engine's workers have no method {body['method']!r}")
        folder = (body.get("kwargs") or {}).get("weights_path") or self.settings.model
        outcome = self.engine.apply("reload", folder)
        self._worker(outcome)
        notes = outcome.notes + self.engine.ledger.commit()
        return answer({"results": [None] * self.settings.tp}, notes=notes)

    # pause, sleep, caches

    def pause(self, call: Call) -> Response:
        mode = call.argument("mode", _PAUSE_MODES, "abort")
        self._pause(mode, call.argument("clear_cache", boolean, True))
        return answer({"status": "paused"})

    def resume(self, call: Call) -> Response:
        self.pause_mode = None
        self.engine.scheduler.thaw()
        notes = ["a forward pass now ends the engine: the weights are on the meta device"] if self.on_meta else None
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
        if not self.on_meta:
            return None
        return "NotImplementedError: a forward pass met parameters on the meta device (a weight update is not finished)"

    def _checksums(self) -> dict[str, str]:
        if self.on_meta:
            raise WorkerError("Cannot copy out of meta tensor; no data!", "compute_weight_checksums")
        per_rank: list[dict[str, str]] = self.engine.control("checksums")
        return {
            f"dp0:pp0:pcp0:tp{rank}:{name}": value
            for rank, found in enumerate(per_rank)
            for name, value in found.items()
        }

    def _worker(self, outcome: Outcome) -> None:
        if outcome.error is not None:
            raise WorkerError(outcome.error)


def _embedded(call: Call, *fields: Field) -> dict[str, Any]:
    """Fields that the framework embeds in a body: no body, or one that is not announced as JSON, lacks all of them."""
    announced = "json" in call.headers.get("content-type", "")
    return read(call.json() if call.data and announced else {}, *fields)


def _sleep_level(value: Any) -> int:
    level = integer(value)
    if not 0 <= level <= 2:
        raise ValueError("Input should be between 0 and 2")
    return level
