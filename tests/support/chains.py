"""Runs without engines: groups of tensors with known bytes, packed by the real stage, decoded independently."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import settings

from stages.bucket import Bucket
from stages.comm import Comm
from stages.flow import Bucket as BucketItem
from stages.flow import BucketLayout, Group, GroupSpec, Plan, Shipment, TensorSpec
from stages.run import Run, Timeouts, Wire
from stages.transport.base import Transport

settings.register_profile("weightstream", deadline=None, max_examples=30, derandomize=True)
settings.load_profile("weightstream")

DTYPES = (
    torch.float8_e4m3fn,
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.int64,
    torch.uint8,
    torch.bool,
)

# The layouts that adapters ask for: SGLang, LMDeploy, our own receiver, a folder for vLLM.
MIXED = Wire(mixed=True, split=False, align=1)
ONE_DTYPE = Wire(mixed=False, split=False, align=1)
SPLIT = Wire(mixed=True, split=True, align=256, aliases="duplicate", digest=True)
FOLDER = Wire(mixed=True, split=False, align=1, aliases="duplicate", digest=True)
WIRES = {"mixed": MIXED, "one dtype": ONE_DTYPE, "split": SPLIT, "folder": FOLDER}

SHORT = Timeouts(connect=5.0, control=10.0, put=10.0, group=10.0, agree=20.0)


class Memory(Transport):
    """A transport that moves nothing: buckets lie in ordinary memory."""

    name = "memory"

    def ship(self, bucket: BucketItem, run: Run) -> Shipment:
        return Shipment(bucket, None)


def make_run(wire: Wire = MIXED, **fields: Any) -> Run:
    """One rank, no engines, short timeouts."""
    settings: dict[str, Any] = {
        "comm": Comm(),
        "device": torch.device("cpu"),
        "backend": None,
        "transport": Memory(),
        "wire": wire,
        "timeouts": SHORT,
    }
    return Run(**(settings | fields))


def raw(tensor: torch.Tensor) -> bytes:
    """A tensor's bytes in row-major order, without our digest or packing code."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def tensor_of(dtype: torch.dtype, shape: Sequence[int], seed: int = 0) -> torch.Tensor:
    """Any bytes at all, NaNs and infinities among them; the same for the same arguments."""
    count = int(torch.Size(shape).numel())
    random = torch.Generator().manual_seed(seed * 7919 + 13)
    high = 2 if dtype is torch.bool else 256
    flat = torch.randint(high, (count * dtype.itemsize,), generator=random, dtype=torch.uint8)
    return flat.view(dtype).view(tuple(shape))


def spec(name: str, dtype: torch.dtype = torch.bfloat16, shape: Sequence[int] = (4,)) -> TensorSpec:
    return TensorSpec(name, dtype, tuple(shape))


def group_of(tensors: dict[str, torch.Tensor], aliases: Iterable[tuple[str, str]] = ()) -> Group:
    specs = tuple(TensorSpec(name, t.dtype, tuple(t.shape)) for name, t in tensors.items())
    return Group(GroupSpec(specs, tuple(aliases)), tuple(tensors.values()))


@dataclass
class Packed:
    """A bucket after its slot was given back: layout, a copy of its bytes, digest."""

    layout: BucketLayout
    memory: torch.Tensor
    digest: int | None
    last: bool


@dataclass
class Packing:
    """All buckets of one pass through the bucket stage."""

    plan: Plan
    buckets: list[Packed] = field(default_factory=list)

    def decode(self) -> dict[str, bytes]:
        """The tensors, put together from entries alone. Fails on overlaps, gaps and misaligned views."""
        whole: dict[str, bytearray] = {}
        filled: dict[str, int] = {}
        for bucket in self.buckets:
            taken: list[tuple[int, int]] = []
            for e in bucket.layout.entries:
                piece = bucket.memory[e.offset : e.offset + e.nbytes]
                assert piece.numel() == e.nbytes, f"{e.spec.name} reaches beyond its bucket"
                piece.view(e.spec.dtype)  # torch refuses a misaligned view
                assert all(e.offset >= end or e.offset + e.nbytes <= begin for begin, end in taken if end > begin)
                taken.append((e.offset, e.offset + e.nbytes))
                assert e.start == filled.get(e.spec.name, 0), f"{e.spec.name}: pieces out of order"
                target = whole.setdefault(e.spec.name, bytearray(e.spec.nbytes))
                target[e.start : e.start + e.nbytes] = bytes(piece.numpy())
                filled[e.spec.name] = e.start + e.nbytes
        for bucket in self.buckets:
            for e in bucket.layout.entries:
                assert filled[e.spec.name] == e.spec.nbytes, f"{e.spec.name} is incomplete"
        return {name: bytes(data) for name, data in whole.items()}


def pack(
    groups: Sequence[Group],
    wire: Wire,
    capacity: int,
    *,
    slots: int = 2,
    run: Run | None = None,
    streamed: Iterable[Group] | None = None,
) -> Packing:
    """Send `groups` through the bucket stage; `streamed` replaces what comes by after planning."""
    run = run or make_run(wire)
    stage = Bucket(capacity, slots)
    stage.plan(tuple(g.spec for g in groups), run)
    stage.prepare(run)
    packing = Packing(run.current_plan)
    try:
        for bucket in stage(iter(groups if streamed is None else streamed), run):
            packing.buckets.append(Packed(bucket.layout, bucket.memory.clone(), bucket.digest, bucket.last))
            bucket.release()
    finally:
        stage.close()
    return packing


def expected_bytes(groups: Sequence[Group], wire: Wire) -> dict[str, bytes]:
    """What decode() should give, from the groups themselves."""
    result = {}
    for group in groups:
        for tensor_spec, tensor in zip(group.spec.tensors, group.tensors, strict=True):
            result[tensor_spec.name] = raw(tensor.to(tensor_spec.dtype))
            if wire.aliases == "duplicate":
                result |= {a: result[tensor_spec.name] for a, name in group.spec.aliases if name == tensor_spec.name}
    return result
