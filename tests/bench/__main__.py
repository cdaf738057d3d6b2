"""`python -m tests.bench`: ours, what a user would do instead, and the limit of this machine, all in one run.

    python -m tests.bench                      everything: some minutes, 5 GB of memory
    python -m tests.bench ipc disk             some sections: ipc, moe, nccl, disk, costs
    python -m tests.bench --quick              small lists, few rounds: does everything run?

Ways take turns, round by round, and the best round of each counts, so that other processes on the machine disturb all
alike. `of limit` compares with the best limit of the same section.
"""

from __future__ import annotations

import argparse
import os
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from pipelines.report import copy_limit
from tests.bench import costs
from tests.bench.limits import Broadcast, Handles, MemcpyRing, RawFile, Safetensors, Way
from tests.bench.models import MODELS, Weights
from tests.bench.ours import Ours
from tests.bench.peer import Peer


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. `bar` says what `ours` has to reach, `passed` whether it did."""

    section: str
    way: str
    figures: str
    of_limit: float | None = None
    bar: str = ""
    passed: bool | None = None


@dataclass(frozen=True, slots=True)
class Size:
    """How much to do: tensor lists of sections `ipc` and `moe`, rounds, tensors, engines."""

    large: str = "qwen3-0.6b"
    small: str = "moe-10k"
    rounds: int = 8
    tensors: int = 10_000
    planned: int = 100_000
    engines: int = 64
    updates: int = 100


FULL = Size()
QUICK = Size("quick", "quick", 3, 1000, 10_000, 8, 10)


def take_turns(ways: list[Way], rounds: int) -> dict[str, list[float]]:
    """Seconds of each round, by way; the first of each is the one that allocates."""
    seconds: dict[str, list[float]] = {way.name: [] for way in ways}
    for _ in range(1 + rounds):
        for way in ways:
            seconds[way.name].append(way.once())
    return seconds


def compare(
    section: str, model: Weights, limits: list[Way], others: list[Way], ours: list[tuple[Ours, float]], rounds: int
) -> list[Row]:
    """Limits, baselines, and ours with the fraction of the best limit that each has to reach."""
    ways = [*limits, *others, *(way for way, _ in ours)]
    try:
        seconds = take_turns(ways, rounds)
    finally:
        for way in reversed(ways):
            way.close()
    best = {name: min(all_[1:]) for name, all_ in seconds.items()}
    fastest = min(best[way.name] for way in limits)
    nbytes = model.block.numel()

    def row(way: Way, bar: str = "", passed: bool | None = None) -> Row:
        taken = best[way.name]
        return Row(section, way.name, f"{taken:.3f} s, {nbytes / taken / 1e9:.2f} GB/s", fastest / taken, bar, passed)

    rows = [row(way) for way in [*limits, *others]]
    for way, bar in ours:
        ahead = min((best[o.name] / best[way.name] for o in others), default=3.0)
        words = f">= {bar:.0%} of limit" + (f", 3x the others: {ahead:.1f}x" if others else "")
        rows.append(row(way, words, fastest / best[way.name] >= bar and ahead >= 3.0))
    return rows


def section_ipc(section: str, listed: str, bars: tuple[float, float], rounds: int) -> list[Row]:
    model, other = Weights(MODELS[listed](), 0), Peer(listed)
    try:
        limits: list[Way] = [MemcpyRing(model, other, size << 20) for size in (4, 16)]
        others: list[Way] = [Safetensors(model, other), Handles(model, other)]
        ours = [
            (Ours(f"ours, ipc, {words}", model, listed, [f"backend={name}", "transport=ipc", *more]), bar)
            for name, words, bar, more in (
                ("vllm", "own receiver", bars[0], []),
                ("vllm", "own receiver, 16 MiB buckets", bars[0], ["bucket.capacity=16MiB"]),
                ("lmdeploy", "lmdeploy wire", bars[1], []),
                ("sglang", "sglang wire", bars[1], []),
            )
        ]
        return compare(section, model, limits, others, ours, rounds)
    finally:
        other.close()


def section_nccl(listed: str, rounds: int) -> list[Row]:
    model, rows = Weights(MODELS[listed](), 0), []
    for receivers in (1, 2):
        peers = [Peer(listed) for _ in range(receivers)]
        settings = ["transport=nccl", "transport.port=0"]
        try:
            limits: list[Way] = [Broadcast(model, peers, size << 20) for size in (4, 16, 64)]
            ours = [
                (Ours(f"ours, nccl, {words}", model, listed, [f"backend={name}", *settings], receivers), 0.95)
                for name, words in (("vllm", "own receiver"), ("sglang", "sglang wire"))
            ]
            rows += compare(f"nccl, {receivers} engine{'s'[: receivers > 1]}", model, limits, [], ours, rounds)
        finally:
            for peer in peers:
                peer.close()
    return rows


def section_disk(listed: str, rounds: int) -> list[Row]:
    model, other = Weights(MODELS[listed](), 0), Peer(listed)
    try:
        with tempfile.TemporaryDirectory() as folder:
            ours = Ours(
                "ours, disk, sglang wire",
                model,
                listed,
                ["backend=sglang", "transport=disk"],
                folder=Path(folder) / "versions",
            )
            return compare("disk", model, [RawFile(model, other, Path(folder))], [], [(ours, 0.90)], rounds)
    finally:
        other.close()


def section_costs(size: Size) -> list[Row]:
    per_tensor = costs.sending_us_per_tensor(size.tensors)
    planning = costs.planning_seconds(size.planned)
    fleet = costs.fleet_seconds(size.engines)
    together, extra = fleet["all"] / fleet["one"], (fleet["slow"] - fleet["all"]) / fleet["own"]
    rows = [
        _cost(f"sending, Python per tensor of {size.tensors}", f"{per_tensor:.2f} us", "< 3 us", per_tensor < 3),
        _cost(f"plan of {size.planned} tensors", f"{planning:.2f} s", "< 1 s", planning < 1),
        _cost(f"update of {size.engines} engines, as a multiple of one", f"{together:.2f}", "<= 3", together <= 3),
        _cost("one slow engine, as a multiple of its own time", f"{extra:.2f}", "once: <= 1.5", extra <= 1.5),
    ]
    return rows + _steady(size)


def _steady(size: Size) -> list[Row]:
    """First update against later ones, what is sent again, and memory."""
    listed = "quick"
    model = Weights(MODELS[listed](), 0)
    way = Ours("", model, listed, ["backend=vllm", "transport=ipc", "bucket.capacity=4MiB"])
    try:
        way.once()
        with costs.requests_counted() as sent:
            way.once()
        again = sum(n for path, n in sent.items() if "update" in path)
        buckets = way.last.buckets
        grown = costs.memory_growth(way, size.updates) / 1e6
    finally:
        way.close()
    return [
        _cost(
            "bytes of requests per bucket, nothing changed", f"{again / buckets:.0f}", "< 300", again < 300 * buckets
        ),
        _cost(f"memory grown over {size.updates} updates", f"{grown:.1f} MB", "< 2 MB", grown < 2),
    ]


def _cost(way: str, figure: str, bar: str, passed: bool) -> Row:
    return Row("costs", way, figure, None, bar, passed)


def machine() -> str:
    """What the figures were measured on."""
    info = Path("/proc/cpuinfo").read_text()
    name = re.search(r"model name\s*:\s*(.*)", info)
    cores = len(os.sched_getaffinity(0))
    speed = f"memcpy of one core {copy_limit():.1f} GB/s"
    return f"{name[1] if name else 'unknown CPU'}, {cores} cores, {speed}, torch {torch.__version__}"


def run(sections: list[str], size: Size) -> list[Row]:
    rounds = size.rounds
    known: dict[str, Callable[[], list[Row]]] = {
        "ipc": lambda: section_ipc(f"ipc, {size.large}", size.large, (0.85, 0.60), rounds),
        "moe": lambda: section_ipc(f"ipc, {size.small}", size.small, (0.70, 0.45), rounds),
        "nccl": lambda: section_nccl(size.large, rounds),
        "disk": lambda: section_disk(size.large, max(2, rounds // 2)),
        "costs": lambda: section_costs(size),
    }
    return [row for name in sections or known for row in known[name]()]


def table(rows: list[Row]) -> Table:
    made = Table("section", "way", "best", "of limit", "bar", "")
    last = ""
    for row in rows:
        if row.section != last and last:
            made.add_section()
        share = "" if row.of_limit is None else f"{row.of_limit:.0%}"
        verdict = {None: "", True: "pass", False: "FAIL"}[row.passed]
        made.add_row(row.section if row.section != last else "", row.way, row.figures, share, row.bar, verdict)
        last = row.section
    return made


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sections", nargs="*", help="ipc, moe, nccl, disk, costs; none: all")
    parser.add_argument("--quick", action="store_true", help="small lists and few rounds")
    parser.add_argument("--rounds", type=int, help="how often the ways take turns")
    options = parser.parse_args()
    if unknown := set(options.sections) - {"ipc", "moe", "nccl", "disk", "costs"}:
        parser.error(f"unknown sections: {', '.join(sorted(unknown))}")
    torch.set_num_threads(1)
    size = QUICK if options.quick else FULL
    if options.rounds:
        size = replace(size, rounds=options.rounds)
    console = Console(width=150)
    console.print(machine())
    rows = run(options.sections, size)
    if options.quick:  # one bucket overlaps nothing: its figures say little
        rows = [replace(row, bar="", passed=None) for row in rows]
    console.print(table(rows))


if __name__ == "__main__":
    main()
