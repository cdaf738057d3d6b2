"""SGLang's generation, health and information routes."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from starlette.responses import JSONResponse, Response

from pipelines.engine.engine import FatalError, UnknownTokenError
from pipelines.engine.generation import Generation
from pipelines.engine.protocols.completions import token_answer, token_ids
from pipelines.engine.schema import Field, boolean, integer, mapping, number, optional, text
from pipelines.engine.web import Call, Endpoint, answer

if TYPE_CHECKING:
    from pipelines.engine.protocols.sglang import Sglang

HEALTH_TIMEOUT = 20.0


class SglangGenerate:
    """Requests wait here while generation is paused, and hold the reader lock while they run."""

    def __init__(self, protocol: Sglang) -> None:
        self._protocol = protocol
        self._engine = protocol.engine
        self._resumed = threading.Condition()

    def endpoints(self) -> list[Endpoint]:
        return [
            Endpoint("/generate", self.generate, ("POST", "PUT")),
            Endpoint("/health", self.health, ("GET",)),
            Endpoint("/health_generate", self.health, ("GET",)),
            Endpoint("/ready", self.ready, ("GET",)),
            Endpoint("/model_info", self.model_info, ("GET",)),
            Endpoint("/get_model_info", self.model_info, ("GET",)),
            Endpoint("/server_info", self.server_info, ("GET",)),
            Endpoint("/get_server_info", self.server_info, ("GET",)),
            Endpoint("/v1/models", self.models, ("GET",)),
        ]

    def wake(self) -> None:
        with self._resumed:
            self._resumed.notify_all()

    def run(self, generation: Generation, call: Call) -> Generation:
        """Wait while generation is paused, then run as a reader of the weights."""
        with self._resumed:
            self._resumed.wait_for(lambda: not self._protocol.paused or self._engine.dead is not None)
        with self._protocol.lock.reading():
            return self._engine.generate(generation, call.gone)

    def generate(self, call: Call) -> Response:
        body = call.read(
            Field("input_ids", lambda value: value, None),
            Field("sampling_params", optional(mapping), None),
            Field("return_logprob", boolean, False),
            Field("rid", optional(text), None),
        )
        sampling = body["sampling_params"] or {}
        if not body["input_ids"]:
            words = "Either text, input_ids or input_embeds should be provided."
            words = words if body["input_ids"] is None else "input_ids cannot be empty."
            return JSONResponse({"error": {"message": words}}, 400)
        try:
            request = self._engine.request(
                token_ids(body["input_ids"]),
                integer(sampling.get("max_new_tokens", 128)),
                rid=body["rid"] or "",
                temperature=number(sampling.get("temperature", 1.0)),
                ignore_eos=boolean(sampling.get("ignore_eos", False)),
                seed=sampling.get("sampling_seed"),
            )
        except UnknownTokenError as error:
            raise FatalError(str(error), "the forward pass raises and the server ends (seen on the CPU)") from error
        except ValueError as error:
            return JSONResponse({"error": {"message": str(error)}}, 400)
        done = self.run(request, call)
        content = token_answer(done, logprobs=body["return_logprob"])
        meta: dict[str, Any] = content["meta_info"]
        if body["return_logprob"]:
            meta["output_token_logprobs"] = [[*pair, None] for pair in meta["output_token_logprobs"]]
        if done.finish == "abort":
            meta["finish_reason"]["message"] = "Aborted"
        meta |= {
            "id": done.rid,
            "cached_tokens": done.cached_tokens,
            "num_retractions": done.retractions,
            "weight_version": self._engine.scheduler.version,
            "weight_versions": done.spans(),
        }
        return answer(content)

    def health(self, call: Call) -> Response:
        """Generates a token, which cannot happen while paused: then it blocks and fails."""
        if not self._protocol.paused:
            return Response(status_code=200)
        with self._resumed:
            resumed = self._resumed.wait_for(lambda: not self._protocol.paused, HEALTH_TIMEOUT)
        return Response(status_code=200 if resumed else 503)

    def ready(self, call: Call) -> Response:
        return Response(status_code=503 if self._protocol.paused else 200)

    def model_info(self, call: Call) -> Response:
        config = self._engine.model.config
        return answer(
            {
                "model_path": self._protocol.model_path,
                "served_model_name": self._protocol.model_path,
                "tokenizer_path": self._engine.settings.model,
                "is_generation": True,
                "preferred_sampling_params": None,
                "weight_version": self._engine.version or "default",
                "load_format": "auto",
                "reasoning_parser": None,
                "tool_call_parser": None,
                "disaggregation_mode": "null",
                "has_image_understanding": False,
                "has_audio_understanding": False,
                "embedding": None,
                "model_type": config.model_type,
                "architectures": config.architectures,
            }
        )

    def server_info(self, call: Call) -> Response:
        """The start configuration: its weight_version never moves."""
        settings = self._engine.settings
        return answer(
            {
                "model_path": settings.model,
                "served_model_name": settings.model,
                "tp_size": settings.tp,
                "dp_size": 1,
                "pp_size": 1,
                "weight_version": "default",
                "version": settings.version,
                "frontend": "weightstream embedded engine",
                "internal_states": [],
            }
        )

    def models(self, call: Call) -> Response:
        name = self._protocol.model_path
        card = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "sglang", "root": name}
        card |= {"parent": None, "max_model_len": self._engine.model.context}
        return answer({"object": "list", "data": [card]})
