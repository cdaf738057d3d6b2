"""The engine's end of our own wire: buckets in order, checked, each piece handed on once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.chains import DTYPES, SPLIT, Packing, expected_bytes, group_of, pack, raw, tensor_of

from stages.errors import PlanMismatch, TransportError
from stages.flow import Group, TensorSpec, plan_to_json
from stages.receiver import ABORT_SEQ, Receiver
from stages.transport.shm import Segment

GROUPS = [group_of({f"t{i}": tensor_of(d, (33,), i)}) for i, d in enumerate(DTYPES)]


class Collected:
    """A sink that puts tensors together."""

    def __init__(self) -> None:
        self.tensors: dict[str, bytes] = {}

    def __call__(self, spec: TensorSpec, start: int, memory: torch.Tensor) -> None:
        assert start == len(self.tensors.get(spec.name, b"")), "pieces out of order"
        self.tensors[spec.name] = self.tensors.get(spec.name, b"") + raw(memory)


class Wire:
    """A sender's slot, a receiver that has it mapped, and the buckets of one update."""

    def __init__(self, groups: list[Group] = GROUPS, capacity: int = 256) -> None:
        self.packing: Packing = pack(groups, SPLIT, capacity)
        self.segment = Segment(max(self.packing.plan.largest_bucket, 1))
        self.receiver = Receiver(0)
        self.sink = Collected()
        self.receiver.init(self.init_info())

    def init_info(self, **changes: Any) -> dict[str, Any]:
        info = {"transport": "ipc", "timeout": 5.0, "slot_bytes": self.segment.nbytes, "segments": [self.segment.name]}
        return info | changes

    def info(self, seq: int, update: int = 1, **changes: Any) -> dict[str, Any]:
        """Bucket `seq` as the sender announces it; its bytes are in the slot then."""
        plan = self.packing.plan
        if 0 <= seq < len(plan.buckets):
            packed = self.packing.buckets[seq]
            self.segment.memory[: packed.layout.nbytes] = packed.memory
        digest = self.packing.buckets[max(seq, 0) % len(plan.buckets)].digest
        info: dict[str, Any] = {"update": update, "seq": seq, "plan_hash": plan.hash, "plan": None, "slot": 0}
        info |= {"digest": f"{digest:016x}", "plan": plan_to_json(plan) if seq == 0 else None}
        return info | changes

    def receive(self, seq: int, update: int = 1, **changes: Any) -> None:
        self.receiver.receive(self.info(seq, update, **changes), self.sink)

    def whole_update(self, update: int = 1) -> dict[str, bytes]:
        self.sink = Collected()
        self.receiver.start()
        for seq in range(len(self.packing.plan.buckets)):
            self.receive(seq, update)
        self.receiver.finish()
        return self.sink.tensors


@pytest.fixture
def wire() -> Iterator[Wire]:
    made = Wire()
    assert len(made.packing.buckets) > 4
    yield made
    made.receiver.shutdown()
    made.segment.unlink()


def test_an_update_arrives_whole(wire: Wire) -> None:
    assert wire.whole_update() == expected_bytes(GROUPS, SPLIT)


@given(
    shapes=st.lists(
        st.tuples(st.sampled_from(DTYPES), st.sampled_from([(), (0,), (1,), (257,), (50, 1000)])),
        min_size=1,
        max_size=5,
    ),
    capacity=st.sampled_from([8, 300, 70_000]),
)
@settings(max_examples=15)
def test_any_tensors_arrive_whole(shapes: list[tuple[torch.dtype, tuple[int, ...]]], capacity: int) -> None:
    groups = [group_of({f"t{i}": tensor_of(d, s, i)}) for i, (d, s) in enumerate(shapes)]
    largest = max(t.numel() * t.element_size() for g in groups for t in g.tensors)
    made = Wire(groups, max(capacity, largest // 5))
    assert made.whole_update() == expected_bytes(groups, SPLIT)
    made.receiver.shutdown()
    made.segment.unlink()


def test_the_next_update_needs_no_plan_again(wire: Wire) -> None:
    """A steady-state update sends no metadata that the other side already has."""
    wire.whole_update(1)
    wire.sink = Collected()
    wire.receiver.start()
    for seq in range(len(wire.packing.plan.buckets)):
        wire.receive(seq, 2, plan=None)
    wire.receiver.finish()
    assert wire.sink.tensors == expected_bytes(GROUPS, SPLIT)


def test_without_a_digest_nothing_is_checked(wire: Wire) -> None:
    wire.receiver.start()
    wire.receive(0, digest=None)


# -- refusals ---------------------------------------------------------------------------------------------------------


def test_what_arrives_changed_is_refused_and_the_update_cannot_be_finished(wire: Wire) -> None:
    wire.receiver.start()
    wire.receive(0)
    info = wire.info(1)
    wire.segment.memory[3] ^= 1
    with pytest.raises(TransportError, match="bucket 1 arrived changed"):
        wire.receiver.receive(info, wire.sink)
    with pytest.raises(PlanMismatch, match="update incomplete: 1 of"):
        wire.receiver.finish()
    assert wire.whole_update(2) == expected_bytes(GROUPS, SPLIT)


ORDERS = {"skipped": [0, 2], "twice": [0, 0], "backwards": [0, 1, 0], "late start": [1]}


@pytest.mark.parametrize("order", ORDERS.values(), ids=list(ORDERS))
def test_buckets_out_of_order_are_refused_before_their_bytes_move(wire: Wire, order: list[int]) -> None:
    wire.receiver.start()
    *good, bad = order
    if good or bad:
        for seq in good:
            wire.receive(seq)
    before = dict(wire.sink.tensors)
    with pytest.raises(PlanMismatch):
        wire.receive(bad)
    assert wire.sink.tensors == before


def test_a_bucket_of_another_update_is_refused(wire: Wire) -> None:
    wire.receiver.start()
    wire.receive(0, update=1)
    with pytest.raises(PlanMismatch, match="bucket 1 of update 2 arrived where bucket 1 of update 1 was due"):
        wire.receive(1, update=2)


def test_more_buckets_than_planned_are_refused(wire: Wire) -> None:
    wire.whole_update()
    total = len(wire.packing.plan.buckets)
    with pytest.raises(PlanMismatch):
        wire.receive(total)


def test_an_update_that_is_not_complete_cannot_be_finished(wire: Wire) -> None:
    wire.receiver.start()
    with pytest.raises(PlanMismatch, match="incomplete: 0 of 0"):
        wire.receiver.finish()
    wire.receive(0)
    with pytest.raises(PlanMismatch, match="incomplete: 1 of"):
        wire.receiver.finish()


def test_an_update_is_finished_once(wire: Wire) -> None:
    wire.whole_update()
    with pytest.raises(PlanMismatch):
        wire.receiver.finish()


def test_an_update_that_is_given_up_starts_over(wire: Wire) -> None:
    wire.receiver.start()
    wire.receive(0)
    with pytest.raises(PlanMismatch, match="gave this update up"):
        wire.receive(ABORT_SEQ, plan_hash="")
    with pytest.raises(PlanMismatch):
        wire.receive(1)
    assert wire.whole_update(2) == expected_bytes(GROUPS, SPLIT)


def test_a_plan_that_it_does_not_know_is_asked_for(wire: Wire) -> None:
    wire.receiver.start()
    with pytest.raises(PlanMismatch, match="unknown plan .*send the plan along with bucket 0"):
        wire.receive(0, plan=None)
    wire.whole_update(1)
    with pytest.raises(PlanMismatch, match="unknown plan"):
        wire.receive(0, update=2, plan=None, plan_hash="0" * 32)


def test_a_malformed_plan_is_refused_and_the_known_one_stays(wire: Wire) -> None:
    wire.whole_update(1)
    with pytest.raises(PlanMismatch, match="malformed plan"):
        wire.receive(0, update=2, plan={"hash": wire.packing.plan.hash})
    assert wire.whole_update(3) == expected_bytes(GROUPS, SPLIT)


@pytest.mark.parametrize("slot", [None, 1, -1, "0", 0.5])
def test_a_slot_that_is_not_mapped_is_refused(wire: Wire, slot: Any) -> None:
    wire.receiver.start()
    with pytest.raises(TransportError, match="is not one of the 1 mapped"):
        wire.receive(0, slot=slot)


@pytest.mark.parametrize("seq", [None, "0", 0.5, -2, 99])
def test_a_bucket_number_that_cannot_be_is_refused(wire: Wire, seq: Any) -> None:
    wire.receiver.start()
    info = wire.info(0) | {"seq": seq}
    with pytest.raises(PlanMismatch):
        wire.receiver.receive(info, wire.sink)


def test_a_bucket_larger_than_its_slot_is_refused(wire: Wire) -> None:
    small = Segment(8)
    wire.receiver.init(wire.init_info(segments=[small.name], slot_bytes=8))
    wire.receiver.start()
    with pytest.raises(TransportError, match="exceeds its slot"):
        wire.receive(0)
    small.unlink()


def test_nothing_works_before_init_and_after_shutdown(wire: Wire) -> None:
    for receiver in (Receiver(0), wire.receiver):
        receiver.shutdown()
        receiver.shutdown()
        with pytest.raises(TransportError, match="no init_info yet"):
            receiver.start()
        with pytest.raises(TransportError, match="no init_info yet"):
            receiver.receive(wire.info(0), wire.sink)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"transport": "rdma"}, "'rdma' is not one of ipc, nccl"),
        ({"colour": 1}, r"unknown keys \['colour'\]"),
        ({"segments": ["../../etc/passwd"]}, "is not the name of a shared-memory segment"),
        ({"segments": [7]}, "is not the name of a shared-memory segment"),
        ({"segments": ["torch_0_gone"]}, "the sender is gone"),
        ({"slot_bytes": 1 << 40}, "expected"),
        ({"slot_bytes": -5}, "no number of bytes"),
    ],
)
def test_init_info_that_cannot_work_is_refused(wire: Wire, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(TransportError, match=words):
        wire.receiver.init(wire.init_info(**changes))


def test_missing_keys_are_named(wire: Wire) -> None:
    with pytest.raises(TransportError, match="InitInfo.*slot_bytes"):
        wire.receiver.init({"transport": "ipc", "timeout": 1.0})
    with pytest.raises(TransportError, match="UpdateInfo.*plan_hash"):
        wire.receiver.receive({"update": 1, "seq": 0}, wire.sink)


def test_a_new_init_replaces_the_old_one(wire: Wire) -> None:
    wire.whole_update()
    wire.receiver.init(wire.init_info())
    assert wire.whole_update(2) == expected_bytes(GROUPS, SPLIT)


def test_an_error_of_the_sink_is_not_swallowed_and_ends_the_bucket(wire: Wire) -> None:
    wire.receiver.start()

    def full(spec: TensorSpec, start: int, memory: torch.Tensor) -> None:
        raise MemoryError("the engine's own")

    with pytest.raises(MemoryError, match="the engine's own"):
        wire.receiver.receive(wire.info(0), full)
    with pytest.raises(PlanMismatch):
        wire.receive(1)
