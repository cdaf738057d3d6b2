"""LoRA layers of PEFT: what their adapters add to the weight below, so that it can be merged in passing.

The training copy stays as it is: gather makes `weight + scale * B @ A` in float32, one weight at a time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from stages.errors import PlanMismatch


@dataclass(frozen=True, slots=True)
class Adapters:
    """The active adapters of one layer: `(A, B)` by parameter name, and their scales. `weight` is the base weight's name."""

    weight: str
    factors: tuple[tuple[str, str], ...]
    scales: tuple[float, ...]
    transposed: bool


def adapters_of(module: torch.nn.Module) -> list[Adapters]:
    """What the unmerged LoRA layers of a module add, with parameters named as the module names them.

    Layers are known by the attributes that PEFT gives them (seen in 0.19). Raises PlanMismatch for what is no plain product
    of two factors: DoRA and other variants, biases, embeddings, fused experts, disabled adapters.
    """
    return [_adapters(name, layer) for name, layer in module.named_modules() if _pending(layer)]


def factor_names(module: torch.nn.Module) -> set[str]:
    """The parameters of all adapters of plain LoRA layers, active or not."""
    found: set[str] = set()
    for name, layer in module.named_modules():
        if _is_lora(layer):
            found |= {f"{name}.{n}" for n, _ in layer.named_parameters() if n.startswith(("lora_A.", "lora_B."))}
    return found


def _is_lora(layer: Any) -> bool:
    return hasattr(layer, "lora_A") and hasattr(layer, "scaling") and hasattr(layer, "active_adapters")


def _pending(layer: Any) -> bool:
    return _is_lora(layer) and not layer.merged


def _adapters(name: str, layer: Any) -> Adapters:
    active = [a for a in layer.active_adapters if a in layer.lora_A]
    if layer.disable_adapters:
        raise PlanMismatch(f"{name}: its LoRA adapters are disabled; enable them, or merge them, before the update")
    odd = _oddity(layer, active)
    if odd is not None:
        raise PlanMismatch(
            f"{name}: {odd} cannot be merged in passing; merge the adapter (peft: model.merge_adapter()) before the update"
        )
    return Adapters(
        f"{name}.base_layer.weight",
        tuple((f"{name}.lora_A.{a}.weight", f"{name}.lora_B.{a}.weight") for a in active),
        tuple(float(layer.scaling[a]) for a in active),
        bool(getattr(layer, "fan_in_fan_out", False)),
    )


def _oddity(layer: Any, active: Iterable[str]) -> str | None:
    """Why a layer is no plain LoRA of a linear layer."""
    base = layer.get_base_layer()
    weight: Any = getattr(base, "weight", None)
    linear = isinstance(weight, torch.Tensor) and weight.dim() == 2 and hasattr(layer, "in_features")
    if len(getattr(layer, "lora_embedding_A", ())):
        return "LoRA of an embedding"
    if not linear or not weight.is_floating_point():
        return f"LoRA of a {type(base).__name__}"
    for adapter in active:
        if adapter in getattr(layer, "lora_variant", {}) or getattr(layer, "use_dora", {}).get(adapter):
            return "a LoRA variant such as DoRA"
        if getattr(layer, "lora_bias", {}).get(adapter):
            return "LoRA with a bias"
    return None
