"""Walking over a weight in pieces that stay in the cache, and the arithmetic that every format shares."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

AMAX_FLOOR = 1e-10  # of a block's largest magnitude, so that a zero block has a scale; the same for every format
FP8_MAX = 448.0  # largest finite float8_e4m3fn
TILE = 1 << 18  # elements worked on at once: 1 MiB of float32, which fits a core's L2 cache

_HALVES = (torch.bfloat16, torch.float16)


class Scratch:
    """Buffers that are made once and used for every piece, one per purpose, dtype and device."""

    def __init__(self) -> None:
        self._flat: dict[tuple[str, torch.dtype, torch.device], torch.Tensor] = {}

    def get(self, purpose: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Uninitialised memory of this shape, valid until the same purpose is asked for again."""
        need = math.prod(shape)
        flat = self._flat.get((purpose, dtype, device))
        if flat is None or flat.numel() < need:
            flat = self._flat[purpose, dtype, device] = torch.empty(need, dtype=dtype, device=device)
        return flat[:need].view(shape)

    @property
    def nbytes(self) -> int:
        return sum(flat.nbytes for flat in self._flat.values())

    def clear(self) -> None:
        self._flat.clear()


def pieces(length: int, step: int) -> Iterator[slice]:
    """`length` in slices of `step`, the last one shorter."""
    return (slice(start, min(start + step, length)) for start in range(0, length, step))


def rows_per_piece(columns: int) -> int:
    """How many whole rows make a piece; at least one."""
    return max(1, TILE // max(1, columns))


def columns_per_piece(rows: int, block: int) -> int:
    """How many columns of a strip of `rows` make a piece; whole blocks, at least one."""
    return max(1, TILE // max(1, rows * block)) * block


def as_float(piece: torch.Tensor, dtype: torch.dtype, scratch: Scratch) -> torch.Tensor:
    """A piece rounded to `dtype` where it is wider, as float32. Not to be written to: it may be `piece` itself."""
    if _rounds(piece.dtype, dtype):
        piece = scratch.get("rounded", tuple(piece.shape), dtype, piece.device).copy_(piece)
    if piece.dtype == torch.float32:
        return piece
    return scratch.get("float", tuple(piece.shape), torch.float32, piece.device).copy_(piece)


def column_peaks(piece: torch.Tensor, dtype: torch.dtype, scratch: Scratch) -> torch.Tensor:
    """Largest magnitude of each column as float32; infinite or NaN where a column holds such a value."""
    shape, device = tuple(piece.shape), piece.device
    if piece.dtype in _HALVES and not _rounds(piece.dtype, dtype):
        # Without their sign, floats order like integers, which the reduction is several times faster on.
        bits = scratch.get("bits", shape, torch.int16, device)
        torch.bitwise_and(piece.view(torch.int16), 0x7FFF, out=bits)
        return bits.amax(0).view(piece.dtype).float()
    return torch.abs(as_float(piece, dtype, scratch), out=_work(shape, device, scratch)).amax(0)


def row_peaks(values: torch.Tensor, scratch: Scratch) -> torch.Tensor:
    """Largest magnitude along the last dimension of float32 `values`."""
    return torch.abs(values, out=_work(tuple(values.shape), values.device, scratch)).amax(-1)


def peak(weight: torch.Tensor, dtype: torch.dtype, scratch: Scratch) -> torch.Tensor:
    """Largest magnitude of a whole weight, 0-dim float32; infinite or NaN where it holds such a value."""
    largest = torch.zeros((), dtype=torch.float32, device=weight.device)
    for rows in pieces(weight.shape[0], rows_per_piece(weight.shape[1])):
        if weight.shape[1]:
            largest = torch.maximum(largest, column_peaks(weight[rows], dtype, scratch).amax())
    return largest


def divide(values: torch.Tensor, scale: torch.Tensor, limit: float, scratch: Scratch) -> torch.Tensor:
    """`values / scale`, clamped to +-limit; in scratch memory.

    The clamp is not idle: the quotient of a block's own maximum can be rounded to just above the limit, more so where
    the scale was rounded to a narrower dtype, and what a cast then does differs between machines.
    """
    result = torch.div(values, scale, out=_work(tuple(values.shape), values.device, scratch))
    return result.clamp_(-limit, limit)


def store_scale(scale: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Write float32 scales to `out`, and return them as whoever reads them will see them: never zero."""
    out.copy_(scale)
    if out.dtype == torch.float32:
        return scale
    limits = torch.finfo(out.dtype)
    out.clamp_min_(limits.tiny * limits.eps)  # its smallest number
    return out.float()


def first_nonfinite(weight: torch.Tensor, dtype: torch.dtype) -> tuple[tuple[int, ...], float] | None:
    """Index and value of the first NaN or infinity in row-major order, after rounding to `dtype`."""
    for rows in pieces(weight.shape[0], rows_per_piece(weight.shape[1])):
        values = weight[rows].to(dtype) if _rounds(weight.dtype, dtype) else weight[rows]
        bad = (~torch.isfinite(values)).nonzero()
        if len(bad):
            row, column = bad[0].tolist()
            return (rows.start + row, column), float(values[row, column])
    return None


def _rounds(held: torch.dtype, wanted: torch.dtype) -> bool:
    """Whether `wanted` cannot hold every value of `held`."""
    return held != wanted and wanted.itemsize <= held.itemsize


def _work(shape: tuple[int, ...], device: torch.device, scratch: Scratch) -> torch.Tensor:
    return scratch.get("work", shape, torch.float32, device)
