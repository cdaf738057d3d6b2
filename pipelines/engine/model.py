"""The transformers model that the engine generates with, and its weights under their checkpoint names."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.initialization import no_init_weights

from pipelines.engine.checkpoint import Checkpoint
from pipelines.engine.weights import SCALE_SUFFIX, Weights, check_names, stored_dtype
from stages.errors import ConfigError
from stages.flow import dtype_of


class ServedModel:
    """A causal language model on one device. `weights` are views: writing to them changes what `forward` computes."""

    def __init__(self, folder: str, dtype: str, device: str) -> None:
        checkpoint = Checkpoint(folder)
        self.config = AutoConfig.from_pretrained(folder, local_files_only=True)
        if not self.config.architectures:
            raise ConfigError(f"{folder}/config.json names no architectures; engines need them to pick the model class")
        block = checkpoint.block_fp8
        if block is not None:
            del self.config.quantization_config
        wanted = (self.config.dtype or torch.float32) if dtype == "auto" else dtype_of(dtype)
        with no_init_weights():
            self.module = AutoModelForCausalLM.from_config(self.config, dtype=wanted).to(device).eval()
        self.module.tie_weights()
        self.module.requires_grad_(False)
        self.device = torch.device(device)
        self.tied: dict[str, str] = dict(getattr(self.module, "all_tied_weights_keys", {}))
        self.weights = self._load(checkpoint, dtype, block)
        self.context: int = getattr(self.config, "max_position_embeddings", 1 << 20)
        self.vocabulary: int = self.config.vocab_size
        self.end_tokens = _as_set(getattr(self.config, "eos_token_id", None))
        takes = inspect.signature(self.module.forward).parameters
        self._cache_argument = "cache" if "cache" in takes else "past_key_values"  # renamed in transformers 5.2x

    def _load(self, checkpoint: Checkpoint, dtype: str, block: tuple[int, int] | None) -> Weights:
        places = self._places()
        tensors: dict[str, torch.Tensor] = {}
        served: dict[str, torch.Tensor] = {}
        for name, stored in checkpoint.tensors():
            if name in self.tied:
                continue
            kept = stored.to(self.device, stored_dtype(stored.dtype, dtype), copy=True)
            tensors[name] = kept
            if name not in places:
                continue
            if block is not None and kept.dtype == torch.float8_e4m3fn:
                served[name] = places[name].memory()
            else:
                tensors[name] = places[name].store(name, kept)
        check_names(set(places) | {name + SCALE_SUFFIX for name in served}, set(tensors), str(checkpoint.folder))
        weights = Weights(tensors, self.tied, block, served if block is not None else None)
        weights.refresh()
        return weights

    def _places(self) -> dict[str, _Place]:
        """Where each checkpoint name lives; transformers 5 keeps all experts of a layer in two parameters."""
        places: dict[str, _Place] = {}
        for name, tensor in self.module.state_dict(keep_vars=True).items():
            if name in self.tied:
                continue
            base, _, last = name.rpartition(".")
            if tensor.dim() == 3 and base.endswith(".experts") and last in ("gate_up_proj", "down_proj"):
                places.update(_expert_places(base, last, tensor))
            else:
                places[name] = _Place(tensor)
        return places

    @torch.inference_mode()
    def forward(self, tokens: list[int], cache: DynamicCache) -> torch.Tensor:
        """Extend `cache` by `tokens`; the next token's logits, fp32 [vocabulary] on the CPU."""
        ids = torch.tensor([tokens], device=self.device)
        arguments: dict[str, Any] = {self._cache_argument: cache}
        out = self.module(input_ids=ids, use_cache=True, logits_to_keep=1, **arguments)
        logits: torch.Tensor = out.logits[0, -1]
        return logits.float().cpu()

    def new_cache(self) -> DynamicCache:
        return DynamicCache(config=self.config)

    @property
    def prefixes_reusable(self) -> bool:
        """Whether KV can be cut and joined at token boundaries, as it can for plain attention only."""
        layers = self.new_cache().layers
        return bool(layers) and all(type(layer) is DynamicLayer for layer in layers)


@dataclass(frozen=True, slots=True)
class _Place:
    """A parameter or buffer, or the part of it that one checkpoint name stands for."""

    owner: torch.Tensor
    part: tuple[int | slice, ...] | None = None

    def memory(self) -> torch.Tensor:
        return self.owner.data if self.part is None else self.owner.data[self.part]

    def store(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Put `value` there and return the memory; a whole parameter takes on the dtype of the checkpoint."""
        memory = self.memory()
        if memory.shape != value.shape:
            raise ConfigError(
                f"{name}: the model class has shape {list(memory.shape)}, the checkpoint {list(value.shape)}"
            )
        if self.part is None and memory.dtype != value.dtype:
            self.owner.data = value
            return self.owner.data
        memory.copy_(value)
        return memory


def _expert_places(base: str, last: str, fused: torch.Tensor) -> dict[str, _Place]:
    """Per-expert names of a fused parameter; the gate is the first half of gate_up_proj."""
    half = fused.shape[1] // 2
    rows = (
        {"gate_proj": slice(0, half), "up_proj": slice(half, None)} if last == "gate_up_proj" else {last: slice(None)}
    )
    return {
        f"{base}.{expert}.{part}.weight": _Place(fused, (expert, where))
        for expert in range(fused.shape[0])
        for part, where in rows.items()
    }


def _as_set(value: int | list[int] | None) -> set[int]:
    if value is None:
        return set()
    return set(value) if isinstance(value, list) else {value}
