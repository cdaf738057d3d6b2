"""One request on its way through the scheduler."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, field
from typing import Any

import torch

_COLDEST = 1e-5  # below it only the likeliest token has a probability, and the division overflows


@dataclass(slots=True, eq=False)
class Generation:
    """Filled by the scheduler; `done` is set when nothing more will come.

    `versions` names, per output token, the weights its forward pass used. `kv` is dropped on retraction and
    recomputed when the request continues. `finish` is stop, length or abort; `error` says why the engine died.
    """

    rid: str
    prompt: list[int]
    limit: int
    temperature: float = 0.0
    end_tokens: frozenset[int] = frozenset()
    generator: torch.Generator | None = None
    output: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[str | None] = field(default_factory=list)
    cached_tokens: int = 0
    retractions: int = 0
    kv: Any = None
    finish: str | None = None
    error: str | None = None
    done: threading.Event = field(default_factory=threading.Event)

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output

    def pick(self, logits: torch.Tensor, version: str | None) -> None:
        """Append the next token: the likeliest one, or a sampled one where a temperature is set."""
        logprobs = torch.log_softmax(logits, -1)
        if self.temperature > _COLDEST and bool(torch.isfinite(logprobs).all()):
            weights = torch.softmax(logits / self.temperature, -1)
            token = int(torch.multinomial(weights, 1, generator=self.generator))
        else:
            token = int(logprobs.argmax())
        self.output.append(token)
        self.logprobs.append(float(logprobs[token]))
        self.versions.append(version)
        if token in self.end_tokens:
            self.finish = "stop"
        elif len(self.output) >= self.limit:
            self.finish = "length"

    def spans(self) -> list[dict[str, Any]]:
        """Runs of output tokens of the same version, as `{"version", "start", "end"}`."""
        spans: list[dict[str, Any]] = []
        for index, version in enumerate(self.versions):
            if spans and spans[-1]["version"] == version:
                spans[-1]["end"] = index + 1
            else:
                spans.append({"version": version, "start": index, "end": index + 1})
        return spans

    def json_logprobs(self) -> list[float | None]:
        """JSON has no NaN: None where broken weights gave one."""
        return [p if math.isfinite(p) else None for p in self.logprobs]
