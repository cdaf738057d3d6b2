"""Reading a torch module: its parameters and buffers by HF checkpoint name, tied ones once, fused experts one by one."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch

from stages.errors import PlanMismatch
from stages.gather.names import strip_wrappers

# transformers 5 keeps a layer's experts as 3-D parameters, with or without `.weight`.
_EXPERTS = re.compile(r"^(?P<prefix>.*\.experts)\.(?P<kind>gate_up_proj|down_proj)(?:\.weight)?$")
# Names that PEFT 0.1x gives: adapters, the wrapped layer, trained copies of whole modules.
_LORA = re.compile(r"\.lora_(A|B|embedding_A|embedding_B|magnitude_vector)\b")
_SAVED = re.compile(r"\.modules_to_save\.[^.]+")


@dataclass(frozen=True, slots=True)
class Leaf:
    """One HF-named tensor of a module: `read()` gives the current values, full shape, without a copy where possible."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]


def leaves_of(module: torch.nn.Module) -> tuple[list[Leaf], list[tuple[str, str]]]:
    """`(leaves, aliases)` in module order; aliases are `(tied name, name that travels)`.

    Tied parameters are found by shared storage, whether or not they are the same object. Buffers count when they are
    part of the state dict. Raises PlanMismatch for colliding names and for unmerged LoRA adapters.
    """
    named: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
    persistent = _persistent_buffers(module)
    named |= {n: b for n, b in module.named_buffers(remove_duplicate=False) if n in persistent}
    clean = strip_wrappers(named)
    plain = without_adapters({clean[n]: t for n, t in named.items()}, all_merged=_all_merged(module))
    owners: dict[tuple[object, ...], list[Leaf]] = {}
    leaves: list[Leaf] = []
    aliases: list[tuple[str, str]] = []
    for name, tensor in plain.items():
        parts = _expand(name, tensor)
        owner = owners.setdefault(_identity(tensor), parts)
        if owner is parts or len(owner) != len(parts):
            leaves += parts
        else:
            aliases += [(mine.name, theirs.name) for mine, theirs in zip(parts, owner, strict=True)]
    return leaves, aliases


def without_adapters(named: dict[str, torch.Tensor], all_merged: bool) -> dict[str, torch.Tensor]:
    """PEFT's names turned into the base model's: merged adapters dropped, trained copies sent under the plain name.

    Raises PlanMismatch when adapters are not merged, since the base weights alone would be the wrong model.
    """
    adapters = [n for n in named if _LORA.search(n)]
    if adapters and not all_merged:
        raise PlanMismatch(
            f"the module has {len(adapters)} unmerged LoRA tensors, first {adapters[0]}; merge the adapter into the base "
            f"weights (peft: model.merge_adapter()) before the update"
        )
    saved: dict[str, str] = {}
    for name in filter(_SAVED.search, named):
        plain = _SAVED.sub("", name)
        if plain in saved:
            raise PlanMismatch(
                f"{plain} has two trained copies, {saved[plain]} and {name}; delete the adapter that is not meant"
            )
        saved[plain] = name
    kept: dict[str, torch.Tensor] = {}
    for name, tensor in named.items():
        if _LORA.search(name) or _SAVED.search(name):
            continue
        plain = name.replace(".original_module.", ".").replace(".base_layer.", ".")
        if plain in kept:
            raise PlanMismatch(f"{name} and another tensor are both {plain} in the base model")
        kept[plain] = named[saved[plain]] if plain in saved else tensor
    kept |= {plain: named[name] for plain, name in saved.items() if plain not in kept}
    if kept and all(n.startswith("base_model.model.") for n in kept):
        kept = {n.removeprefix("base_model.model."): t for n, t in kept.items()}
    return kept


def _all_merged(module: torch.nn.Module) -> bool:
    layers = [m for m in module.modules() if hasattr(m, "lora_A")]
    return bool(layers) and all(getattr(m, "merged", False) for m in layers)


def _persistent_buffers(module: torch.nn.Module) -> set[str]:
    """Buffers that a checkpoint holds, by full name."""
    found = set()
    for prefix, sub in module.named_modules(remove_duplicate=False):
        skip = sub._non_persistent_buffers_set
        found |= {f"{prefix}.{n}" if prefix else n for n in sub._buffers if n not in skip}
    return found


def _identity(tensor: torch.Tensor) -> tuple[object, ...]:
    """Equal for tensors that are the same bytes seen the same way. Empty tensors and fakes are their own."""
    if tensor.numel() == 0 or tensor.device.type == "meta":
        return (id(tensor),)
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()))


def _expand(name: str, tensor: torch.Tensor) -> list[Leaf]:
    """Fused 3-D experts become `experts.{e}.{gate,up,down}_proj.weight`; everything else stays what it is.

    Layouts of transformers 5: gate_up_proj [E, 2I, H] with gate first, down_proj [E, H, I].
    """
    match = _EXPERTS.match(name)
    if match is None or tensor.dim() != 3:
        return [Leaf(name, tensor.dtype, tuple(tensor.shape), lambda: tensor.detach())]
    prefix, experts = match["prefix"], tensor.shape[0]
    leaves = []
    for expert in range(experts):
        if match["kind"] == "down_proj":
            leaves.append(_part(f"{prefix}.{expert}.down_proj.weight", tensor, expert, 0, tensor.shape[1]))
            continue
        if tensor.shape[1] % 2:
            raise PlanMismatch(f"{name}: shape {list(tensor.shape)} does not split into gate and up halves")
        half = tensor.shape[1] // 2
        leaves.append(_part(f"{prefix}.{expert}.gate_proj.weight", tensor, expert, 0, half))
        leaves.append(_part(f"{prefix}.{expert}.up_proj.weight", tensor, expert, half, half))
    return leaves


def _part(name: str, tensor: torch.Tensor, expert: int, first: int, rows: int) -> Leaf:
    shape = (rows, tensor.shape[2])
    return Leaf(name, tensor.dtype, shape, lambda: tensor.detach()[expert, first : first + rows])
