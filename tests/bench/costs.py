"""What does not show in GB/s: Python per tensor, planning, requests, memory, and many engines at once."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from pipelines import WeightUpdater
from stages.backends.base import Keys
from stages.backends.http import Http
from stages.backends.vllm import Vllm
from stages.bucket import Bucket
from stages.comm import Comm
from stages.flow import GroupSpec, Plan, TensorSpec, plan_to_json
from stages.gather import GatherParams
from stages.run import Run, Timeouts
from stages.transport.ipc import Ipc
from tests.bench.models import Spec, Weights
from tests.bench.ours import ROOT, Ours


def tiny(tensors: int) -> Spec:
    """As many tensors as a mixture of experts has, with next to no bytes: what is left is Python."""
    return [(f"model.layers.{i // 384}.mlp.experts.{i % 384}.up_proj.weight", (8,)) for i in range(tensors)]


def sending_us_per_tensor(tensors: int = 10_000, rounds: int = 7) -> float:
    """Microseconds of a core that a steady update costs the trainer per tensor: looking, packing, hashing."""
    model = Weights(tiny(tensors), 0)
    gather, bucket, transport = GatherParams(), Bucket("64MiB"), Ipc()
    run = Run(Comm(), torch.device("cpu"), Vllm(), transport, Vllm().wire("ipc"), Timeouts(), model=model)
    best = float("inf")
    try:
        for number in range(rounds):
            start = time.thread_time()
            specs = gather.plan((), run)
            if number == 0:
                bucket.plan(specs, run)
            for stage in (gather, bucket):
                stage.prepare(run)
            for packed in bucket(gather(iter(()), run), run):
                packed.release()
            if number:
                best = min(best, time.thread_time() - start)
    finally:
        bucket.close()
        transport.close()
    return best / tensors * 1e6


def planning_seconds(tensors: int = 100_000, rounds: int = 3) -> float:
    """Seconds for the plan of this many tensors, its hash, and what a receiver gets of it."""
    specs = tuple(GroupSpec((TensorSpec(name, torch.bfloat16, (1024, 64)),)) for name, _ in tiny(tensors))
    best = float("inf")
    for _ in range(rounds):
        run = Run(Comm(), torch.device("cpu"), Vllm(), Ipc(), Vllm().wire("ipc"), Timeouts())
        start = time.perf_counter()
        Bucket("64MiB").plan(specs, run)
        plan: Plan = run.current_plan
        json.dumps(plan_to_json(plan))
        best = min(best, time.perf_counter() - start)
    return best


@contextmanager
def requests_counted() -> Iterator[dict[str, int]]:
    """Bytes of every request's body, by path, while the block runs."""
    sent: dict[str, int] = {}
    real = Http._exchange

    def counted(self: Http, method: str, target: str, data: bytes | None, *rest: Any) -> Any:
        sent[target] = sent.get(target, 0) + len(data or b"")
        return real(self, method, target, data, *rest)

    Http._exchange = counted  # type: ignore[method-assign,assignment]
    try:
        yield sent
    finally:
        Http._exchange = real  # type: ignore[method-assign]


def resident() -> int:
    """Bytes of this process that are in memory, shared ones too."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmRSS"].split()[0]) * 1024


def memory_growth(way: Ours, updates: int = 100) -> int:
    """Bytes by which the trainer grew over this many updates, after some to settle."""
    for _ in range(5):
        way.move()
    gc.collect()
    before = resident()
    for _ in range(updates):
        way.move()
    gc.collect()
    return resident() - before


class Fleet:
    """Stub engines; see tests.bench.fleet."""

    def __init__(self, count: int, delay: float) -> None:
        command = [sys.executable, "-m", "tests.bench.fleet", "--count", str(count), "--delay", str(delay)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        assert self._process.stdout is not None
        self.urls: list[str] = json.loads(self._process.stdout.readline())

    def slow(self, url: str, extra: dict[str, float]) -> None:
        http = Http(url, Keys().admin, 5.0)
        http.post("/extra", "slow", 5.0, extra)
        http.close()

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def fleet_seconds(count: int = 64, delay: float = 0.02, slowness: float = 0.1, rounds: int = 3) -> dict[str, float]:
    """Seconds of a steady update of `one` stub engine, of `all` of them, and of all with one that is `slow` at each bucket.

    `own` is how long the slow one takes more than the others, all its requests together.
    """
    fleet = Fleet(1 + count, delay)  # an engine has one updater at a time
    model = Weights([(f"model.layers.{i}.weight", (1024, 32)) for i in range(8)], 0)
    updaters: dict[str, WeightUpdater] = {}
    try:
        for name, urls in (("one", fleet.urls[:1]), ("all", fleet.urls[1:])):
            settings = ["backend=vllm", "transport=ipc", "engines=remote", "bucket.capacity=128KiB"]
            updaters[name] = WeightUpdater.from_config([*settings, f"engines.urls=[{','.join(urls)}]"])
            updaters[name].open()
        seconds = {name: _best(lambda u=updater: u.update(model), rounds) for name, updater in updaters.items()}  # type: ignore[misc]
        fleet.slow(fleet.urls[-1], {"/update_weights": slowness})
        seconds["slow"] = _best(lambda: updaters["all"].update(model), rounds)
        seconds["own"] = slowness * updaters["all"].report.updates[-1].buckets
        return seconds
    finally:
        for updater in updaters.values():
            updater.close()
        fleet.close()


def _best(action: Callable[[], object], rounds: int) -> float:
    action()
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        action()
        best = min(best, time.perf_counter() - start)
    return best
