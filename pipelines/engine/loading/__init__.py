"""What one engine rank does with the weights it is sent, per protocol: decode, check as the real engine does, apply."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from pipelines.engine.loading.base import Loader
    from pipelines.engine.weights import Weights

LOADERS = {
    "lmdeploy": "pipelines.engine.loading.lmdeploy:LmdeployLoader",
    "sglang": "pipelines.engine.loading.sglang:SglangLoader",
    "vllm": "pipelines.engine.loading.vllm:VllmLoader",
}


def make_loader(backend: str, rank: int, weights: Weights, device: torch.device, model_type: str) -> Loader:
    """The receiving end of one rank."""
    module, _, name = LOADERS[backend].partition(":")
    cls: type[Loader] = getattr(importlib.import_module(module), name)
    return cls(rank, weights, device, model_type)
