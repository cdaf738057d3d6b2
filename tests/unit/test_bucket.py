"""bucket: what it writes, what it refuses, and how its slots go round."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from support.chains import (
    DTYPES,
    MIXED,
    ONE_DTYPE,
    SPLIT,
    WIRES,
    Packing,
    expected_bytes,
    group_of,
    make_run,
    pack,
    raw,
    spec,
    tensor_of,
)

from stages.bucket import Bucket, parse_size
from stages.errors import ConfigError, PlanMismatch, WaitTimeout
from stages.flow import Group, GroupSpec, TensorSpec
from stages.ring import RingAborted
from stages.run import Run, Timeouts, Wire


def one(tensor: torch.Tensor, dtype: torch.dtype | None = None, name: str = "w") -> Group:
    return Group(GroupSpec((TensorSpec(name, dtype or tensor.dtype, tuple(tensor.shape)),)), (tensor,))


# -- bytes ------------------------------------------------------------------------------------------------------

STRIDED = {
    "transposed": torch.arange(6.0).view(2, 3).t(),
    "every other": torch.arange(20.0)[::2],
    "inner slice": torch.arange(40.0).view(4, 10)[:, 3:6],
    "expanded": torch.arange(4.0).view(4, 1).expand(4, 5),
    "flipped": torch.arange(7.0).flip(0),
    "permuted": torch.arange(24.0).view(2, 3, 4).permute(2, 0, 1),
    "offset view": torch.arange(10.0)[3:],
    "one of many": torch.arange(10.0)[3],
}


@pytest.mark.parametrize("wire", WIRES.values(), ids=list(WIRES))
@pytest.mark.parametrize("tensor", STRIDED.values(), ids=list(STRIDED))
@pytest.mark.parametrize("capacity", [4, 12, 1024])
def test_strided_tensors_arrive_as_their_logical_view(wire: Wire, tensor: torch.Tensor, capacity: int) -> None:
    """Exporters give transposed and sliced views; a raw pointer path sends wrong values (verl-project/verl#6919)."""
    groups = [one(tensor), one(tensor, torch.bfloat16, "cast")]
    assert pack(groups, wire, capacity).decode() == expected_bytes(groups, wire)


@pytest.mark.parametrize("wire", WIRES.values(), ids=list(WIRES))
@pytest.mark.parametrize("target", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@given(rows=st.integers(0, 9), columns=st.sampled_from([1, 3, 17]), capacity=st.sampled_from([8, 100, 4096]))
def test_a_cast_while_packing_equals_a_cast_before_it(
    wire: Wire, target: torch.dtype, rows: int, columns: int, capacity: int
) -> None:
    source = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))
    groups = [one(source, target), one(source.t(), target, "t"), one(source.to(torch.bfloat16), target, "narrow")]
    assert pack(groups, wire, capacity).decode() == expected_bytes(groups, wire)


def test_packing_leaves_its_source_alone() -> None:
    source = torch.randn(5, 3)
    before = source.clone()
    pack([one(source), one(source.t(), torch.bfloat16, "t")], SPLIT, 16)
    assert torch.equal(source, before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scalars_and_empty_tensors_of_every_dtype(dtype: torch.dtype) -> None:
    groups = [one(tensor_of(dtype, ()), name="scalar"), one(tensor_of(dtype, (0, 4)), name="empty")]
    for wire in WIRES.values():
        assert pack(groups, wire, 64).decode() == expected_bytes(groups, wire)


def test_a_model_of_empty_tensors_only_is_still_an_update() -> None:
    groups = [one(torch.zeros(0, 4)), one(torch.zeros(0), name="other")]
    for wire in WIRES.values():
        assert pack(groups, wire, 64).decode() == {"w": b"", "other": b""}


# -- digests ----------------------------------------------------------------------------------------------------


def entry_bytes(packing: Packing, index: int) -> bytes:
    bucket = packing.buckets[index]
    return b"".join(bytes(bucket.memory[e.offset : e.offset + e.nbytes].numpy()) for e in bucket.layout.entries)


@given(capacity=st.sampled_from([8, 500, 1 << 20]), length=st.sampled_from([1, 129, 300_000]))
def test_digests_cover_the_entries_bytes_in_order(capacity: int, length: int) -> None:
    capacity = max(capacity, length // 3)
    tensors = {"a": tensor_of(torch.uint8, (length,)), "b": tensor_of(torch.float32, (3, 5)).t(), "c": torch.zeros(0)}
    packing = pack([group_of(tensors, [("tied", "a")])], SPLIT, capacity)
    for index, bucket in enumerate(packing.buckets):
        assert bucket.digest == xxhash.xxh3_64_intdigest(entry_bytes(packing, index))


def test_no_digest_is_taken_where_nobody_checks_one() -> None:
    groups = [one(torch.zeros(4))]
    assert all(b.digest is None for b in pack(groups, MIXED, 64).buckets)
    assert all(b.digest is None for b in pack(groups, SPLIT, 64, run=make_run(SPLIT, integrity=False)).buckets)


# -- what streams by is not what was planned ----------------------------------------------------------------------

PLANNED = [one(torch.zeros(2, 3), name="first.weight"), one(torch.zeros(4), name="second.weight")]
UNPLANNED = {
    "shape": ([PLANNED[0], Group(PLANNED[1].spec, (torch.zeros(5),))], r"second\.weight.*\[4\].*\[5\]"),
    "fewer dimensions": ([PLANNED[0], Group(PLANNED[1].spec, (torch.zeros(2, 2),))], r"second\.weight"),
    "integers for floats": ([PLANNED[0], Group(PLANNED[1].spec, (torch.zeros(4).long(),))], r"second\.weight.*int64"),
    "fp8 without scales": (
        [Group(PLANNED[0].spec, (torch.zeros(2, 3).to(torch.float8_e4m3fn),))],
        r"first\.weight.*float8",
    ),
    "unknown": ([*PLANNED, one(torch.zeros(1), name="third.weight")], r"third\.weight"),
    "renamed": ([one(torch.zeros(2, 3), name="other.weight")], r"other\.weight"),
    "missing at the end": (PLANNED[:1], r"second\.weight"),
    "nothing at all": ([], r"first\.weight"),
    "half a group": ([Group(PLANNED[0].spec, ())], r"first\.weight"),
    "twice": ([PLANNED[0], PLANNED[0], PLANNED[1]], r"first\.weight"),
}


@pytest.mark.parametrize("streamed, names", UNPLANNED.values(), ids=list(UNPLANNED))
@pytest.mark.parametrize("wire", WIRES.values(), ids=list(WIRES))
def test_a_stream_that_leaves_the_plan_is_refused_by_name(wire: Wire, streamed: list[Group], names: str) -> None:
    with pytest.raises(PlanMismatch, match=names):
        pack(PLANNED, wire, 64, streamed=streamed)


def test_a_dtype_that_no_plain_cast_reaches_is_refused() -> None:
    """A cast to fp8 without scales, or of integers, would be silent nonsense."""
    for planned, streamed in (
        (torch.float8_e4m3fn, torch.float32),
        (torch.int64, torch.float32),
        (torch.float32, torch.bool),
        (torch.uint8, torch.int8),
    ):
        group = one(torch.zeros(4).to(streamed), planned, "odd")
        with pytest.raises(PlanMismatch, match="odd"):
            pack([group], SPLIT, 64)


def test_the_order_of_groups_is_the_plans() -> None:
    """Slots are filled in the plan's order; another order would need more slots than there are."""
    groups = [one(tensor_of(torch.uint8, (40,), i), name=f"t{i}") for i in range(6)]
    with pytest.raises(PlanMismatch, match=r"t5.*t0.*due"):
        pack(groups, MIXED, 64, slots=1, streamed=groups[::-1])


# -- slots --------------------------------------------------------------------------------------------------------


def open_stage(groups: list[Group], wire: Wire, capacity: int, slots: int) -> tuple[Bucket, Run]:
    run = make_run(wire, timeouts=Timeouts(put=0.2))
    stage = Bucket(capacity, slots)
    stage.plan(tuple(g.spec for g in groups), run)
    stage.prepare(run)
    return stage, run


MANY = [one(tensor_of(torch.uint8, (64,), i), name=f"t{i}") for i in range(8)]


def test_a_slot_is_not_refilled_before_it_is_released() -> None:
    stage, run = open_stage(MANY, MIXED, 64, slots=2)
    buckets = stage(iter(MANY), run)
    held = [next(buckets), next(buckets)]
    assert held[0].slot is not held[1].slot
    contents = [raw(b.memory) for b in held]
    with pytest.raises(WaitTimeout, match=r"session\.timeouts\.put"):
        next(buckets)
    assert [raw(b.memory) for b in held] == contents == [raw(g.tensors[0]) for g in MANY[:2]]


def test_released_slots_go_round() -> None:
    stage, run = open_stage(MANY, MIXED, 64, slots=2)
    used = []
    for bucket in stage(iter(MANY), run):
        used.append(bucket.slot)
        bucket.release()
        bucket.release()  # twice is once
    assert len(used) == 8
    assert len({id(s) for s in used}) == 2
    assert [id(s) for s in used[:2]] * 4 == [id(s) for s in used]


def test_abort_wakes_whoever_waits_for_a_slot() -> None:
    stage, run = open_stage(MANY, MIXED, 64, slots=1)
    run.timeouts = Timeouts(put=30.0)
    buckets = stage(iter(MANY), run)
    next(buckets)
    raised: list[BaseException] = []

    def wait_for_a_slot() -> None:
        try:
            next(buckets)
        except RingAborted as error:
            raised.append(error)

    thread = threading.Thread(target=wait_for_a_slot)
    thread.start()
    time.sleep(0.05)
    stage.abort()
    thread.join(5.0)
    assert len(raised) == 1


def test_an_aborted_stage_serves_the_next_update() -> None:
    stage, run = open_stage(MANY, MIXED, 64, slots=1)
    next(stage(iter(MANY), run))  # never released
    stage.abort()
    stage.prepare(run)
    names = []
    for bucket in stage(iter(MANY), run):
        names += [e.spec.name for e in bucket.layout.entries]
        bucket.release()
    assert names == [f"t{i}" for i in range(8)]


def test_a_slot_in_the_making_is_free_again_when_the_stream_breaks() -> None:
    stage, run = open_stage(PLANNED, MIXED, 1024, slots=1)
    for _ in range(3):
        with pytest.raises(PlanMismatch):
            list(stage(iter(PLANNED[:1]), run))


def test_a_late_release_does_not_free_a_slot_that_is_in_use_again() -> None:
    """A bucket of a failed update may be released after the next update has begun."""
    stage, run = open_stage(MANY, MIXED, 64, slots=1)
    late = next(stage(iter(MANY), run))
    stage.prepare(run)
    buckets = stage(iter(MANY), run)
    held = next(buckets)
    late.release()
    with pytest.raises(WaitTimeout):
        next(buckets)
    assert raw(held.memory) == raw(MANY[0].tensors[0])


@given(
    widths=st.lists(st.sampled_from(DTYPES), min_size=2, max_size=12),
    capacity=st.sampled_from([8, 64, 200]),
    slots=st.integers(1, 2),
)
def test_several_dtypes_open_at_once_do_not_deadlock(widths: list[torch.dtype], capacity: int, slots: int) -> None:
    groups = [one(tensor_of(d, (5,), i), name=f"t{i}") for i, d in enumerate(widths)]
    assert pack(groups, ONE_DTYPE, capacity, slots=slots).decode() == expected_bytes(groups, ONE_DTYPE)


def test_one_dtype_at_the_start_and_the_end_only() -> None:
    """The bucket of a rare dtype stays open while many others pass."""
    rare = [one(tensor_of(torch.float32, (2,)), name="first"), one(tensor_of(torch.float32, (2,), 1), name="last")]
    groups = [rare[0], *(one(tensor_of(torch.bfloat16, (30,), i), name=f"t{i}") for i in range(9)), rare[1]]
    for slots in (1, 2):
        assert pack(groups, ONE_DTYPE, 64, slots=slots).decode() == expected_bytes(groups, ONE_DTYPE)


def test_slots_are_reused_over_updates_and_grow_only_when_they_must() -> None:
    run = make_run(MIXED)
    stage = Bucket(64, 2)
    seen: list[set[int]] = []
    for nbytes in (64, 64, 32, 500, 64):
        groups = [one(tensor_of(torch.uint8, (nbytes,), i), name=f"t{i}") for i in range(4)]
        stage.plan(tuple(g.spec for g in groups), run)
        stage.prepare(run)
        used = set()
        for bucket in stage(iter(groups), run):
            assert bucket.slot is not None
            used.add(bucket.slot.memory.data_ptr())
            bucket.release()
        seen.append(used)
    assert seen[0] == seen[1] == seen[2]
    assert seen[3] == seen[4] != seen[0]


def test_slots_are_no_larger_than_the_update() -> None:
    stage, _ = open_stage([one(torch.zeros(4, dtype=torch.uint8))], MIXED, 1 << 40, slots=2)
    assert stage._slot_bytes == 4


def test_a_rank_that_holds_no_bytes_follows_the_stream_without_memory() -> None:
    stage, run = open_stage(MANY, MIXED, 64, slots=1)
    stage.close()
    buckets = list(stage(iter(MANY), run))
    assert [b.layout.seq for b in buckets] == list(range(8))
    assert all(b.slot is None for b in buckets)


# -- settings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, nbytes",
    [("64MiB", 64 << 20), ("1GB", 10**9), ("1.5 GB", 1_500_000_000), (1048576, 1 << 20), ("7", 7), ("2kib", 2048)],
)
def test_sizes(text: int | str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "MiB", "64 MB/s", "-1", "1e6", "12 parsecs", "0x10", None, "1,5GB", "nan"])
def test_what_is_no_size_is_refused_with_the_setting(text: object) -> None:
    with pytest.raises(ConfigError, match=r"bucket\.capacity"):
        parse_size(text)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "settings, words",
    [({"capacity": 0}, "capacity"), ({"capacity": "0.4B"}, "capacity"), ({"slots": 0}, "slots")],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Bucket(**settings)


def test_the_same_name_twice_is_refused_when_planned() -> None:
    with pytest.raises(PlanMismatch, match="comes twice"):
        Bucket(64).plan((GroupSpec((spec("a"),)), GroupSpec((spec("a"),))), make_run())
