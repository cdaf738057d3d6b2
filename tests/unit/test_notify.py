"""notify_engines: asks all at once, moves the bytes meanwhile, and records what went wrong instead of raising it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.chains import MIXED, group_of, make_run, pack, tensor_of
from support.fakes import FakeEngine

from stages.comm import Comm
from stages.errors import EngineError, EngineUnreachable, WaitTimeout
from stages.flow import Bucket, Delivery, Shipment, Slot
from stages.notify import NotifyEngines
from stages.run import Run, Timeouts

GROUPS = [group_of({f"t{i}": tensor_of(torch.uint8, (64,), i)}) for i in range(3)]


class Ends:
    """Engines in a session, a notify stage, and shipments of three buckets whose slots report their release."""

    def __init__(self, count: int = 2, send: Callable[[], None] | None = None, **timeouts: float) -> None:
        self.engines = [FakeEngine(f"http://engine{i}:1") for i in range(count)]
        self.run = make_run(timeouts=Timeouts(**({"put": 60.0, "connect": 1.0} | timeouts)))
        self.run.engines = list(self.engines)
        for engine in self.engines:
            engine.is_paused = engine.in_session = True
        self.released: list[int] = []
        self.send = send
        self.stage = NotifyEngines()
        self.stage.prepare(self.run)

    def shipments(self) -> Iterator[Shipment]:
        packing = pack(GROUPS, MIXED, 64)
        for packed in packing.buckets:
            seq = packed.layout.seq
            bucket = Bucket(packed.layout, packing.plan, 1, Slot(seq, packed.memory), None, packed.last)
            bucket._release = lambda seq=seq: self.released.append(seq)  # type: ignore[misc]
            yield Shipment(bucket, None, self.send)

    def one(self) -> tuple[Shipment, list[Delivery]]:
        """Deliver the first bucket."""
        shipment = next(self.shipments())
        return shipment, list(self.stage(iter([shipment]), self.run))


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.stage.close()


def test_every_engine_gets_every_bucket(ends: Ends) -> None:
    deliveries = list(ends.stage(ends.shipments(), ends.run))
    assert [(d.engine, d.seq, d.error) for d in deliveries] == [
        (e.url, seq, None) for seq in range(3) for e in ends.engines
    ]
    assert all(len(e._loading) == 3 for e in ends.engines)
    assert ends.released == [0, 1, 2]


def test_all_engines_are_asked_at_once(ends: Ends) -> None:
    meeting = threading.Barrier(2, timeout=20.0)
    for engine in ends.engines:
        engine.script("put", meeting.wait)
    _, deliveries = ends.one()
    assert [d.error for d in deliveries] == [None, None]


def test_a_slot_is_released_once_all_have_answered(ends: Ends) -> None:
    ends.engines[1].script("put", lambda: time.sleep(0.1))
    seen: list[list[int]] = []
    for delivery in ends.stage(iter([next(ends.shipments())]), ends.run):
        seen.append([*ends.released])
        assert delivery.error is None
    assert seen == [[], []]
    assert ends.released == [0]


@pytest.mark.parametrize("who", [0, 1])
def test_a_failure_is_recorded_not_raised(ends: Ends, who: int) -> None:
    ends.engines[who].script("put", ends.engines[who].refuse("put", "wrong shape"))
    shipment, deliveries = ends.one()
    assert "wrong shape" in str(shipment.failure)
    assert [d.error is None for d in deliveries] == [i != who for i in range(2)]
    assert ends.released == [0]


def test_an_unforeseen_error_is_recorded_too(ends: Ends) -> None:
    ends.engines[0].script("put", KeyError("adapter bug"))
    shipment, _ = ends.one()
    assert isinstance(shipment.failure, KeyError)


def test_a_callback_that_fails_does_not_leave_the_other_ranks_behind(ends: Ends) -> None:
    """A failure must reach barrier, which tells every rank."""

    def progress(nbytes: int) -> None:
        raise ZeroDivisionError("the user's own")

    ends.run.progress = progress
    shipment, _ = ends.one()
    assert isinstance(shipment.failure, ZeroDivisionError)


def test_progress_counts_delivered_buckets_only(ends: Ends) -> None:
    seen: list[int] = []
    ends.run.progress = seen.append
    list(ends.stage(ends.shipments(), ends.run))
    assert seen == [64, 64, 64]
    ends.engines[0].script("put", ends.engines[0].refuse("put"))
    ends.one()
    assert seen == [64, 64, 64]


def test_a_rank_that_does_not_talk_to_engines_only_follows(ends: Ends) -> None:
    ends.run.comm = Comm(1, 2, object())  # type: ignore[arg-type]
    assert list(ends.stage(ends.shipments(), ends.run)) == []
    assert ends.engines[0].log == []
    assert ends.released == [0, 1, 2]


# -- with a collective --------------------------------------------------------------------------------------------


class Collective:
    """A broadcast that ends when every engine has joined it, or when it is given up."""

    def __init__(self, parties: int) -> None:
        self.barrier = threading.Barrier(parties)
        self.sent = 0

    def __call__(self) -> None:
        try:
            self.barrier.wait(20.0)
            self.sent += 1
        except threading.BrokenBarrierError as error:
            raise RuntimeError("broadcast failed") from error


def with_collective(count: int = 2, **timeouts: float) -> tuple[Ends, Collective]:
    collective = Collective(count + 1)
    ends = Ends(count, collective, **timeouts)
    return ends, collective


def join(collective: Collective) -> Callable[[], Any]:
    return lambda: collective.barrier.wait(20.0)


def test_bytes_move_while_the_engines_are_told() -> None:
    ends, collective = with_collective()
    for engine in ends.engines:
        engine.script("put", join(collective))
    shipment, deliveries = ends.one()
    assert shipment.failure is None
    assert collective.sent == 1
    assert len(deliveries) == 2
    ends.stage.close()


def test_a_refusal_is_noticed_while_the_broadcast_waits_for_the_one_that_will_not_come() -> None:
    ends, collective = with_collective()
    refusing, stuck = ends.engines
    refusing.script("put", refusing.refuse("put", "unknown group", status=400))
    stuck.script("put", join(collective))
    started = time.monotonic()
    shipment, deliveries = ends.one()
    assert time.monotonic() - started < 15.0, "it waited for the timeout of the broadcast"
    assert "unknown group" in str(shipment.failure)
    assert "unknown group" in str(deliveries[0].error)
    assert isinstance(deliveries[1].error, WaitTimeout)
    assert "restart" in str(deliveries[1].error)
    assert stuck.state.needs_restart
    assert not refusing.state.needs_restart
    collective.barrier.abort()
    ends.stage.close()


def test_an_engines_own_words_count_more_than_the_broadcast_error_they_cause() -> None:
    ends, collective = with_collective(1)
    engine = ends.engines[0]

    def die() -> None:
        collective.barrier.abort()
        time.sleep(0.2)
        raise EngineUnreachable(engine.url, "put", "connection dropped")

    engine.script("put", die)
    shipment, _ = ends.one()
    assert isinstance(shipment.failure, EngineUnreachable)
    ends.stage.close()


def test_a_broadcast_that_fails_alone_is_the_cause() -> None:
    def broken() -> None:
        raise RuntimeError("no peer")

    ends = Ends(1, broken)
    shipment, _ = ends.one()
    assert "no peer" in str(shipment.failure)
    ends.stage.close()


def test_nobody_answering_is_bounded_and_names_the_setting() -> None:
    ends, collective = with_collective(1, put=0.2, connect=0.1)
    ends.engines[0].script("put", lambda: collective.barrier.wait(20.0) and time.sleep(3.0))
    collective.barrier = threading.Barrier(5)
    shipment, deliveries = ends.one()
    assert isinstance(shipment.failure, WaitTimeout)
    assert "session.timeouts.put" in str(shipment.failure)
    assert ends.engines[0].state.needs_restart
    assert isinstance(deliveries[0].error, WaitTimeout)
    collective.barrier.abort()
    ends.stage.close()


def test_requests_that_hang_on_do_not_starve_the_next_update() -> None:
    ends, collective = with_collective(2)
    release = threading.Event()
    refusing, stuck = ends.engines
    refusing.script("put", refusing.refuse("put", "no"))
    stuck.script("put", lambda: release.wait(20.0))
    ends.one()  # leaves a request and the broadcast behind
    ends.send = None
    ends.stage.prepare(ends.run)
    meeting = threading.Barrier(2, timeout=20.0)
    for engine in ends.engines:
        engine.script("put", meeting.wait)
    shipment, _ = ends.one()
    assert shipment.failure is None
    release.set()
    collective.barrier.abort()
    ends.stage.close()


def test_time_goes_to_the_wire_or_to_applying() -> None:
    ends = Ends(1, lambda: time.sleep(0.02))
    ends.engines[0].script("put", lambda: time.sleep(0.06))
    ends.one()
    assert ends.run.clock.seconds["wire"] >= 0.02
    assert ends.run.clock.seconds["apply"] >= 0.02
    ends.stage.close()


def test_more_engines_than_before_get_more_workers(ends: Ends) -> None:
    ends.engines += [FakeEngine(f"http://more{i}:1") for i in range(4)]
    for engine in ends.engines:
        engine.is_paused = engine.in_session = True
    ends.run.engines = list(ends.engines)
    ends.stage.prepare(ends.run)
    meeting = threading.Barrier(6, timeout=20.0)
    for engine in ends.engines:
        engine.script("put", meeting.wait)
    shipment, deliveries = ends.one()
    assert shipment.failure is None
    assert len(deliveries) == 6


def test_closing_twice_or_before_opening_is_fine() -> None:
    stage = NotifyEngines()
    stage.close()
    stage.close()


def test_errors_carry_the_engine_and_the_phase(ends: Ends) -> None:
    ends.engines[1].script("put", ends.engines[1].refuse("put", "out of memory"))
    shipment, _ = ends.one()
    assert isinstance(shipment.failure, EngineError)
    assert str(shipment.failure) == "http://engine1:1: put: out of memory"
    run: Run = ends.run
    assert run.engines[1].url == shipment.failure.engine
