"""Walking over a weight in pieces that stay in the cache, and the arithmetic that every format shares."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait

import torch

AMAX_FLOOR = 1e-10  # of a block's largest magnitude, so that a zero block has a scale; the same for every format
FP8_MAX = 448.0  # largest finite float8_e4m3fn
TILE = 1 << 18  # elements worked on at once: 1 MiB of float32, which fits a core's L2 cache

_HALVES = (torch.bfloat16, torch.float16)


class Scratch:
    """Memory that is made once and used for every piece: one buffer per purpose and device."""

    def __init__(self) -> None:
        self._flat: dict[tuple[str, torch.device], torch.Tensor] = {}

    def get(self, purpose: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Uninitialised memory of this shape, valid until the same purpose is asked for again."""
        need = math.prod(shape) * dtype.itemsize
        flat = self._flat.get((purpose, device))
        if flat is None or flat.numel() < need:
            flat = self._flat[purpose, device] = torch.empty(need, dtype=torch.uint8, device=device)
        return flat[:need].view(dtype).view(shape)

    @property
    def nbytes(self) -> int:
        return sum(flat.nbytes for flat in self._flat.values())

    def clear(self) -> None:
        self._flat.clear()


class Strips:
    """Works on a weight strip by strip, on as many strips at once as torch has threads.

    Each thread runs whole strips with one-thread operations of its own: threads inside of each operation would have to meet
    after every one of them, which costs more than it gains where strips fit the cache, and far more on busy cores.
    """

    def __init__(self) -> None:
        self.scratch = Scratch()  # of the calling thread
        self._pool: ThreadPoolExecutor | None = None
        self._size = 0
        self._local = threading.local()
        self._others: list[Scratch] = []

    def each(self, weight: torch.Tensor, step: int, body: Callable[[int, slice, Scratch], None]) -> None:
        """Call `body(number, rows, scratch)` for every `step` rows of a weight; in any order, in any thread."""
        todo = enumerate(pieces(weight.shape[0], step))
        threads = min(torch.get_num_threads(), -(-weight.shape[0] // step), weight.numel() // TILE)
        if threads < 2 or weight.device.type != "cpu":
            for number, rows in todo:
                body(number, rows, self.scratch)
            return
        lock = threading.Lock()

        def work() -> None:
            while True:
                with lock:
                    number, rows = next(todo, (-1, slice(0)))
                if number < 0:
                    return
                body(number, rows, self._local.scratch)

        pool = self._workers(torch.get_num_threads())
        done, _ = wait([pool.submit(work) for _ in range(threads)])
        for each in done:
            each.result()

    @property
    def nbytes(self) -> int:
        return self.scratch.nbytes + sum(other.nbytes for other in self._others)

    def close(self) -> None:
        pool, self._pool, self._size = self._pool, None, 0
        if pool is not None:
            pool.shutdown(wait=True)
        self._others.clear()
        self.scratch.clear()

    def _workers(self, count: int) -> ThreadPoolExecutor:
        if self._pool is None or self._size < count:
            self.close()
            self._pool = ThreadPoolExecutor(
                count, "weightstream-quantize", initializer=_begin, initargs=(self._local, self._others)
            )
            self._size = count
        return self._pool


def _begin(local: threading.local, scratches: list[Scratch]) -> None:
    """Begin a worker; not a method: a thread that holds its pool's owner would keep both alive for ever."""
    torch.set_num_threads(1)  # of this thread
    local.scratch = Scratch()
    scratches.append(local.scratch)


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
    """A piece rounded to `dtype` where it is wider, as float32 in the one working buffer: `divide` works in place."""
    if _rounds(piece.dtype, dtype):
        piece = scratch.get("rounded", tuple(piece.shape), dtype, piece.device).copy_(piece)
    return scratch.get("work", tuple(piece.shape), torch.float32, piece.device).copy_(piece)


def column_peaks(piece: torch.Tensor, dtype: torch.dtype, scratch: Scratch) -> torch.Tensor:
    """Largest magnitude of each column as float32; infinite or NaN where a column holds such a value."""
    if piece.dtype in _HALVES and not _rounds(piece.dtype, dtype):
        # Without their sign, floats order like integers, which the reduction is several times faster on.
        bits = scratch.get("work", tuple(piece.shape), torch.int16, piece.device)
        torch.bitwise_and(piece.view(torch.int16), 0x7FFF, out=bits)
        return bits.amax(0).view(piece.dtype).float()
    if piece.dtype == dtype == torch.float32:
        return torch.abs(piece, out=scratch.get("work", tuple(piece.shape), dtype, piece.device)).amax(0)
    return as_float(piece, dtype, scratch).abs_().amax(0)


def row_peaks(values: torch.Tensor) -> torch.Tensor:
    """Largest magnitude along the last dimension of float32 `values`."""
    return torch.maximum(values.amax(-1), values.amin(-1).neg_())


def divide(values: torch.Tensor, scale: torch.Tensor, limit: float) -> torch.Tensor:
    """`values / scale`, clamped to +-limit; in place.

    The clamp is not idle: the quotient of a block's own maximum can be rounded to just above the limit, more so where
    the scale was rounded to a narrower dtype, and what a cast then does differs between machines.
    """
    return values.div_(scale).clamp_(-limit, limit)


def quotient(
    piece: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor, limit: float, scratch: Scratch
) -> torch.Tensor:
    """The same for a piece that is not float32 yet, in the working buffer."""
    if piece.dtype == dtype == torch.float32:
        work = scratch.get("work", tuple(piece.shape), dtype, piece.device)
        return torch.div(piece, scale, out=work).clamp_(-limit, limit)
    return divide(as_float(piece, dtype, scratch), scale, limit)


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
