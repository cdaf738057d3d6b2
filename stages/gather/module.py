"""Reading a torch module: its parameters and buffers by HF checkpoint name, tied ones once, fused experts one by one."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

import torch

from stages.errors import PlanMismatch
from stages.gather.dtensor import Meshes, settle, share_of
from stages.gather.layout import Box, Description, Leaf, Lora, Part, Spread, whole
from stages.gather.lora import Adapters, adapters_of, factor_names
from stages.gather.names import strip_wrappers
from stages.gather.zero import flattened, is_zero, zero_shape, zero_share

T = TypeVar("T")

# transformers 5 keeps a layer's experts as 3-D parameters, with or without `.weight`.
_EXPERTS = re.compile(r"^(?P<prefix>.*\.experts)\.(?P<kind>gate_up_proj|down_proj)(?:\.weight)?$")
# Names that PEFT 0.1x gives: adapters, the wrapped layer, trained copies of whole modules.
_LORA = re.compile(r"\.lora_(A|B|embedding_A|embedding_B|magnitude_vector)\b")
_SAVED = re.compile(r"\.modules_to_save\.[^.]+")


def describe(module: torch.nn.Module, rank: int = 0) -> Description:
    """The tensors of a module as this rank sees them, in module order.

    Tied parameters are found by shared storage, whether or not they are the same object. Buffers count when they are
    part of the state dict. LoRA adapters become part of the weights that they change. Raises PlanMismatch for colliding
    names and for adapters that cannot be merged in passing.
    """
    settle(module)
    pending = {a.weight: a for a in adapters_of(module)}  # which refuses odd adapters with the better words
    named, plain = _names(module)
    made, meshes = Description(), Meshes()
    owners: dict[tuple[object, ...], list[Leaf]] = {}
    for name, raw in plain.items():
        tensor = named[raw]
        local, stored, spread, leaves = _read(name, tensor, meshes)
        if (adapters := pending.get(raw)) is not None:
            made.store(name, local, stored, spread, rank)
            made.leaves.append(_merged(made, leaves[0], adapters, named, rank, meshes))
            continue
        owner = owners.setdefault(_identity(tensor, local, leaves), leaves)
        if owner is leaves or len(owner) != len(leaves):
            made.store(name, local, stored, spread, rank)
            made.leaves += leaves
        else:
            made.aliases += [(mine.name, theirs.name) for mine, theirs in zip(leaves, owner, strict=True)]
    return made


def describe_tensors(state: Mapping[str, torch.Tensor], rank: int = 0) -> Description:
    """The same for tensors that already have their HF names."""
    made, meshes = Description(), Meshes()
    owners: dict[tuple[object, ...], list[Leaf]] = {}
    for name, tensor in state.items():
        local, stored, spread, leaves = _read(name, tensor.detach(), meshes)
        owner = owners.setdefault(_identity(tensor, local, leaves), leaves)
        if owner is leaves or len(owner) != len(leaves):
            made.store(name, local, stored, spread, rank)
            made.leaves += leaves
        else:
            made.aliases += [(mine.name, theirs.name) for mine, theirs in zip(leaves, owner, strict=True)]
    return made


def tensors_by_name(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The module's own tensors by the names that they are described under; tied ones under each of theirs."""
    named, plain = _names(module)
    return {name: named[raw] for name, raw in plain.items()}


def _names(module: torch.nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """`(tensors by the module's own names, own name by clean name)`; the second without the factors of adapters."""
    named: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
    persistent = _persistent_buffers(module)
    named |= {n: b for n, b in module.named_buffers(remove_duplicate=False) if n in persistent}
    clean = strip_wrappers(named)
    known = factor_names(module)
    return named, without_adapters({clean[n]: n for n in named if n not in known}, all_merged=_all_merged(module))


def _read(
    name: str, tensor: torch.Tensor, meshes: Meshes
) -> tuple[torch.Tensor, tuple[int, ...], Spread | None, list[Leaf]]:
    """`(this rank's share, full shape as stored, spread, what HF tensors are in it)`."""
    if is_zero(tensor):
        shape = zero_shape(tensor)
        local, padded, flat = zero_share(name, tensor)
        return local, (padded,), flat, [flattened(leaf, shape) for leaf in hf_leaves(name, local.dtype, shape)]
    local, shape, spread = share_of(name, tensor, meshes)
    return local, shape, spread, hf_leaves(name, tensor.dtype, shape)


def _merged(
    made: Description, base: Leaf, adapters: Adapters, named: dict[str, torch.Tensor], rank: int, meshes: Meshes
) -> Leaf:
    """A weight with what its adapters add."""
    parts = [*base.parts]
    if any(is_zero(named[n]) for n in (adapters.weight, *itertools.chain(*adapters.factors))):
        raise PlanMismatch(
            f"{base.name}: LoRA over ZeRO-3 cannot be merged in passing; merge the adapter before the update"
        )
    for key in itertools.chain(*adapters.factors):
        local, shape, spread = share_of(key, named[key], meshes)
        made.store(key, local, shape, spread, rank)
        parts.append(Part(key, whole(shape)))
    return replace(base, parts=tuple(parts), lora=Lora(adapters.scales, adapters.transposed))


def without_adapters(named: dict[str, T], all_merged: bool) -> dict[str, T]:
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
    kept: dict[str, T] = {}
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


def _identity(tensor: torch.Tensor, local: torch.Tensor, leaves: list[Leaf]) -> tuple[object, ...]:
    """Equal for tensors that are the same bytes seen the same way. Empty tensors and fakes are their own."""
    if local.numel() == 0 or local.device.type == "meta":
        return (id(tensor),)
    shapes = tuple(leaf.shape for leaf in leaves)
    return (local.device, local.data_ptr(), local.dtype, shapes, tuple(local.shape), tuple(local.stride()))


def hf_leaves(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> list[Leaf]:
    """Fused 3-D experts become `experts.{e}.{gate,up,down}_proj.weight`; everything else stays what it is.

    Layouts of transformers 5: gate_up_proj [E, 2I, H] with gate first, down_proj [E, H, I].
    """
    match = _EXPERTS.match(name)
    if match is None or len(shape) != 3:
        return [Leaf(name, dtype, shape, (Part(name, whole(shape)),))]
    experts, rows, columns = shape
    if match["kind"] == "down_proj":
        cuts = {"down_proj": (0, rows)}
    elif rows % 2:
        raise PlanMismatch(f"{name}: shape {list(shape)} does not split into gate and up halves")
    else:
        cuts = {"gate_proj": (0, rows // 2), "up_proj": (rows // 2, rows)}
    leaves = []
    for expert in range(experts):
        for kind, (first, last) in cuts.items():
            box: Box = (((expert, expert + 1),), ((first, last),), ((0, columns),))
            hf = f"{match['prefix']}.{expert}.{kind}.weight"
            leaves.append(Leaf(hf, dtype, (last - first, columns), (Part(name, box),)))
    return leaves
