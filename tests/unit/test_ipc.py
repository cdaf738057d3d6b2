"""ipc: persistent slots, engines that map them once, and nothing that grows."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from support.chains import SPLIT, expected_bytes, group_of, make_run, raw, tensor_of
from support.fakes import FakeEngine, Toy, engines_of, updater_for
from support.processes import Pool

from stages.bucket import Bucket
from stages.errors import ConfigError
from stages.flow import Group, TensorSpec, plan_to_json
from stages.receiver import Receiver
from stages.run import Run
from stages.transport.ipc import Ipc, refuse_expandable_segments
from stages.transport.messages import SharedSlots
from stages.transport.shm import SHM_DIR

OTHERS = set(os.listdir(SHM_DIR))


def segments_here() -> set[str]:
    """Segments of this process, without those that other tests left."""
    return {n for n in os.listdir(SHM_DIR) if n.startswith(f"torch_{os.getpid()}_")} - OTHERS


@pytest.fixture(autouse=True)
def _only_ours() -> None:
    OTHERS.update(os.listdir(SHM_DIR))


def groups_of(nbytes: int) -> list[Group]:
    return [group_of({f"t{i}": tensor_of(torch.uint8, (nbytes,), i)}) for i in range(4)]


class Side:
    """The trainer's side: bucket and transport over engines that are told about slots."""

    def __init__(self, *engines: FakeEngine, slots: int = 2) -> None:
        self.ipc = Ipc()
        self.bucket = Bucket(1024, slots)
        self.run: Run = make_run(SPLIT, transport=self.ipc)
        self.run.engines = list(engines)
        self.told: list[tuple[str, SharedSlots]] = []
        for engine in engines:
            engine.attach = lambda slots, url=engine.url: self.told.append((url, slots))  # type: ignore[method-assign]
        self.ipc.open(self.run)

    def prepare(self, groups: list[Group]) -> None:
        self.bucket.plan(tuple(g.spec for g in groups), self.run)
        self.bucket.prepare(self.run)
        self.ipc.prepare(self.run)

    def close(self) -> None:
        self.ipc.close()
        self.bucket.close()


def test_engines_are_told_once_about_slots_that_stay() -> None:
    side = Side(FakeEngine("http://a:1"), FakeEngine("http://b:1"))
    for _ in range(3):
        side.prepare(groups_of(1024))
    assert [url for url, _ in side.told] == ["http://a:1", "http://b:1"]
    slots = side.told[0][1]
    assert slots.slot_bytes >= 1024
    assert len(slots.segments) == 2
    assert set(slots.segments) <= segments_here()
    side.close()
    assert not segments_here()


def test_larger_slots_replace_the_old_ones_and_engines_are_told_again() -> None:
    side = Side(FakeEngine("http://a:1"))
    small, large = Bucket(100, 2), Bucket(5000, 2)
    for side.bucket in (small, large):
        side.prepare(groups_of(5000))
    assert len(side.told) == 2
    assert segments_here() == set(side.told[1][1].segments)
    assert not set(side.told[0][1].segments) & segments_here()
    side.close()


def test_an_engine_that_left_is_told_again_when_it_comes_back() -> None:
    """It restarted, or failed: what was mapped there is gone (NVIDIA-NeMo/RL#3944)."""
    a, b = FakeEngine("http://a:1"), FakeEngine("http://b:1")
    side = Side(a, b)
    side.prepare(groups_of(1024))
    side.ipc.leave(a)
    side.prepare(groups_of(1024))
    assert [url for url, _ in side.told] == ["http://a:1", "http://b:1", "http://a:1"]
    side.ipc.leave(FakeEngine("http://never:1"))
    side.close()


def test_only_the_rank_that_holds_bytes_has_segments() -> None:
    from stages.comm import Comm

    side = Side(FakeEngine("http://a:1"))
    side.run.comm = Comm(1, 2, object())  # type: ignore[arg-type]
    assert not side.ipc.holds_bytes(side.run)
    side.prepare(groups_of(100))
    assert not segments_here()
    assert side.told == []


def test_closing_before_opening_or_twice_is_fine() -> None:
    side = Side()
    side.close()
    side.close()


# -- many updates -----------------------------------------------------------------------------------------------------

THEIRS: dict[str, Any] = {}  # in the other process


def engine_init(info: dict[str, Any]) -> None:
    THEIRS["receiver"] = Receiver(0)
    THEIRS["receiver"].init(info)


def engine_start() -> None:
    THEIRS["receiver"].start()
    THEIRS["got"] = {}


def engine_receive(info: dict[str, Any]) -> None:
    def sink(spec: TensorSpec, start: int, memory: torch.Tensor) -> None:
        THEIRS["got"][spec.name] = THEIRS["got"].get(spec.name, b"") + raw(memory)

    THEIRS["receiver"].receive(info, sink)


def engine_finish() -> dict[str, bytes]:
    THEIRS["receiver"].finish()
    return THEIRS["got"]  # type: ignore[no-any-return]


def engine_close() -> None:
    THEIRS.pop("receiver").shutdown()
    THEIRS.clear()


def footprint() -> tuple[int, int]:
    """Open files, and resident bytes, of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return len(os.listdir("/proc/self/fd")), pages * os.sysconf("SC_PAGE_SIZE")


def test_fifty_updates_leave_everything_as_it_was(child: Pool) -> None:
    """A new exported buffer per sync runs out of memory at the 32nd (verl-project/verl#6958)."""
    side = Side(FakeEngine("http://a:1"))
    side.bucket = Bucket(100_000, 2)
    groups = [group_of({f"t{i}": tensor_of(torch.bfloat16, (50_000,), i)}) for i in range(2)]
    side.prepare(groups)
    slots = side.told[0][1]
    child.call(
        engine_init,
        {"transport": "ipc", "timeout": 5.0, "slot_bytes": slots.slot_bytes, "segments": list(slots.segments)},
    )

    def update(number: int) -> None:
        side.run.update = number
        groups[number % 2].tensors[0].add_(1)
        side.prepare(groups)
        child.call(engine_start)
        for bucket in side.bucket(iter(groups), side.run):
            assert bucket.slot is not None
            plan = plan_to_json(bucket.plan) if number == 0 and bucket.layout.seq == 0 else None
            info = {"update": number, "seq": bucket.layout.seq, "plan_hash": bucket.plan.hash, "plan": plan}
            child.call(engine_receive, info | {"slot": bucket.slot.index, "digest": f"{bucket.digest:016x}"})
            bucket.release()

    for number in range(10):
        update(number)
    before = segments_here(), footprint()[0], child.call(footprint)[0]
    memory = footprint()[1], child.call(footprint)[1]
    for number in range(10, 60):
        update(number)
    assert (segments_here(), footprint()[0], child.call(footprint)[0]) == before
    grown = footprint()[1] - memory[0], child.call(footprint)[1] - memory[1]
    assert max(grown) < 8 << 20, grown
    assert child.call(engine_finish) == expected_bytes(groups, SPLIT)
    child.call(engine_close)
    side.close()
    assert not segments_here()


def test_whole_updates_keep_their_segments_and_leave_none() -> None:
    with updater_for(transport={"_target_": "stages.transport.ipc.Ipc"}, wire="split") as updater:
        model = Toy()
        updater.update(model.fill(1.0))
        before = segments_here()
        for value in range(20):
            updater.update(model.fill(float(value)))
        assert segments_here() == before
        assert len(before) == 2
        (engine,) = engines_of(updater)
        assert engine.log.count("attach") == 1
        assert engine.weights == model.bytes()
    assert not segments_here()


# -- the environment --------------------------------------------------------------------------------------------------

BAD = [
    {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
    {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True,max_split_size_mb:64"},
    {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64, expandable_segments : true"},
    {"PYTORCH_ALLOC_CONF": "backend:native,expandable_segments:1"},
    {"PYTORCH_HIP_ALLOC_CONF": "expandable_segments:True"},
]
GOOD: list[dict[str, str]] = [
    {},
    {"PYTORCH_CUDA_ALLOC_CONF": ""},
    {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"},
    {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64,garbage_collection_threshold:0.8"},
    {"SOMETHING_ELSE": "expandable_segments:True"},
]


@pytest.mark.parametrize("environment", BAD, ids=str)
def test_an_allocator_whose_memory_cannot_be_shared_is_refused_by_name(environment: dict[str, str]) -> None:
    """Handle sharing fails with expandable segments (NVIDIA-NeMo/RL#3782)."""
    (variable,) = environment
    with pytest.raises(ConfigError, match=f"{variable} has expandable_segments:True"):
        refuse_expandable_segments(environment)


@pytest.mark.parametrize("environment", GOOD, ids=str)
def test_any_other_allocator_is_fine(environment: dict[str, str]) -> None:
    refuse_expandable_segments(environment)
