"""The OpenAI-style routes that vLLM and LMDeploy share. Prompts are token ids: the engine has no tokenizer."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from starlette.responses import JSONResponse, Response

from pipelines.engine.engine import Engine
from pipelines.engine.generation import Generation
from pipelines.engine.schema import Field, boolean, integer, number, optional, text
from pipelines.engine.web import Call, answer

FIELDS = (
    Field("model", optional(text), None),
    Field("prompt", lambda value: value),
    Field("max_tokens", optional(integer), 16),
    Field("temperature", optional(number), 1.0),
    Field("logprobs", optional(integer), None),
    Field("seed", optional(integer), None),
    Field("ignore_eos", optional(boolean), False),
    Field("return_token_ids", optional(boolean), False),
)


class Completions:
    """`/v1/completions` and `/v1/models`; the served model is called by its folder."""

    def __init__(
        self,
        engine: Engine,
        error: Callable[[int, str], dict[str, Any]],
        *,
        requires_model: bool,
        unused: tuple[str, ...] = (),
        unused_in_choice: tuple[str, ...] = (),
    ) -> None:
        """`unused` are keys of the engine's answers that are always null here."""
        self._engine = engine
        self._error = error
        self._requires_model = requires_model
        self._unused = dict.fromkeys(unused)
        self._unused_in_choice = dict.fromkeys(unused_in_choice)

    def models(self, call: Call) -> Response:
        name = self._engine.settings.model
        card = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "weightstream", "root": name}
        card |= {"parent": None, "permission": [], "max_model_len": self._engine.model.context}
        return answer({"object": "list", "data": [card]})

    def create(self, call: Call) -> Response:
        fields = (Field("model", text), *FIELDS[1:]) if self._requires_model else FIELDS
        body = call.read(*fields)
        model = body["model"] or self._engine.settings.model
        if model != self._engine.settings.model:
            return JSONResponse(self._error(404, f"The model `{model}` does not exist."), 404)
        try:
            request = self._engine.request(
                token_ids(body["prompt"]),
                body["max_tokens"] or 16,
                temperature=body["temperature"] or 0.0,
                ignore_eos=body["ignore_eos"],
                seed=body["seed"],
            )
        except ValueError as error:
            return JSONResponse(self._error(400, str(error)), 400)
        done = self._engine.generate(request, call.gone)
        if body["logprobs"] is not None and None in done.json_logprobs():
            return JSONResponse(self._error(400, "Out of range float values are not JSON compliant: nan"), 400)
        return answer(self._completion(done, model, body))

    def _completion(self, done: Generation, model: str, body: dict[str, Any]) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "text": "", "logprobs": None, "finish_reason": done.finish}
        choice |= self._unused_in_choice
        if body["logprobs"] is not None:
            names = [f"token_id:{token}" for token in done.output]
            top = [{name: logprob} for name, logprob in zip(names, done.logprobs, strict=True)]
            choice["logprobs"] = {"text_offset": [0] * len(names), "tokens": names, "top_logprobs": top}
            choice["logprobs"]["token_logprobs"] = done.logprobs
        if body["return_token_ids"]:
            choice |= {"token_ids": done.output, "prompt_token_ids": done.prompt}
        usage = {
            "prompt_tokens": len(done.prompt),
            "completion_tokens": len(done.output),
            "total_tokens": len(done.prompt) + len(done.output),
            "prompt_tokens_details": {"cached_tokens": done.cached_tokens},
        }
        return self._unused | {
            "id": f"cmpl-{done.rid}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
            "choices": [choice],
            "usage": usage,
        }


def token_ids(prompt: Any) -> list[int]:
    """A prompt as token ids. Raises ValueError for text and batches."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], list):
        prompt = prompt[0]
    if not isinstance(prompt, list) or not all(type(token) is int for token in prompt):
        raise ValueError("the embedded engine has no tokenizer: send one prompt as a list of token ids")
    return prompt


def token_answer(done: Generation, *, logprobs: bool) -> dict[str, Any]:
    """The `/generate` answer that SGLang and LMDeploy have in common."""
    meta: dict[str, Any] = {
        "finish_reason": {"type": done.finish} | ({"length": done.limit} if done.finish == "length" else {}),
        "prompt_tokens": len(done.prompt),
        "completion_tokens": len(done.output),
    }
    if logprobs:
        meta["output_token_logprobs"] = list(zip(done.json_logprobs(), done.output, strict=True))
    return {"text": "", "output_ids": done.output, "meta_info": meta}
