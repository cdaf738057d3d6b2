"""Buckets of several tensors in one flat buffer, as SGLang and LMDeploy lay them out."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch


def split_bytes(buffer: torch.Tensor, metadata: list[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """SGLang: uint8 buffer, indices in bytes. Raises RuntimeError for an entry that is not aligned to its item size."""
    for entry in metadata:
        piece = buffer[entry.start_idx : entry.end_idx]
        yield entry.name, piece.view(entry.dtype).reshape(entry.shape)


def split_elements(buffer: torch.Tensor, metadata: list[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """LMDeploy: buffer of one dtype, indices in elements; the dtype in the metadata is cast to."""
    for entry in metadata:
        yield entry.name, buffer[entry.start_idx : entry.end_idx].view(*entry.shape).to(entry.dtype)


def empty_bytes(
    names: list[str], dtypes: list[torch.dtype], shapes: list[list[int]], device: torch.device
) -> tuple[torch.Tensor, list[tuple[str, torch.dtype, list[int], int, int]]]:
    """SGLang's receive buffer for a broadcast: entries back to back, `(name, dtype, shape, start, end)`.

    Raises ValueError for an empty list, a negative dimension or an entry that is not aligned to its item size.
    """
    if not names:
        raise ValueError("Cannot create empty tensor bucket")
    entries: list[tuple[str, torch.dtype, list[int], int, int]] = []
    end = 0
    for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
        if any(size < 0 for size in shape):
            raise ValueError(f"negative dimension in the shape of {name}: {shape}")
        if end % dtype.itemsize:
            raise ValueError(f"{name} starts at byte {end}, which is not a multiple of its item size {dtype.itemsize}")
        start, end = end, end + math.prod(shape) * dtype.itemsize
        entries.append((name, dtype, shape, start, end))
    return torch.empty(end, dtype=torch.uint8, device=device), entries
