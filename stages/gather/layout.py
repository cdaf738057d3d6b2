"""Where a model's tensors are: what is stored, on which ranks, and what HF tensors are made of it. Nothing here moves bytes.

A trainer stores a tensor once (`Stored`), spread over ranks (`Spread`): FSDP shards, tensor-parallel slices, expert-parallel
blocks, a ZeRO-3 flat partition. An HF tensor (`Leaf`) is made of parts of stored tensors: one expert of a fused block, the
query rows of a fused qkv, a weight and the two factors of its LoRA adapter.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import xxhash

from stages.errors import PlanMismatch
from stages.flow import dtype_name, dtype_of

Spans = tuple[tuple[int, int], ...]  # (start, stop) ranges of one dimension, in the order in which they are stored
Box = tuple[Spans, ...]  # one Spans per dimension


def whole(shape: Iterable[int]) -> Box:
    """Everything of a tensor of this shape."""
    return tuple(((0, size),) for size in shape)


def length(spans: Spans) -> int:
    """How many indices these ranges hold."""
    return sum(stop - start for start, stop in spans)


def extent(box: Box) -> tuple[int, ...]:
    """The shape of a tensor that holds this box."""
    return tuple(length(spans) for spans in box)


def chunk(spans: Spans, pieces: int, index: int) -> Spans:
    """Piece `index` of `pieces`, all of ceil(n / pieces) but the last ones, as torch.chunk cuts."""
    total = length(spans)
    size = -(-total // pieces)
    first, last = min(total, size * index), min(total, size * (index + 1))
    found, at = [], 0
    for start, stop in spans:
        low, high = max(first - at, 0), min(last - at, stop - start)
        if low < high:
            found.append((start + low, start + high))
        at += stop - start
    return tuple(found)


def overlaps(wanted: Spans, held: Spans) -> list[tuple[int, int, int]]:
    """`(position among wanted, position among held, count)` of every run of indices that both have."""
    found = []
    at = 0
    for start, stop in wanted:
        there = 0
        for low, high in held:
            first, last = max(start, low), min(stop, high)
            if first < last:
                found.append((at + first - start, there + first - low, last - first))
            there += high - low
        at += stop - start
    return found


@dataclass(frozen=True, slots=True)
class Cut:
    """One dimension of a mesh cuts dimension `dim` of a tensor.

    `strips` > 1: the dimension consists of that many strips, each cut alike, and a rank holds its piece of every one: a
    fused [gate; up], or what tensor parallelism left for FSDP to cut.
    """

    dim: int
    strips: int = 1


@dataclass(frozen=True, slots=True)
class Spread:
    """A tensor over a mesh of ranks: `ranks` in row-major order of `shape`; None in `cuts` = replicated over that dimension."""

    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    cuts: tuple[Cut | None, ...]

    def box(self, index: int, tensor: tuple[int, ...]) -> Box:
        """What the rank at `index` of `ranks` holds of a tensor of this shape."""
        box = list(whole(tensor))
        stride = math.prod(self.shape)
        for size, cut in zip(self.shape, self.cuts, strict=True):
            stride //= size
            if cut is not None:
                strips = [chunk(box[cut.dim], cut.strips, s) for s in range(cut.strips)]
                mine = (chunk(strip, size, index // stride % size) for strip in strips)
                box[cut.dim] = tuple(span for spans in mine for span in spans)
        return tuple(box)

    def boxes(self, tensor: tuple[int, ...]) -> Iterator[tuple[int, Box]]:
        """`(rank, what it holds)` over the mesh."""
        for index, rank in enumerate(self.ranks):
            yield rank, self.box(index, tensor)


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor as the trainer keeps it, with its full shape. `spread` None: each rank that knows it holds it whole."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    spread: Spread | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """The elements `select` of a stored tensor, per dimension, in this order."""

    key: str
    select: Box


@dataclass(frozen=True, slots=True)
class Lora:
    """The parts of a leaf are a weight and the factors A and B of each of its adapters: weight + scale * B @ A + ..."""

    scales: tuple[float, ...]
    transposed: bool = False  # the weight is stored [in, out]


@dataclass(frozen=True, slots=True)
class Leaf:
    """One HF tensor: the elements of its parts, in row-major order, seen as `shape`."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    lora: Lora | None = None


@dataclass
class Description:
    """A model as one rank sees it. `tensors` holds this rank's own share of each stored tensor, and does not travel."""

    stored: dict[str, Stored] = field(default_factory=dict)
    leaves: list[Leaf] = field(default_factory=list)
    aliases: list[tuple[str, str]] = field(default_factory=list)  # (tied name, name that travels)
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def store(self, key: str, tensor: torch.Tensor, shape: tuple[int, ...], spread: Spread | None, rank: int) -> None:
        """Add a stored tensor, of which `tensor` is this rank's share. Raises PlanMismatch where that has the wrong shape."""
        here = shape
        if spread is not None:
            here = extent(spread.box(spread.ranks.index(rank), shape)) if rank in spread.ranks else (0,)
        if tensor.shape != here and not tensor.numel() == math.prod(here) == 0:
            raise PlanMismatch(
                f"{key}: this rank holds {list(tensor.shape)} of {list(shape)}, its layout says {list(here)}"
            )
        self.stored[key] = Stored(key, tensor.dtype, shape, spread)
        assert isinstance(self.tensors, dict)
        self.tensors[key] = tensor

    def text(self) -> str:
        """All but the tensors, as text that is equal on ranks that see the same."""
        spreads: dict[Spread, int] = {}
        stored = [
            [s.key, dtype_name(s.dtype), s.shape, s.spread and spreads.setdefault(s.spread, len(spreads))]
            for s in self.stored.values()
        ]
        leaves = [
            [
                leaf.name,
                dtype_name(leaf.dtype),
                leaf.shape,
                [[p.key, None if p.select == whole(self.stored[p.key].shape) else p.select] for p in leaf.parts],
                leaf.lora and [leaf.lora.scales, leaf.lora.transposed],
            ]
            for leaf in self.leaves
        ]
        cuts = [[s.shape, s.ranks, [c and [c.dim, c.strips] for c in s.cuts]] for s in spreads]
        return json.dumps([cuts, stored, leaves, self.aliases], separators=(",", ":"))


def parse_description(text: str) -> Description:
    """Inverse of `Description.text`."""
    cuts, stored, leaves, aliases = json.loads(text)
    spreads = [Spread(tuple(s), tuple(r), tuple(c and Cut(*c) for c in cs)) for s, r, cs in cuts]
    made = Description(aliases=[(a, t) for a, t in aliases])
    for key, dtype, shape, spread in stored:
        made.stored[key] = Stored(key, dtype_of(dtype), tuple(shape), None if spread is None else spreads[spread])
    for name, dtype, shape, parts, lora in leaves:
        made.leaves.append(
            Leaf(
                name,
                dtype_of(dtype),
                tuple(shape),
                tuple(Part(k, whole(made.stored[k].shape) if s is None else _box(s)) for k, s in parts),
                lora and Lora(tuple(lora[0]), lora[1]),
            )
        )
    return made


def _box(data: Any) -> Box:
    return tuple(tuple((start, stop) for start, stop in spans) for spans in data)


@dataclass
class Placement:
    """Who holds a stored tensor, over all ranks: every distinct share, and the ranks that have it."""

    stored: Stored
    shares: dict[Box, list[int]] = field(default_factory=dict)


@dataclass
class Layout:
    """A model over all ranks. Equal on every rank."""

    leaves: list[Leaf]
    aliases: list[tuple[str, str]]
    placements: dict[str, Placement]
    holders: tuple[int, ...]  # the ranks that want the tensors whole

    @cached_property
    def by_name(self) -> dict[str, Leaf]:
        return {leaf.name: leaf for leaf in self.leaves}


def unite(seen: list[tuple[Description, list[int]]], holders: tuple[int, ...]) -> Layout:
    """The model that these descriptions, each with the ranks that gave it, tell of together. Pure.

    Raises PlanMismatch where two disagree about a tensor, or where the shares of one do not add up to the whole.
    """
    leaves: dict[str, Leaf] = {}
    aliases: dict[str, str] = {}
    placements: dict[str, Placement] = {}
    for description, ranks in seen:
        for stored in description.stored.values():
            placed = placements.setdefault(stored.key, Placement(stored))
            known = placed.stored
            if (known.dtype, known.shape) != (stored.dtype, stored.shape):
                raise PlanMismatch(
                    f"{stored.key}: rank {ranks[0]} has {_told(stored)}, another rank has {_told(known)}"
                )
            _add_shares(placed, stored, ranks)
        for leaf in description.leaves:
            if leaves.setdefault(leaf.name, leaf) != leaf:
                raise PlanMismatch(f"{leaf.name}: rank {ranks[0]} makes it of other parts than another rank does")
        aliases |= dict(description.aliases)
    for placed in placements.values():
        _check_shares(placed)
    kept = [leaf for name, leaf in leaves.items() if name not in aliases]
    return Layout(kept, [(a, t) for a, t in aliases.items() if t in leaves], placements, holders)


def _add_shares(placed: Placement, stored: Stored, ranks: list[int]) -> None:
    if stored.spread is None:
        placed.shares.setdefault(whole(stored.shape), []).extend(ranks)
        return
    for rank, box in stored.spread.boxes(stored.shape):
        if math.prod(extent(box)):
            owners = placed.shares.setdefault(box, [])
            if rank not in owners:
                owners.append(rank)


def _check_shares(placed: Placement) -> None:
    stored = placed.stored
    have, need = sum(math.prod(extent(box)) for box in placed.shares), math.prod(stored.shape)
    if have != need:
        raise PlanMismatch(
            f"{stored.key}: its {len(placed.shares)} shares hold {have} elements, {list(stored.shape)} has {need}; "
            f"the ranks shard it differently"
        )


def _told(stored: Stored) -> str:
    return f"{dtype_name(stored.dtype)}{list(stored.shape)}"


def digest_of(text: str) -> str:
    """Short stand-in for a description, to be compared between ranks."""
    return xxhash.xxh3_128_hexdigest(text.encode())
