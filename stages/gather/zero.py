"""DeepSpeed ZeRO-3 parameters: each rank keeps an equal piece of the flattened tensor, the last one padded. Seen in 0.19."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import torch
import torch.distributed

from stages.errors import PlanMismatch
from stages.gather.layout import Box, Cut, Leaf, Part, Spans, Spread


def is_zero(tensor: torch.Tensor) -> bool:
    """Whether DeepSpeed partitions this parameter."""
    return hasattr(tensor, "ds_tensor") and hasattr(tensor, "ds_shape")


def zero_shape(tensor: Any) -> tuple[int, ...]:
    """The shape of the whole tensor."""
    return tuple(tensor.ds_shape)


def zero_share(name: str, tensor: Any) -> tuple[torch.Tensor, int, Spread]:
    """`(this rank's piece, elements over all ranks with padding, spread)`, also while the whole tensor happens to be gathered.

    Raises PlanMismatch for a piece that is on NVMe.
    """
    piece: torch.Tensor | None = tensor.ds_tensor
    if piece is None or getattr(getattr(piece, "status", None), "name", "AVAILABLE") != "AVAILABLE":
        raise PlanMismatch(
            f"{name}: its ZeRO-3 partition is not in memory; offload parameters to cpu or none, not to nvme"
        )
    ranks = tuple(torch.distributed.get_process_group_ranks(tensor.ds_process_group))
    return piece.detach().view(-1), piece.numel() * len(ranks), Spread((len(ranks),), ranks, (Cut(0),))


def flattened(leaf: Leaf, shape: tuple[int, ...]) -> Leaf:
    """The same leaf, of a tensor of this shape that is stored flat."""
    return replace(leaf, parts=tuple(Part(p.key, (_flat(p.select, shape),)) for p in leaf.parts))


def _flat(select: Box, shape: tuple[int, ...]) -> Spans:
    """The elements of a box, in row-major order, as ranges of the flattened tensor."""
    cut = [d for d, (spans, size) in enumerate(zip(select, shape, strict=True)) if spans != ((0, size),)]
    if not cut:
        return ((0, math.prod(shape)),)
    last = cut[-1]
    steps = [math.prod(shape[d + 1 :]) for d in range(last + 1)]
    outer = [[i for start, stop in spans for i in range(start, stop)] for spans in select[:last]]
    found = []
    for indices in itertools.product(*outer):
        base = sum(i * step for i, step in zip(indices, steps, strict=False))
        found += [(base + start * steps[last], base + stop * steps[last]) for start, stop in select[last]]
    return tuple(found)
