"""`python -m tests.bench.quantize`: how fast weights are quantized, as ratios to a plain cast of the same memory.

Seconds are those of one core's own time, the best of several rounds in which the ways take turns: other processes on the
machine disturb them little. GB/s are bytes read.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from stages.flow import TensorSpec
from stages.quantize.auto import FORMATS
from stages.quantize.base import Quantize, Weight

SHAPE = (4096, 4096)
BASE = "cast float32 to fp8"
BAR = 1.5  # fp8_block, as a multiple of BASE


def bench_quantize(shape: tuple[int, int] = SHAPE, rounds: int = 10) -> list[dict[str, Any]]:
    """One row per way: `way`, `seconds`, `gb_per_s`, `times_cast` (against BASE), `scratch_mb` (memory besides the result)."""
    wide = torch.randn(shape) * 0.02
    half = wide.bfloat16()
    out = torch.empty(shape, dtype=torch.float8_e4m3fn)
    ways: dict[str, Callable[[], object]] = {
        BASE: lambda: out.copy_(wide),
        "cast bfloat16 to fp8": lambda: out.copy_(half),
        "fp8_block without strips, of bfloat16": lambda: naive(half),
    }
    reads = {BASE: wide.nbytes, **dict.fromkeys([*ways][1:], half.nbytes)}
    stages: dict[str, Quantize] = {}
    for name, kind in FORMATS.items():
        for label, weight in (("bfloat16", half), ("float32", wide)):
            way = f"{name} of {label}"
            stages[way] = kind()
            ways[way] = _encoder(stages[way], weight)
            reads[way] = weight.nbytes
    seconds = _best(ways, rounds)
    return [
        {
            "way": way,
            "seconds": taken,
            "gb_per_s": reads[way] / taken / 1e9,
            "times_cast": taken / seconds[BASE],
            "scratch_mb": stages[way].strips.nbytes / 1e6 if way in stages else None,
        }
        for way, taken in seconds.items()
    ]


def threads_gain(shape: tuple[int, int] = SHAPE, rounds: int = 10) -> float:
    """How much faster fp8_block is with all of torch's threads than with one, by the clock on the wall."""
    stage, weight = FORMATS["fp8_block"](), (torch.randn(shape) * 0.02).bfloat16()
    encode, before = _encoder(stage, weight), torch.get_num_threads()
    best = {1: float("inf"), before: float("inf")}
    try:
        for _ in range(rounds):
            for threads in best:
                torch.set_num_threads(threads)
                start = time.perf_counter()
                encode()
                best[threads] = min(best[threads], time.perf_counter() - start)
    finally:
        torch.set_num_threads(before)
    return best[1] / best[before]


def naive(weight: torch.Tensor) -> torch.Tensor:
    """The same bytes with whole-tensor operations: what strips save."""
    rows, columns = (n // 128 for n in weight.shape)
    blocks = weight.float().view(rows, 128, columns, 128)
    scale = blocks.abs().amax((1, 3)).clamp_min(1e-10) / 448
    return (blocks / scale[:, None, :, None]).clamp(-448, 448).view(weight.shape).to(torch.float8_e4m3fn)


def _encoder(stage: Quantize, tensor: torch.Tensor) -> Callable[[], None]:
    specs = stage.outputs(TensorSpec("a.weight", tensor.dtype, tuple(tensor.shape)))
    made = tuple(torch.zeros(s.shape, dtype=s.dtype) for s in specs)
    weight = Weight("a.weight", tensor, tensor.dtype)
    return lambda: stage.encode([weight], [made])


def _best(ways: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    best = dict.fromkeys(ways, float("inf"))
    try:
        for way in ways.values():
            way()  # first touch
        for _ in range(rounds):
            for name, way in ways.items():
                start = time.thread_time()
                way()
                best[name] = min(best[name], time.thread_time() - start)
    finally:
        torch.set_num_threads(before)
    return best


def main() -> None:
    table = Table("way", "GB/s read", "x cast", "scratch MB", title=f"{SHAPE[0]} x {SHAPE[1]}, one core")
    for row in bench_quantize():
        scratch = "" if row["scratch_mb"] is None else f"{row['scratch_mb']:.1f}"
        table.add_row(row["way"], f"{row['gb_per_s']:.2f}", f"{row['times_cast']:.2f}", scratch)
    console = Console(width=100)
    console.print(table)
    console.print(f"fp8_block with {torch.get_num_threads()} threads: {threads_gain():.2f} times as fast as with one")
    console.print(f"bar for fp8_block: {BAR} x cast")


if __name__ == "__main__":
    main()
