"""What a trainer would send, made by hand: the tests of an engine end must not trust our own senders."""

from __future__ import annotations

import base64
import pickle
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import torch
from torch.multiprocessing import reductions


def by_value(obj: Any) -> str:
    """base64 of a plain pickle."""
    return base64.b64encode(pickle.dumps(obj)).decode()


def by_handle(obj: Any) -> str:
    """base64 of a pickle in which tensors are shared-memory handles; they live as long as their tensors."""
    torch.multiprocessing.set_sharing_strategy("file_system")
    return base64.b64encode(bytes(ForkingPickler.dumps(obj))).decode()


def flat_bytes(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """SGLang's flattened bucket: byte indices."""
    metadata, parts, start = [], [], 0
    for name, tensor in tensors.items():
        part = tensor.contiguous().reshape(-1).view(torch.uint8)
        metadata.append(_entry(name, tensor, start, part.numel()))
        parts.append(part)
        start += part.numel()
    return {"flattened_tensor": torch.cat(parts), "metadata": metadata}


def flat_elements(tensors: dict[str, torch.Tensor]) -> tuple[torch.Tensor, list[SimpleNamespace]]:
    """LMDeploy's flattened bucket: one dtype, element indices."""
    metadata, start = [], 0
    for name, tensor in tensors.items():
        metadata.append(_entry(name, tensor, start, tensor.numel()))
        start += tensor.numel()
    return torch.cat([tensor.reshape(-1) for tensor in tensors.values()]), metadata


def reduced(tensor: torch.Tensor) -> tuple[Any, tuple[Any, ...]]:
    """How LMDeploy gets a tensor: `(rebuild function, arguments)`."""
    torch.multiprocessing.set_sharing_strategy("file_system")
    return reductions.reduce_tensor(tensor)


def announced(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """The lists by which distributed routes announce a bucket."""
    return {
        "names": list(tensors),
        "dtypes": [str(t.dtype).removeprefix("torch.") for t in tensors.values()],
        "shapes": [list(t.shape) for t in tensors.values()],
    }


def _entry(name: str, tensor: torch.Tensor, start: int, length: int) -> SimpleNamespace:
    return SimpleNamespace(
        name=name, shape=tensor.shape, dtype=tensor.dtype, start_idx=start, end_idx=start + length, numel=length
    )
