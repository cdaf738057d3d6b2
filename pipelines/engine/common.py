"""Routes that every backend has: what the weights are, what the engine is doing, and a probe."""

from __future__ import annotations

import os
import threading
from typing import Any

from starlette.responses import JSONResponse, Response

from pipelines.engine.protocols.base import Protocol
from pipelines.engine.schema import Field, boolean, integer, list_of, number, optional
from pipelines.engine.web import Call, Endpoint, answer

PREFIX = "/weightstream/"


class Common:
    """Reading works in any state, also when the engine counts as dead."""

    def __init__(self, protocol: Protocol) -> None:
        self._protocol = protocol
        self._engine = protocol.engine

    def endpoints(self) -> list[Endpoint]:
        return [
            Endpoint("/weightstream/state", self.state, ("GET",)),
            Endpoint("/weightstream/digest", self.digest, ("GET",)),
            Endpoint("/weightstream/params", self.params, ("GET",)),
            Endpoint("/weightstream/generate", self.generate),
        ]

    def state(self, call: Call) -> Response:
        engine = self._engine
        scheduler, ledger = engine.scheduler, engine.ledger
        return answer(
            {
                "backend": engine.settings.backend,
                "engine_version": engine.settings.version,
                "incarnation": engine.incarnation,
                "version": engine.version,
                **self._protocol.state(),
                "updates": ledger.updates,
                "errors": ledger.errors,
                "commits": ledger.commits,
                "half_loaded": ledger.half_loaded,
                "running": len(scheduler.running),
                "waiting": len(scheduler.waiting),
                "prefix_blocks": None if engine.prefixes is None else len(engine.prefixes),
                "groups": sorted(engine.loader.groups),
                "tp": engine.settings.tp,
                "pid": os.getpid(),
                "rank_pids": engine.ranks.pids,
                "threads": threading.active_count(),
                "dead": None if engine.dead is None else str(engine.dead),
            }
        )

    def digest(self, call: Call) -> Response:
        try:
            return answer(self._engine.digest())
        except TimeoutError as error:
            return JSONResponse(self._protocol.error(503, f"no digest now: {error}"), 503)

    def params(self, call: Call) -> Response:
        weights = self._engine.model.weights
        return answer(weights.describe() | {"tied": weights.tied})

    def generate(self, call: Call) -> Response:
        """A probe: greedy unless told otherwise, ends after exactly the tokens asked for."""
        body = call.read(
            Field("input_ids", list_of(integer)),
            Field("max_new_tokens", integer, 16),
            Field("temperature", number, 0.0),
            Field("seed", optional(integer), None),
            Field("ignore_eos", boolean, True),
        )
        if refusal := self._protocol.refuses_generation():
            return refusal
        prompt, limit = body.pop("input_ids"), body.pop("max_new_tokens")
        try:
            request = self._engine.request(prompt, limit, **body)
        except ValueError as error:
            return JSONResponse(self._protocol.error(400, str(error)), 400)
        done = self._protocol.run(request, call)
        content: dict[str, Any] = {
            "output_ids": done.output,
            "logprobs": done.json_logprobs(),
            "versions": done.spans(),
            "finish_reason": done.finish,
            "cached_tokens": done.cached_tokens,
        }
        return answer(content)
