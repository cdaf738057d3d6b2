"""The exchange: shares of tensors go to the ranks that want them whole, a batch of groups at a time, the next in flight.

Everything that depends on metadata alone is worked out once, by `plan_batch`; an update then only copies and waits.
Each share is sent once to each rank that wants it, in the dtype that travels on if that is the narrower one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from stages.errors import PlanMismatch
from stages.flow import Group, GroupSpec, TensorSpec
from stages.gather.group import OwnGroup
from stages.gather.layout import Box, Description, Layout, Leaf, extent, overlaps, whole

_ALIGN = 16  # bytes; every piece in a buffer starts at a multiple, so that it can be seen as any dtype

Slices = tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class Sent:
    """A block of this rank's share that goes to offset `offset` of the send buffer."""

    key: str
    local: Slices
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class Received:
    """A block of the receive buffer that goes to `target` of a part."""

    part: int
    target: Slices
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class Kept:
    """A block of this rank's own share that goes to `target` of a part."""

    part: int
    target: Slices
    key: str
    local: Slices


@dataclass(frozen=True, slots=True)
class Place:
    """A part of a leaf, put together at `offset` of the arena; None where it is a view of this rank's own share."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int | None


@dataclass(slots=True)
class Batch:
    """What one rank does for some consecutive groups."""

    specs: tuple[GroupSpec, ...]
    active: bool = False  # whether anything travels, anywhere
    sends: list[Sent] = field(default_factory=list)
    receives: list[Received] = field(default_factory=list)
    keeps: list[Kept] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)  # the parts of all leaves, in order; empty on ranks that drop
    plain: list[tuple[GroupSpec, tuple[str, ...]]] | None = (
        None  # groups and their tensors' keys, if all are whole here
    )
    outgoing: list[int] = field(default_factory=list)  # bytes to each rank
    incoming: list[int] = field(default_factory=list)  # bytes from each rank
    arena: int = 0  # bytes
    scratch: int = 0  # elements of the largest LoRA product


def cut_batches(specs: tuple[GroupSpec, ...], limit: int) -> list[tuple[GroupSpec, ...]]:
    """Consecutive groups of up to `limit` bytes together; a larger group is alone. Pure."""
    batches: list[tuple[GroupSpec, ...]] = []
    taken: list[GroupSpec] = []
    for spec in specs:
        if taken and sum(s.nbytes for s in taken) + spec.nbytes > limit:
            batches.append(tuple(taken))
            taken = []
        taken.append(spec)
    if taken:
        batches.append(tuple(taken))
    return batches


class Planner:
    """Plans the batches of one rank. Pure; remembers what repeats from leaf to leaf."""

    def __init__(self, layout: Layout, rank: int, world_size: int) -> None:
        self._layout = layout
        self._rank = rank
        self._world_size = world_size
        self._known: dict[tuple[str, int], tuple[list[tuple[Box, int]], bool]] = {}

    def plan(self, specs: tuple[GroupSpec, ...]) -> Batch:
        """What this rank does for these groups."""
        batch = Batch(specs, outgoing=[0] * self._world_size, incoming=[0] * self._world_size)
        leaves = [(spec, self._leaf(spec)) for group in specs for spec in group.tensors]
        for holder in self._layout.holders:
            for index, (spec, leaf, part) in enumerate((s, lf, p) for s, lf in leaves for p in range(len(lf.parts))):
                self._part(batch, holder, index, spec, leaf, part)
        base = [0, *itertools.accumulate(batch.incoming)]
        batch.receives = [
            Received(r.part, r.target, r.dtype, r.shape, r.offset % _FAR + base[r.offset // _FAR])
            for r in batch.receives
        ]
        if self._rank in self._layout.holders and not batch.active:
            batch.plain = self._plain(specs)
        return batch

    def _plain(self, specs: tuple[GroupSpec, ...]) -> list[tuple[GroupSpec, tuple[str, ...]]] | None:
        """The keys of the groups' tensors where each is one stored tensor as it is, whole on this rank."""
        made = []
        for spec in specs:
            leaves = [self._leaf(t) for t in spec.tensors]
            for leaf in leaves:
                placed = self._layout.placements[leaf.parts[0].key]
                here = placed.shares.get(whole(placed.stored.shape), ())
                if leaf.lora or len(leaf.parts) > 1 or self._rank not in here or leaf.shape != placed.stored.shape:
                    return None
                if leaf.parts[0].select != whole(leaf.shape):
                    return None
            made.append((spec, tuple(leaf.parts[0].key for leaf in leaves)))
        return made

    def _leaf(self, spec: TensorSpec) -> Leaf:
        leaf = self._layout.by_name.get(spec.name)
        if leaf is None:
            raise PlanMismatch(f"{spec.name} was planned, but no rank has it any more")
        return leaf

    def _part(self, batch: Batch, holder: int, index: int, spec: TensorSpec, leaf: Leaf, which: int) -> None:
        me, part = self._rank, leaf.parts[which]
        dtype = self._layout.placements[part.key].stored.dtype
        travels = dtype if leaf.lora else _narrower(dtype, spec.dtype)
        shares, remote = self._shares(part.key, holder)
        batch.active |= remote
        own: list[Kept] = []
        others = 0
        for box, owner in shares:
            for local, target, shape in _blocks(part.select, box):
                nbytes = _up(math.prod(shape) * travels.itemsize)
                if owner == holder == me:
                    own.append(Kept(index, target, part.key, local))
                elif owner == me:
                    offset = sum(batch.outgoing)  # holders ascend, and so do their places in the buffer
                    batch.sends.append(Sent(part.key, local, travels, shape, offset))
                    batch.outgoing[holder] += nbytes
                else:
                    batch.receives.append(Received(index, target, travels, shape, owner * _FAR + batch.incoming[owner]))
                    batch.incoming[owner] += nbytes
                    others += 1
        if holder != me:
            return
        shape = extent(part.select)
        kept = torch.float32 if leaf.lora else travels
        if len(own) == 1 and not others and not leaf.lora:
            batch.places.append(Place(dtype, shape, None))
        else:
            batch.places.append(Place(kept, shape, batch.arena))
            batch.arena += _up(math.prod(shape) * kept.itemsize)
        batch.keeps += own
        if leaf.lora and which == 0:
            batch.scratch = max(batch.scratch, math.prod(shape))

    def _shares(self, key: str, holder: int) -> tuple[list[tuple[Box, int]], bool]:
        """The shares that matter to this rank when `holder` gets the tensor, with who gives each; whether any travels."""
        known = self._known.get((key, holder))
        if known is None:
            given = [
                (box, holder if holder in ranks else min(ranks, key=lambda r: (abs(r - holder), r)))
                for box, ranks in self._layout.placements[key].shares.items()
            ]
            mine = [(box, owner) for box, owner in given if self._rank in (owner, holder)]
            known = self._known[key, holder] = mine, any(owner != holder for _, owner in given)
        return known


_FAR = 1 << 48  # a receive offset is planned as owner * _FAR + place among that owner's bytes


def _blocks(select: Box, held: Box) -> list[tuple[Slices, Slices, tuple[int, ...]]]:
    """`(where in the share, where in the part, shape)` of every block of `select` that `held` holds."""
    runs = []
    for wanted, have in zip(select, held, strict=True):
        common = overlaps(wanted, have)
        if not common:
            return []
        runs.append(common)
    return [
        (
            tuple(slice(there, there + n) for _, there, n in cross),
            tuple(slice(here, here + n) for here, _, n in cross),
            tuple(n for _, _, n in cross),
        )
        for cross in itertools.product(*runs)
    ]


def _narrower(stored: torch.dtype, wire: torch.dtype) -> torch.dtype:
    """The dtype in which a share travels: the cast to a narrower float may as well come first."""
    floats = stored.is_floating_point and wire.is_floating_point and wire.itemsize > 1
    return wire if floats and wire.itemsize < stored.itemsize else stored


def _up(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


class Exchange:
    """All batches of an update, and the buffers for them: two to send, two to receive, one to put tensors together."""

    def __init__(self, layout: Layout, specs: tuple[GroupSpec, ...], limit: int, rank: int, world_size: int) -> None:
        planner = Planner(layout, rank, world_size)
        self._layout = layout
        self._drops = rank not in layout.holders
        self.batches = [planner.plan(batch) for batch in cut_batches(specs, limit)]
        self._dropped = [[_without_bytes(s) for s in b.specs] if self._drops else [] for b in self.batches]
        self.collective = any(b.active for b in self.batches)
        self._device = torch.device("cpu")
        self._sending: list[torch.Tensor] = []
        self._receiving: list[torch.Tensor] = []
        self._arena = self._scratch = torch.empty(0)

    @property
    def nbytes(self) -> int:
        """What the buffers of this rank take."""
        sizes = [self._bytes(b) for b in self.batches]
        sent, received, arena, scratch = (max(s[i] for s in sizes) for i in range(4))
        return 2 * sent + 2 * received + arena + 4 * scratch

    def allocate(self, device: torch.device) -> None:
        """Take and touch the buffers; once."""
        if self._sending:
            return
        sizes = [self._bytes(b) for b in self.batches]
        sent, received, arena, scratch = (max(s[i] for s in sizes) for i in range(4))
        self._device = device
        self._sending = [torch.zeros(sent, dtype=torch.uint8, device=device) for _ in range(2)]
        self._receiving = [torch.zeros(received, dtype=torch.uint8, device=device) for _ in range(2)]
        self._arena = torch.zeros(arena, dtype=torch.uint8, device=device)
        self._scratch = torch.zeros(scratch, dtype=torch.float32, device=device)

    def release(self) -> None:
        """Give the buffers back; `allocate` takes new ones."""
        self._sending, self._receiving = [], []
        self._arena = self._scratch = torch.empty(0)

    @staticmethod
    def _bytes(batch: Batch) -> tuple[int, int, int, int]:
        return sum(batch.outgoing), sum(batch.incoming), batch.arena, batch.scratch

    def stream(self, tensors: Mapping[str, torch.Tensor], group: OwnGroup | None, works: list[Any]) -> Iterator[Group]:
        """The groups, put together from everybody's shares; on ranks that drop, of tensors without bytes.

        `works` holds the exchanges that are under way.
        """
        self._start(0, tensors, group, works)
        for number, batch in enumerate(self.batches):
            self._start(number + 1, tensors, group, works)
            if batch.active and group is not None:
                group.wait(works[0])
                del works[0]
            if self._drops:
                yield from self._dropped[number]
                continue
            if batch.plain is not None:
                for spec, keys in batch.plain:
                    yield Group(spec, tuple([tensors[key] for key in keys]))
                continue
            parts = self._assemble(number, batch, tensors)
            at = 0
            for spec in batch.specs:
                made = []
                for tensor in spec.tensors:
                    leaf = self._layout.by_name[tensor.name]
                    made.append(self._finish(leaf, parts[at : at + len(leaf.parts)]))
                    at += len(leaf.parts)
                yield Group(spec, tuple(made))

    def _start(
        self, number: int, tensors: Mapping[str, torch.Tensor], group: OwnGroup | None, works: list[Any]
    ) -> None:
        """Send off this rank's shares of a batch."""
        if number >= len(self.batches) or group is None or not self.batches[number].active:
            return
        batch = self.batches[number]
        sent, received = sum(batch.outgoing), sum(batch.incoming)
        buffer = self._sending[number % 2]
        _copy(
            [_view(buffer, s.offset, s.dtype, s.shape) for s in batch.sends],
            [tensors[s.key][s.local] for s in batch.sends],
        )
        into = self._receiving[number % 2]
        works.append(group.swap(into[:received], buffer[:sent], batch.incoming, batch.outgoing))

    def _assemble(self, number: int, batch: Batch, tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        parts: list[torch.Tensor | None] = [
            None if p.offset is None else _view(self._arena, p.offset, p.dtype, p.shape) for p in batch.places
        ]
        targets, sources = [], []
        buffer = self._receiving[number % 2]
        for r in batch.receives:
            part = parts[r.part]
            assert part is not None
            targets.append(part[r.target])
            sources.append(_view(buffer, r.offset, r.dtype, r.shape))
        for k in batch.keeps:
            share, part = tensors[k.key][k.local], parts[k.part]
            if part is None:
                parts[k.part] = share
            else:
                targets.append(part[k.target])
                sources.append(share)
        _copy(targets, sources)
        return [p for p in parts if p is not None]

    def _finish(self, leaf: Leaf, parts: list[torch.Tensor]) -> torch.Tensor:
        if leaf.lora is None:
            return parts[0].reshape(leaf.shape)
        weight, *factors = parts
        product = self._scratch[: weight.numel()].view(weight.shape)
        for scale, a, b in zip(leaf.lora.scales, factors[::2], factors[1::2], strict=True):
            left, right = (a.T, b.T) if leaf.lora.transposed else (b, a)
            torch.mm(left, right, out=product)
            weight.add_(product.mul_(scale))
        return weight.reshape(leaf.shape)


def _view(buffer: torch.Tensor, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return buffer[offset : offset + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)


def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """All copies in one call; between dtypes and devices where they differ."""
    if targets:
        torch._foreach_copy_(targets, sources)


def own_shares(described: Description, rank: int) -> Iterator[tuple[str, torch.Tensor]]:
    """`(HF name, what this rank itself has of it)`: nothing for what others have, and for what a LoRA adapter changes."""
    boxes: dict[str, Box] = {}
    for leaf in described.leaves:
        if leaf.lora is not None:
            continue
        for part in leaf.parts:
            stored = described.stored[part.key]
            if part.key not in boxes:
                spread = stored.spread
                held = whole(stored.shape) if spread is None else dict(spread.boxes(stored.shape)).get(rank, ())
                boxes[part.key] = held
            if boxes[part.key] or not stored.shape:
                for local, _, _ in _blocks(part.select, boxes[part.key]):
                    share = described.tensors[part.key][local]
                    yield leaf.name, share.reshape(leaf.shape) if share.numel() == math.prod(leaf.shape) else share


def _without_bytes(spec: GroupSpec) -> Group:
    return Group(spec, tuple(torch.empty(t.shape, dtype=t.dtype, device="meta") for t in spec.tensors))
