"""Whether a module is still what its description says: between two optimizer steps hardly anything but values changes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from operator import attrgetter, eq, is_
from typing import Any

import torch

from stages.gather.dtensor import is_dtensor
from stages.gather.layout import Description
from stages.gather.megatron import models_in
from stages.gather.module import tensors_by_name


class Watch:
    """The tensors that a module was described by. Describing takes 50 us per tensor, looking again 2.

    Sees modules and tensors that were added, removed or replaced, other dtypes, shapes, strides, devices and ties. Not for
    modules whose tensors depend on more than that: see `watch`.
    """

    def __init__(self, module: torch.nn.Module, described: Description, keys: dict[str, torch.Tensor]) -> None:
        self._module = module
        self._described = described
        modules = list(module.modules())
        self._tables: list[Any] = [t for m in modules for t in (m._parameters, m._buffers, m._modules)]
        self._tables += [m._non_persistent_buffers_set for m in modules if m._buffers]
        self._sizes = [len(t) for t in self._tables]
        held = [
            (table, name, value)
            for m in modules
            for table in (m._parameters, m._modules, m._buffers)
            for name, value in table.items()
            if table is not m._buffers or name not in m._non_persistent_buffers_set
        ]
        self._dicts, self._names, self._values = [*map(list, zip(*held, strict=True))] or [[], [], []]
        self._keys = list(keys)
        self._tensors = list(keys.values())
        self._specs = [getattr(t, "_spec", None) for t in self._tensors]
        self._resharding = _resharding(modules)
        shares = self._shares()
        self._kinds = [[*map(kind, shares)] for kind in _KINDS]
        self._addresses = [t.data_ptr() for t in shares]
        self._ties = _ties(self._addresses)

    def same(self, model: object) -> bool:
        """Whether `model` would be described as it was. Brings the description's tensors up to date where they moved."""
        if model is not self._module:
            return False
        for sub in self._resharding:
            sub.reshard()
        if [*map(len, self._tables)] != self._sizes:
            return False
        if not all(map(is_, map(dict.get, self._dicts, self._names), self._values)):
            return False
        if not all(t._spec is spec for t, spec in zip(self._tensors, self._specs, strict=True) if spec is not None):  # type: ignore[attr-defined]
            return False
        shares = self._shares()
        # Nothing is kept of what is looked at: tens of thousands of new objects would set off the garbage collector.
        if not all(all(map(eq, map(kind, shares), known)) for kind, known in zip(_KINDS, self._kinds, strict=True)):
            return False
        addresses = [t.data_ptr() for t in shares]
        if addresses != self._addresses:
            if _ties(addresses) != self._ties:
                return False
            self._moved(shares, addresses)
        return True

    def _moved(self, shares: list[torch.Tensor], addresses: list[int]) -> None:
        assert isinstance(self._described.tensors, dict)
        for key, share, now, before in zip(self._keys, shares, addresses, self._addresses, strict=True):
            if now != before and key in self._described.tensors:
                self._described.tensors[key] = share.detach()
        self._addresses = addresses

    def _shares(self) -> list[torch.Tensor]:
        return [
            t if spec is None else t._local_tensor  # type: ignore[attr-defined]
            for t, spec in zip(self._tensors, self._specs, strict=True)
        ]


def watch(model: object, described: Description) -> Watch | None:
    """A watch over what was just described, or None where looking at plain tensors and DTensors is not enough.

    That is other kinds of tensors (a ZeRO partition hangs on its parameter), layers with adapters, whose settings count,
    Megatron's modules, and folders.
    """
    if not isinstance(model, torch.nn.Module) or any(hasattr(m, "lora_A") for m in model.modules()):
        return None
    if models_in(model):
        return None
    tensors = tensors_by_name(model)
    kinds = (torch.Tensor, torch.nn.Parameter)
    if any((type(t) not in kinds and not is_dtensor(t)) or hasattr(t, "ds_tensor") for t in tensors.values()):
        return None
    return Watch(model, described, tensors)


def _resharding(modules: Iterable[torch.nn.Module]) -> list[Any]:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kind = getattr(fsdp, "FSDPModule", None)
    return [m for m in modules if kind is not None and isinstance(m, kind)]


_KINDS: tuple[Callable[[torch.Tensor], object], ...] = (
    attrgetter("dtype"),
    attrgetter("shape"),
    attrgetter("device"),
    torch.Tensor.stride,
)


def _ties(addresses: list[int]) -> list[int]:
    """For each address the first place that it is at."""
    first: dict[int, int] = {}
    return [first.setdefault(a, i) for i, a in enumerate(addresses)]
