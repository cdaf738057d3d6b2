"""What a trainer would send, made by hand: the tests of an engine end must not trust our own senders."""

from __future__ import annotations

import base64
import pickle
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import torch
from torch.multiprocessing import reductions

from stages.flow import BucketLayout, Entry, Plan, TensorSpec, plan_to_json
from stages.transport.shm import Segment


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


class VllmBuckets:
    """Buckets for vLLM's plug-in, one shared segment each; tensors are cut where a bucket is full."""

    def __init__(self, tensors: dict[str, torch.Tensor], bucket_bytes: int) -> None:
        entries: list[list[Entry]] = [[]]
        pieces: list[list[torch.Tensor]] = [[]]
        for name, tensor in tensors.items():
            spec = TensorSpec(name, tensor.dtype, tuple(tensor.shape))
            data = tensor.contiguous().reshape(-1).view(torch.uint8)
            start = 0
            while start < spec.nbytes:
                used = sum(_padded(e.nbytes) for e in entries[-1])
                if used >= bucket_bytes:
                    entries.append([])
                    pieces.append([])
                    used = 0
                size = min(spec.nbytes - start, bucket_bytes - used)
                entries[-1].append(Entry(spec, used, size, start))
                pieces[-1].append(data[start : start + size])
                start += size
        layouts = tuple(
            BucketLayout(seq, tuple(found), sum(_padded(e.nbytes) for e in found)) for seq, found in enumerate(entries)
        )
        self.plan = Plan((), layouts)
        self.slot_bytes = max(layout.nbytes for layout in layouts)
        self.segments = [Segment(self.slot_bytes) for _ in layouts]
        for segment, layout, parts in zip(self.segments, layouts, pieces, strict=True):
            for entry, part in zip(layout.entries, parts, strict=True):
                segment.memory[entry.offset : entry.offset + entry.nbytes].copy_(part)

    def init_info(self) -> dict[str, Any]:
        names = [segment.name for segment in self.segments]
        return {"transport": "ipc", "timeout": 10.0, "segments": names, "slot_bytes": self.slot_bytes}

    def update_info(self, seq: int, update: int = 1) -> dict[str, Any]:
        return {
            "update": update,
            "seq": seq,
            "plan_hash": self.plan.hash,
            "plan": plan_to_json(self.plan) if seq == 0 else None,
            "slot": seq,
            "digest": None,
        }

    def close(self) -> None:
        for segment in self.segments:
            segment.unlink()


def _padded(size: int) -> int:
    return -(-size // 256) * 256
