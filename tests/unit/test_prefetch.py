"""prefetch: a thread of its own for everything upstream, and nothing left of it afterwards."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.chains import MIXED, Memory, group_of, make_run, tensor_of

from pipelines.executor import run_chain
from stages import prefetch
from stages.base import Stage
from stages.bucket import Bucket as BucketStage
from stages.errors import ConfigError
from stages.flow import Bucket, Group
from stages.prefetch import Prefetch
from stages.run import Run, Timeouts

GROUPS = [group_of({f"t{i}": tensor_of(torch.uint8, (64,), i)}) for i in range(12)]


class Source(Stage):
    produces = Group

    def __init__(self, on: Callable[[int], None] = lambda i: None) -> None:
        self.on = on
        self.threads: set[str] = set()
        self.closed = 0

    def __call__(self, items: Iterator[Any], run: Run) -> Iterator[Group]:
        try:
            for index, group in enumerate(GROUPS):
                self.threads.add(threading.current_thread().name)
                self.on(index)
                yield group
        finally:
            self.closed += 1


class Sink(Stage):
    """Stands in for everything behind prefetch."""

    consumes = Bucket

    def __init__(self, on: Callable[[int], None] = lambda i: None) -> None:
        self.on = on
        self.seen: list[bytes] = []

    def __call__(self, items: Iterator[Bucket], run: Run) -> Iterator[Any]:
        for index, bucket in enumerate(items):
            self.on(index)
            self.seen.append(bytes(bucket.memory.numpy()))
            yield index
            bucket.release()


class Chain:
    """source -> bucket -> prefetch -> sink, ready for one update after the other."""

    def __init__(self, source: Source | None = None, sink: Sink | None = None, slots: int = 2, depth: int = 1) -> None:
        self.source, self.bucket, self.sink = source or Source(), BucketStage(64, slots), sink or Sink()
        self.run = make_run(MIXED, transport=Memory(), timeouts=Timeouts(put=60.0))
        self.bucket.plan(tuple(g.spec for g in GROUPS), self.run)
        self.stages = [self.source, self.bucket, Prefetch(depth), self.sink]

    def __call__(self) -> None:
        self.bucket.prepare(self.run)
        try:
            run_chain(self.stages, self.run)
        finally:
            assert not [t for t in threading.enumerate() if "prefetch" in t.name], "a thread is left"
            if self.source.threads:
                assert self.source.closed == 1, "upstream was not closed, or more than once"
            self.source.closed = 0

    def free_slots(self) -> int:
        assert self.bucket._ring is not None
        return len(self.bucket._ring._free)


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_the_stream_is_the_same(slots: int, depth: int) -> None:
    chain = Chain(slots=slots, depth=depth)
    chain()
    assert chain.sink.seen == [bytes(g.tensors[0].numpy()) for g in GROUPS]
    assert chain.free_slots() == slots


def test_upstream_runs_in_the_other_thread_and_ahead() -> None:
    packed: list[int] = []
    ahead: list[int] = []
    source = Source(packed.append)

    def on(index: int) -> None:
        deadline = time.monotonic() + 5.0
        while len(packed) < min(index + 2, len(GROUPS)) and time.monotonic() < deadline:
            time.sleep(0.001)
        ahead.append(len(packed) - index)

    chain = Chain(source, Sink(on), slots=3)
    chain()
    assert source.threads == {"weightstream-prefetch"}
    assert all(n >= 2 for n in ahead[:-1])


def test_no_more_is_made_than_there_are_slots() -> None:
    packed: list[int] = []
    most: list[int] = []

    def on(index: int) -> None:
        time.sleep(0.002)
        most.append(len(packed) - index)

    Chain(Source(packed.append), Sink(on), slots=2, depth=8)()
    assert max(most) <= 3  # two slots, and one group that waits for a slot


@pytest.mark.parametrize("at", [0, 5, 11])
def test_an_error_crosses_the_thread_with_its_own_traceback(at: int) -> None:
    def culprit(index: int) -> None:
        if index == at:
            raise LookupError("the root cause")

    chain = Chain(Source(culprit))
    with pytest.raises(LookupError, match="the root cause") as caught:
        chain()
    assert "culprit" in "".join(traceback.format_exception(caught.value))
    assert chain.free_slots() == 2


@pytest.mark.parametrize("error", [ValueError("downstream"), KeyboardInterrupt()], ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("at", [0, 1, 7])
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_a_failure_downstream_stops_the_thread(error: BaseException, at: int, slots: int) -> None:
    def fail(index: int) -> None:
        if index == at:
            raise error

    chain = Chain(sink=Sink(fail), slots=slots)
    started = time.monotonic()
    with pytest.raises(type(error)):
        chain()
    assert time.monotonic() - started < 30.0, "it waited for a timeout"
    chain.sink.on = lambda index: None
    chain.sink.seen.clear()
    chain()  # all slots are there again
    assert len(chain.sink.seen) == len(GROUPS)


def test_an_interrupt_while_waiting_for_a_bucket_stops_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C comes while the consumer waits inside prefetch itself."""
    chain = Chain(Source(lambda index: time.sleep(0.05) if index == 3 else None))
    take, taken = prefetch._take, []

    def interrupted(*args: Any) -> tuple[str, Any]:
        taken.append(take(*args))
        if len(taken) == 2:
            taken[-1][1].release()
            raise KeyboardInterrupt
        return taken[-1]

    monkeypatch.setattr(prefetch, "_take", interrupted)
    with pytest.raises(KeyboardInterrupt):
        chain()
    monkeypatch.undo()
    chain.sink.seen.clear()
    chain()  # all slots are there again
    assert len(chain.sink.seen) == len(GROUPS)


def test_the_ring_fills_before_anybody_asks() -> None:
    """The engines are being paused meanwhile."""
    packed = threading.Semaphore(0)
    chain = Chain(Source(lambda index: packed.release() if index == 1 else None))
    chain.bucket.prepare(chain.run)
    seen: list[int] = []

    def ready() -> None:
        assert packed.acquire(timeout=60.0)
        seen.append(len(chain.sink.seen))

    run_chain(chain.stages, chain.run, ready)
    assert seen == [0]
    assert len(chain.sink.seen) == len(GROUPS)


def test_a_chain_that_is_never_pulled_leaves_no_thread() -> None:
    chain = Chain()

    def refuse() -> None:
        raise RuntimeError("the engine does not pause")

    chain.bucket.prepare(chain.run)
    with pytest.raises(RuntimeError, match="does not pause"):
        run_chain(chain.stages, chain.run, refuse)
    assert not [t for t in threading.enumerate() if "prefetch" in t.name]
    assert chain.free_slots() == 2


def test_depth_must_be_positive() -> None:
    with pytest.raises(ConfigError, match=r"prefetch\.depth"):
        Prefetch(0)
