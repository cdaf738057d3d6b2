"""Quantizing shares before they travel: where no scale covers elements of two shares, the bytes are the same.

Every rank then quantizes what it holds, at the same time as the others, and half as many bytes are exchanged.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from stages.flow import TensorSpec
from stages.gather.layout import Box, Layout, Leaf, Part, Placement, Stored, extent, overlaps, whole
from stages.quantize.shards import shards_quantize_alike
from stages.run import Run

_KEPT = 64  # quantized shares that are kept until both codes and scales were fetched
Grid = tuple[int, int]
Slices = tuple[slice, ...]


class Encoder(Protocol):
    """The quantize stage, as gather sees it."""

    def ahead(self, weights: Iterable[TensorSpec], run: Run) -> Mapping[str, tuple[Grid, tuple[TensorSpec, ...]]]:
        """Of these weights those that will be quantized: the block that shares a scale, and what is made of the weight.

        Only where all that is made is a grid over the weight: entry [i, j] depends on one block or one element.
        """
        ...

    def encode_share(self, name: str, share: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """Codes and scales of rows and columns of a weight, as new tensors."""
        ...


@dataclass(frozen=True, slots=True)
class _Share:
    """Where this rank's part of a weight lies: elements `local` of the stored tensor `key`."""

    key: str
    local: Slices
    shape: Grid
    dtype: torch.dtype  # the values are rounded to it first


class Ahead:
    """A layout with codes and scales in place of some weights. `made` are their specs, by name."""

    def __init__(self, layout: Layout, wire: Mapping[str, TensorSpec], encoder: Encoder, run: Run) -> None:
        self.layout = Layout([], layout.aliases, dict(layout.placements), layout.holders)
        self.made: dict[str, TensorSpec] = {}
        self._encoder = encoder
        self._shares: dict[str, _Share] = {}  # by weight
        self._keys: dict[str, tuple[str, int]] = {}  # stored key -> weight, and which of the tensors made of it
        tied = {target for _, target in layout.aliases}
        could = [leaf for leaf in layout.leaves if leaf.name not in tied and _plain(leaf)]
        made = encoder.ahead([wire[leaf.name] for leaf in could], run)
        chosen = {
            leaf.name: cuts
            for leaf in could
            if leaf.name in made and (cuts := _cuts(leaf, layout, made[leaf.name][0])) is not None
        }
        for leaf in layout.leaves:
            if leaf.name in chosen:
                self._replace(leaf, chosen[leaf.name], *made[leaf.name], wire[leaf.name].dtype, run.comm.rank)
            else:
                self.layout.leaves.append(leaf)

    def _replace(
        self, leaf: Leaf, cuts: list[_Piece], block: Grid, specs: tuple[TensorSpec, ...], dtype: torch.dtype, rank: int
    ) -> None:
        for index, spec in enumerate(specs):
            key = f"{leaf.name} as {spec.name}"
            step = (1, 1) if spec.shape == leaf.shape else block
            shares = {_scaled(piece.box, step): piece.ranks for piece in cuts}
            self.layout.placements[key] = Placement(Stored(key, spec.dtype, spec.shape), shares)
            self.layout.leaves.append(Leaf(spec.name, spec.dtype, spec.shape, (Part(key, whole(spec.shape)),)))
            self.made[spec.name] = spec
            self._keys[key] = leaf.name, index
        for piece in cuts:
            if rank in piece.ranks:
                rows, columns = extent(piece.box)
                self._shares[leaf.name] = _Share(leaf.parts[0].key, piece.local, (rows, columns), dtype)

    def tensors(self, stored: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """What this rank stores, and what is made of it when it is asked for."""
        return _Encoded(stored, self._keys, self._shares, self._encoder)


class _Encoded(Mapping[str, torch.Tensor]):
    def __init__(
        self,
        stored: Mapping[str, torch.Tensor],
        keys: Mapping[str, tuple[str, int]],
        shares: Mapping[str, _Share],
        encoder: Encoder,
    ) -> None:
        self._stored, self._keys, self._shares, self._encoder = stored, keys, shares, encoder
        self._made: OrderedDict[str, tuple[torch.Tensor, ...]] = OrderedDict()

    def __getitem__(self, key: str) -> torch.Tensor:
        if key not in self._keys:
            return self._stored[key]
        name, index = self._keys[key]
        made = self._made.get(name)
        if made is None:
            share = self._shares[name]
            tensor = self._stored[share.key].detach()[share.local].reshape(share.shape)
            made = self._made[name] = self._encoder.encode_share(name, tensor, share.dtype)
            if len(self._made) > _KEPT:
                self._made.popitem(last=False)
        return made[index]

    def __iter__(self) -> Iterator[str]:
        yield from self._stored
        yield from self._keys

    def __len__(self) -> int:
        return len(self._stored) + len(self._keys)


@dataclass(frozen=True, slots=True)
class _Piece:
    """A share of a weight: its rows and columns, where it lies in what `ranks` store."""

    box: Box
    local: Slices
    ranks: list[int]


def _plain(leaf: Leaf) -> bool:
    return len(leaf.shape) == 2 and len(leaf.parts) == 1 and leaf.lora is None


def _cuts(leaf: Leaf, layout: Layout, block: Grid) -> list[_Piece] | None:
    """The shares of a weight, or None where it must be gathered first, or where no share would travel."""
    pieces = []
    part = leaf.parts[0]
    for held, ranks in layout.placements[part.key].shares.items():
        runs = [overlaps(wanted, have) for wanted, have in zip(part.select, held, strict=True)]
        if not all(runs):
            continue
        if any(len(r) > 1 for r in runs):
            return None
        spans = [(here, here + n) for ((here, _, n),) in runs]
        seen = [span for span, size in zip(spans, extent(part.select), strict=True) if size > 1]
        if len(seen) != 2 or tuple(s for s in extent(part.select) if s > 1) != leaf.shape:
            return None
        local = tuple(slice(there, there + n) for ((_, there, n),) in runs)
        pieces.append(_Piece(tuple((span,) for span in seen), local, ranks))
    edges = [[edge for piece in pieces for edge in piece.box[d][0]] for d in range(2)]
    rows, columns = leaf.shape
    if not shards_quantize_alike((rows, columns), (edges[0], edges[1]), block):
        return None
    travels = any(set(layout.holders) - set(piece.ranks) for piece in pieces)
    return pieces if travels else None


def _scaled(box: Box, step: Grid) -> Box:
    return tuple(((start // s, -(-stop // s)),) for ((start, stop),), s in zip(box, step, strict=True))
