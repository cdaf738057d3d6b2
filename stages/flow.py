"""What flows through a chain: groups of tensors, buckets of bytes, shipments to engines, deliveries back."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import torch
import xxhash

from stages.errors import PlanMismatch

_MAX_DIMENSIONS = 64  # torch's own limit


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """`torch.bfloat16` -> `"bfloat16"`, the spelling that engines and our wires use."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """Inverse of `dtype_name`. Raises ValueError for anything that is not a torch dtype."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a torch dtype name such as 'bfloat16'")
    return dtype


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor as it will travel: HF name, dtype on the wire, full (unsharded) shape."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.name} {dtype_name(self.dtype)}{list(self.shape)}"


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """Tensors that must not be separated, and other names that share their storage.

    `aliases` holds `(alias, name)` pairs, e.g. a tied `lm_head.weight` -> `model.embed_tokens.weight`.
    """

    tensors: tuple[TensorSpec, ...]
    aliases: tuple[tuple[str, str], ...] = ()

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors)


@dataclass(slots=True)
class Group:
    """A GroupSpec with its tensors, in the same order and of the same shapes.

    A tensor may be of a wider float dtype than its spec says and need not be contiguous: whoever writes the bytes casts
    and compacts, so that this costs no pass of its own. Valid until the generator that yielded it is resumed.
    """

    spec: GroupSpec
    tensors: tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class Entry:
    """`nbytes` of one tensor, from byte `start` of the tensor, at byte `offset` of a bucket.

    `start == 0 and nbytes == spec.nbytes` for a whole tensor.
    """

    spec: TensorSpec
    offset: int
    nbytes: int
    start: int = 0

    @property
    def whole(self) -> bool:
        return self.nbytes == self.spec.nbytes


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """The content of one bucket: its place in the update (`seq` from 0), its entries and its size in bytes."""

    seq: int
    entries: tuple[Entry, ...]
    nbytes: int


@dataclass(frozen=True)
class Plan:
    """The tensors of an update and how they are cut into buckets. A pure function of metadata and settings."""

    groups: tuple[GroupSpec, ...]
    buckets: tuple[BucketLayout, ...]

    @cached_property
    def hash(self) -> str:
        """xxh3-128 of every name, dtype, shape, offset, cut and bucket size, in order."""
        content = [[b.nbytes, [_line(e) for e in b.entries]] for b in self.buckets]
        return xxhash.xxh3_128_hexdigest(json.dumps(content).encode())

    @cached_property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """Every tensor that travels, once, in the order of its first byte."""
        return tuple(e.spec for b in self.buckets for e in b.entries if e.start == 0)

    @cached_property
    def nbytes(self) -> int:
        """Payload bytes, without padding."""
        return sum(e.nbytes for b in self.buckets for e in b.entries)

    @cached_property
    def largest_bucket(self) -> int:
        return max((b.nbytes for b in self.buckets), default=0)


def _line(e: Entry) -> list[Any]:
    return [e.spec.name, dtype_name(e.spec.dtype), e.spec.shape, e.offset, e.nbytes, e.start]


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """The plan as our own receivers get it (see `plan_from_json`). Aliases do not travel: they are already expanded.

    `{"hash", "tensors": [[name, dtype, shape]...], "buckets": [[nbytes, [[tensor index, offset, nbytes, start]...]]...]}`
    """
    index = {spec.name: i for i, spec in enumerate(plan.tensors)}
    return {
        "hash": plan.hash,
        "tensors": [[t.name, dtype_name(t.dtype), list(t.shape)] for t in plan.tensors],
        "buckets": [
            [b.nbytes, [[index[e.spec.name], e.offset, e.nbytes, e.start] for e in b.entries]] for b in plan.buckets
        ],
    }


def plan_from_json(data: Any) -> Plan:
    """Inverse of `plan_to_json`, of whatever a stranger sent.

    Raises PlanMismatch for anything malformed, for entries that overlap or lie outside, for tensors that do not arrive
    once and whole, in order, and for a wrong hash.
    """
    try:
        specs = tuple(TensorSpec(_text(n), dtype_of(_text(d)), _shape(s)) for n, d, s in data["tensors"])
        buckets = tuple(
            BucketLayout(
                seq,
                tuple(Entry(specs[_whole(i)], _whole(o), _whole(n), _whole(s)) for i, o, n, s in entries),
                _whole(nbytes),
            )
            for seq, (nbytes, entries) in enumerate(data["buckets"])
        )
        expected = _text(data["hash"])
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
        raise PlanMismatch(f"malformed plan: {type(error).__name__}: {error}") from error
    _check_entries(specs, buckets)
    plan = Plan(tuple(GroupSpec((s,)) for s in specs), buckets)
    if plan.hash != expected:
        raise PlanMismatch(f"plan hash is {plan.hash}, the sender says {expected}")
    return plan


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"a {type(value).__name__} where text belongs")
    return value


def _whole(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 62:
        raise ValueError(f"a {type(value).__name__} where a whole number from 0 belongs")
    return value


def _shape(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > _MAX_DIMENSIONS:
        raise ValueError(f"a {type(value).__name__} where a shape of at most {_MAX_DIMENSIONS} dimensions belongs")
    return tuple(map(_whole, value))


def _check_entries(specs: tuple[TensorSpec, ...], buckets: tuple[BucketLayout, ...]) -> None:
    arrived: dict[str, int] = {}
    for bucket in buckets:
        end = 0
        for e in bucket.entries:
            item = e.spec.dtype.itemsize
            if e.offset < end or e.offset + e.nbytes > bucket.nbytes or (e.offset | e.start | e.nbytes) % item:
                raise PlanMismatch(f"malformed plan: bucket {bucket.seq}: {e.spec.name} is out of place")
            if e.start != arrived.get(e.spec.name, 0) or (e.nbytes == 0 and e.spec.name in arrived):
                raise PlanMismatch(f"malformed plan: bucket {bucket.seq}: {e.spec.name} is out of order")
            end, arrived[e.spec.name] = e.offset + e.nbytes, e.start + e.nbytes
    whole = {s.name: s.nbytes for s in specs}
    if len(whole) != len(specs) or arrived != whole:
        raise PlanMismatch("malformed plan: some tensors do not arrive once and whole")


@dataclass(slots=True, eq=False)
class Slot:
    """One fixed buffer of a ring. `memory` is flat uint8; `handle` is the transport's own."""

    index: int
    memory: torch.Tensor
    handle: Any = None
    lease: int = 0  # tells one use from the next

    @property
    def view(self) -> memoryview:
        """The buffer as bytes, for hashing and writing. CPU only."""
        if self._view is None:
            self._view = self.memory.numpy().data
        return self._view

    @property
    def address(self) -> int:
        """Where the buffer lies."""
        if not self._address:
            self._address = self.memory.data_ptr()
        return self._address

    _view: memoryview | None = field(default=None, repr=False)
    _address: int = field(default=0, repr=False)


@dataclass(slots=True, eq=False)
class Bucket:
    """A filled slot. Held until `release()`; on ranks that hold no bytes `slot` is None.

    `digest` is xxh3-64 over the entries' bytes in order, or None where nobody checks one.
    """

    layout: BucketLayout
    plan: Plan
    update: int
    slot: Slot | None
    digest: int | None
    last: bool
    _release: Callable[[], None] = field(repr=False, default=lambda: None)

    @property
    def memory(self) -> torch.Tensor:
        """The used bytes, uint8 [nbytes]."""
        assert self.slot is not None
        return self.slot.memory[: self.layout.nbytes]

    def tensors(self, memory: torch.Tensor | None = None) -> list[tuple[str, torch.Tensor]]:
        """Name and view of every tensor in the bucket, or in `memory`, a copy of it. For wires that cut no tensor."""
        memory = self.memory if memory is None else memory
        return [
            (e.spec.name, memory[e.offset : e.offset + e.nbytes].view(e.spec.dtype).view(e.spec.shape))
            for e in self.layout.entries
        ]

    def release(self) -> None:
        """Give the slot back to its ring. Safe to call twice."""
        release, self._release = self._release, lambda: None
        release()


@dataclass(slots=True)
class Delivery:
    """What one engine answered for one bucket. `seconds` is the request's own time."""

    engine: str
    seq: int
    seconds: float
    error: BaseException | None = None


@dataclass(slots=True, eq=False)
class Shipment:
    """A bucket on its way to the engines.

    `message` is what the engines' adapters need to know (a class of `stages.transport.messages`); `send` moves the bytes
    and blocks until they have left, or is None where the message already says where they are. notify_engines fills
    `deliveries`; a failure is recorded there, not raised, so that barrier can tell every rank.
    """

    bucket: Bucket
    message: Any
    send: Callable[[], None] | None = None
    deliveries: list[Delivery] = field(default_factory=list)
    failure: BaseException | None = None
