"""Ranks that fail, hang or fall out of step: the same root cause everywhere, in bounded time, and the next update works."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

from gather.streams import PATIENT, HeldBy, rank_run
from gather.test_sharded import BATCH, shard
from gather.toy import Toy, hf_tensors
from gather.world import World
from pipelines.executor import run_chain
from stages.barrier import Barrier
from stages.base import Stage
from stages.bucket import Bucket
from stages.errors import RemoteRankError, WaitTimeout
from stages.flow import Bucket as BucketItem
from stages.flow import Delivery, Group, Shipment
from stages.gather import GatherParams
from stages.prefetch import Prefetch
from stages.run import Run, Wire


class Ships(HeldBy):
    """Keeps what was in the buckets of this rank."""

    def __init__(self, *ranks: int) -> None:
        super().__init__(*ranks)
        self.got: dict[str, torch.Tensor] = {}

    def ship(self, bucket: BucketItem, run: Run) -> Shipment:
        if bucket.slot is not None:
            for e in bucket.layout.entries:
                raw = bucket.memory[e.offset : e.offset + e.nbytes].clone()
                self.got[e.spec.name] = raw.view(e.spec.dtype).view(e.spec.shape)
        return Shipment(bucket, None)


class Sink(Stage):
    consumes = Shipment
    produces = Delivery

    def __call__(self, items: Iterator[Shipment], run: Run) -> Iterator[Delivery]:
        for shipment in items:
            yield Delivery("nobody", shipment.bucket.layout.seq, 0.0)
            shipment.bucket.release()


class Trouble(Stage):
    """Raises, or sleeps, at the n-th group on one rank, during one update."""

    consumes = Group
    produces = Group

    def __init__(self) -> None:
        self.rank, self.at, self.seconds = -1, 0, 0.0

    def __call__(self, items: Iterator[Group], run: Run) -> Iterator[Group]:
        for number, group in enumerate(items):
            if run.comm.rank == self.rank and number == self.at:
                if self.seconds:
                    time.sleep(self.seconds)
                else:
                    raise ValueError(f"trouble at group {self.at}")
            yield group


class Chain:
    """A whole chain but for engines, as the updater drives it."""

    def __init__(self, prefetch: bool, timeout: float = 20.0) -> None:
        self.transport, self.trouble = Ships(0), Trouble()
        ahead = [Prefetch()] if prefetch else []
        packing = [GatherParams(batch=BATCH), self.trouble, Bucket(20_000)]
        self.stages = [*packing, *ahead, self.transport, Barrier(), Sink()]
        limits = replace(PATIENT, put=timeout, agree=timeout)
        self.run = rank_run(timeouts=limits, wire=Wire())
        self.run.transport = self.transport
        self.run.comm.timeout = timeout

    def update(self, model: Any) -> tuple[str, float]:
        """What it ended with, and how long it took."""
        start, run = time.monotonic(), self.run
        run.model = model
        run.update += 1
        run.comm.begin(run.update)
        self.transport.got.clear()
        try:
            with run.comm.together("plan"):
                specs = run.gathered = tuple(self.stages[0].plan((), run))
                for stage in self.stages[1:]:
                    specs = tuple(stage.plan(specs, run))
            with run.comm.together("prepare"):
                for stage in self.stages:
                    stage.prepare(run)
            with run.comm.together("transfer"):
                run_chain(self.stages, run)
            outcome = "done"
        except RemoteRankError as error:
            outcome = f"rank {error.rank}: {error.cause}"
        except Exception as error:
            outcome = f"rank {run.comm.rank}: {type(error).__name__}: {error}"
        return outcome, time.monotonic() - start

    def close(self) -> None:
        for stage in reversed(self.stages):
            stage.close()


def fail_everywhere(rank: int) -> list[tuple[str, list[str], float, bool]]:
    """For each place of failure: what every rank said, the slowest, whether the next update brought everything."""
    found = []
    for prefetch in (True, False):
        chain = Chain(prefetch)
        model = Toy(layers=3)
        want = hf_tensors(model)
        shard(model, init_device_mesh("cpu", (chain.run.comm.world_size,)))
        assert chain.update(model)[0] == "done"
        for chain.trouble.rank in (0, 1):
            for chain.trouble.at in (0, 5):
                outcome, seconds = chain.update(model)
                chain.trouble.at = 99
                again, _ = chain.update(model)
                whole = again == "done" and (rank > 0 or _equal(chain.transport.got, want))
                found.append((outcome, seconds, whole))
        chain.close()
    return found


def _equal(have: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> bool:
    return set(have) == set(want) and all(torch.equal(have[n], want[n]) for n in want)


def test_one_failing_rank_is_the_root_cause_on_every_rank(world: World) -> None:
    ranks = world.run(3, fail_everywhere)
    places = [(rank, at) for _ in range(2) for rank in (0, 1) for at in (0, 5)]
    for (culprit, at), *outcomes in zip(places, *ranks, strict=True):
        cause = f"rank {culprit}: ValueError: trouble at group {at}"
        assert [o for o, _, _ in outcomes] == [cause] * 3
        assert all(seconds < 15 for _, seconds, _ in outcomes)
        assert all(whole for _, _, whole in outcomes), (culprit, at)


def hang(rank: int) -> tuple[str, float, str]:
    chain = Chain(prefetch=True, timeout=3.0)
    model = shard(Toy(layers=3), init_device_mesh("cpu", (2,)))
    chain.trouble.rank, chain.trouble.at, chain.trouble.seconds = 1, 2, 9.0
    outcome, seconds = chain.update(model)
    if rank == 0:
        time.sleep(max(0.0, 12.0 - seconds))  # until the other is awake again
    chain.trouble.at = 99
    chain.run.comm.timeout = 20.0
    again, _ = chain.update(model)
    chain.close()
    return outcome, seconds, again


def test_a_hanging_rank_is_given_up_after_the_timeout(world: World) -> None:
    (outcome, seconds, again), (_, _, other) = world.run(2, hang)
    assert WaitTimeout.__name__ in outcome
    assert 3 <= seconds < 9
    assert (again, other) == ("done", "done")


def models_that_differ(rank: int) -> tuple[str, str]:
    chain = Chain(prefetch=True)
    mesh = init_device_mesh("cpu", (2,))
    model = shard(Toy(), mesh)
    odd = Toy()
    odd.lm_head = torch.nn.Linear(8 + rank, 4)
    outcome, _ = chain.update(odd)
    again, _ = chain.update(model)
    chain.close()
    return outcome, again


def test_ranks_with_different_models_are_refused_before_anything_streams(world: World) -> None:
    for outcome, again in world.run(2, models_that_differ):
        assert "lm_head.weight" in outcome
        assert again == "done"
