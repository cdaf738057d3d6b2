"""The plan: how tensors are cut into buckets, and how a plan travels."""

from __future__ import annotations

import copy
import json
from itertools import permutations
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.chains import (
    DTYPES,
    FOLDER,
    MIXED,
    ONE_DTYPE,
    SPLIT,
    WIRES,
    expected_bytes,
    group_of,
    pack,
    spec,
    tensor_of,
)

from stages.bucket import make_plan
from stages.errors import PlanMismatch
from stages.flow import BucketLayout, Entry, Group, GroupSpec, Plan, TensorSpec, plan_from_json, plan_to_json
from stages.run import Wire

shapes = st.one_of(
    st.just(()),
    st.tuples(st.sampled_from([0, 1, 3, 5, 7, 64, 127, 257, 1023])),
    st.tuples(st.integers(0, 5), st.sampled_from([1, 3, 31, 129])),
)


@st.composite
def streams(draw: st.DrawFn, most: int = 8) -> list[Group]:
    """Groups of one to three tensors of any dtype, some with a tied name."""
    groups = []
    for g in range(draw(st.integers(1, most))):
        tensors = {}
        for t in range(draw(st.integers(1, 3))):
            dtype, shape = draw(st.sampled_from(DTYPES)), draw(shapes)
            tensors[f"layers.{g}.t{t}.weight"] = tensor_of(dtype, shape, seed=17 * g + t)
        tied = draw(st.sampled_from([None, *tensors]))
        groups.append(group_of(tensors, [(f"tied.{g}", tied)] if tied else []))
    return groups


def specs_of(groups: list[Group]) -> tuple[GroupSpec, ...]:
    return tuple(g.spec for g in groups)


def sizes(plan: Plan) -> list[int]:
    return [b.nbytes for b in plan.buckets]


# -- bytes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wire", WIRES.values(), ids=list(WIRES))
@given(groups=streams(), capacity=st.sampled_from([1, 7, 64, 300, 1000, 4096, 1 << 20]), slots=st.integers(1, 3))
@settings(max_examples=25)
def test_whatever_is_packed_comes_back_bit_equal(wire: Wire, groups: list[Group], capacity: int, slots: int) -> None:
    packing = pack(groups, wire, capacity, slots=slots)
    assert packing.decode() == expected_bytes(groups, wire)
    assert [p.last for p in packing.buckets] == [False] * (len(packing.buckets) - 1) + [True]


@pytest.mark.parametrize("wire", WIRES.values(), ids=list(WIRES))
def test_every_order_of_narrow_and_wide_dtypes_round_trips(wire: Wire) -> None:
    """A narrow tensor of odd length leaves the next wider one misaligned (verl-project/verl#7318)."""
    for order in permutations((torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.int64)):
        for length in (1, 3, 5):
            groups = [group_of({f"t{i}": tensor_of(d, (length,), i) for i, d in enumerate(order)})]
            assert pack(groups, wire, 4096).decode() == expected_bytes(groups, wire)


@given(groups=streams(), capacity=st.integers(1, 3000))
@settings(max_examples=30)
def test_entries_start_where_their_items_may_be_viewed(groups: list[Group], capacity: int) -> None:
    for wire in WIRES.values():
        for bucket in make_plan(specs_of(groups), capacity, wire).buckets:
            for e in bucket.entries:
                assert e.offset % e.spec.dtype.itemsize == 0
                assert e.offset % wire.align == 0
                assert e.start % e.spec.dtype.itemsize == 0
                assert e.nbytes % e.spec.dtype.itemsize == 0


@given(groups=streams())
def test_an_unpadded_wire_has_no_gap(groups: list[Group]) -> None:
    """Engines add up sizes by themselves: one byte of padding and they read garbage."""
    for wire in (MIXED, ONE_DTYPE, FOLDER):
        for bucket in make_plan(specs_of(groups), 500, wire).buckets:
            end = 0
            for e in bucket.entries:
                assert e.offset == end
                end += e.nbytes
            assert end == bucket.nbytes


# -- cuts -------------------------------------------------------------------------------------------------------


@given(groups=streams(), capacity=st.integers(1, 3000))
@settings(max_examples=30)
def test_a_bucket_exceeds_its_capacity_only_when_one_group_alone_does(groups: list[Group], capacity: int) -> None:
    """A limit checked after adding lets a bucket reach twice its size (vllm-project/vllm#37476)."""
    group_index = {t.name: i for i, g in enumerate(groups) for t in g.spec.tensors}
    group_index |= {a: group_index[n] for g in groups for a, n in g.spec.aliases}
    for wire in (MIXED, ONE_DTYPE, FOLDER):
        for bucket in make_plan(specs_of(groups), capacity, wire).buckets:
            inside = {group_index[e.spec.name] for e in bucket.entries if e.nbytes}
            assert bucket.nbytes <= capacity or len(inside) == 1


@given(groups=streams(), capacity=st.integers(8, 3000))
@settings(max_examples=30)
def test_where_tensors_may_be_cut_no_bucket_exceeds_its_capacity(groups: list[Group], capacity: int) -> None:
    assert all(size <= capacity for size in sizes(make_plan(specs_of(groups), capacity, SPLIT)))


def test_a_tensor_that_does_not_fit_any_more_opens_the_next_bucket() -> None:
    groups = tuple(GroupSpec((spec(f"t{i}", torch.uint8, (n,)),)) for i, n in enumerate((99, 99, 1, 100, 101, 1)))
    assert sizes(make_plan(groups, 100, MIXED)) == [99, 100, 100, 101, 1]


def test_buckets_are_counted_full_not_endless() -> None:
    """A running size that is never incremented makes one giant bucket (NovaSky-AI/SkyRL#161)."""
    groups = tuple(GroupSpec((spec(f"t{i}", torch.uint8, (10,)),)) for i in range(100))
    for wire in (MIXED, ONE_DTYPE):
        assert sizes(make_plan(groups, 100, wire)) == [100] * 10
    assert len(make_plan(groups, 2560, SPLIT).buckets) == 10


@pytest.mark.parametrize("capacity", [1, 27, 1 << 30], ids=["one tensor", "7 bytes over a pair", "unlimited"])
@pytest.mark.parametrize("wire", [MIXED, FOLDER], ids=["mixed", "folder"])
def test_a_fused_set_never_straddles_a_bucket(wire: Wire, capacity: int) -> None:
    """Engines that fuse two tensors within one load call keep the old half otherwise (sgl-project/sglang#14178)."""
    groups = tuple(
        GroupSpec((spec(f"layers.{i}.q_a_proj.weight", shape=(5,)), spec(f"layers.{i}.kv_a_proj.weight", shape=(5,))))
        for i in range(4)
    )
    fused: dict[str, str] = {}
    for bucket in make_plan(groups, capacity, wire).buckets:
        together = {e.spec.name for e in bucket.entries}
        for group in groups:
            pair = {t.name for t in group.tensors}
            if pair <= together:
                fused[group.tensors[0].name] = "whole"
    assert len(fused) == len(groups)


def test_a_scale_of_another_dtype_travels_with_its_weight_even_when_both_are_oversize() -> None:
    """verl-project/verl#5952: a tensor larger than the bucket must not lose its companion."""
    pair = GroupSpec((spec("w.weight", torch.float8_e4m3fn, (5000,)), spec("w.weight_scale_inv", torch.float32, (3,))))
    small = [GroupSpec((spec(f"s{i}", torch.uint8, (900,)),)) for i in range(2)]
    plan = make_plan((small[0], pair, small[1]), 1024, MIXED)
    names = [[e.spec.name for e in b.entries] for b in plan.buckets]
    assert names == [["s0"], ["w.weight_scale_inv", "w.weight"], ["s1"]]
    assert plan.largest_bucket == 5012


@pytest.mark.parametrize("nbytes", [1020, 1024, 1025, 5000])
@pytest.mark.parametrize("wire", WIRES.values(), ids=list(WIRES))
def test_an_oversize_tensor_is_cut_or_gets_a_slot_of_its_own(wire: Wire, nbytes: int) -> None:
    """Never an error in the middle of an update (verl-project/verl#5952)."""
    groups = [group_of({n: tensor_of(torch.uint8, (size,))}) for n, size in (("a", 10), ("big", nbytes), ("b", 10))]
    packing = pack(groups, wire, 1024)
    assert packing.decode() == expected_bytes(groups, wire)
    assert packing.plan.largest_bucket <= max(1024, nbytes)
    if wire.split:
        assert packing.plan.largest_bucket <= 1024


def test_one_dtype_per_bucket_where_dtypes_may_not_mix() -> None:
    groups = tuple(
        GroupSpec((spec(f"{i}.weight", torch.float8_e4m3fn, (40,)), spec(f"{i}.scale", torch.float32, (3,))))
        for i in range(10)
    )
    plan = make_plan(groups, 100, ONE_DTYPE)
    assert all(len({e.spec.dtype for e in b.entries}) == 1 for b in plan.buckets)
    assert {t.name for t in plan.tensors} == {t.name for g in groups for t in g.tensors}


def test_two_tensors_of_one_name_are_refused() -> None:
    """Keys of different blocks collide and overwrite one another (verl-project/verl-omni#315)."""
    twice = (GroupSpec((spec("proj.weight"),)), GroupSpec((spec("proj.weight"),)))
    with pytest.raises(PlanMismatch, match=r"proj\.weight comes twice"):
        make_plan(twice, 100, MIXED)
    tied_twice = (GroupSpec((spec("a"),), (("b", "a"),)), GroupSpec((spec("b"),)))
    with pytest.raises(PlanMismatch, match="b comes twice"):
        make_plan(tied_twice, 100, MIXED)


def test_tied_names_are_sent_or_left_out_as_the_wire_says() -> None:
    groups = (GroupSpec((spec("embed.weight"),), (("lm_head.weight", "embed.weight"),)),)
    assert [t.name for t in make_plan(groups, 100, MIXED).tensors] == ["embed.weight"]
    assert [t.name for t in make_plan(groups, 100, FOLDER).tensors] == ["embed.weight", "lm_head.weight"]


# -- identity ---------------------------------------------------------------------------------------------------


@given(groups=streams(), capacity=st.integers(1, 3000))
def test_a_plan_is_a_pure_function(groups: list[Group], capacity: int) -> None:
    for wire in WIRES.values():
        one, two = (make_plan(specs_of(groups), capacity, wire) for _ in range(2))
        assert one == two
        assert one.hash == two.hash


def plan_of(*tensors: TensorSpec, capacity: int = 64, wire: Wire = SPLIT) -> Plan:
    return make_plan(tuple(GroupSpec((t,)) for t in tensors), capacity, wire)


def test_any_change_changes_the_hash() -> None:
    base = (spec("a", torch.float32, (6,)), spec("b", torch.bfloat16, (2, 3)))
    variants = {
        "name": plan_of(spec("c", torch.float32, (6,)), base[1]),
        "dtype": plan_of(spec("a", torch.int32, (6,)), base[1]),
        "shape": plan_of(spec("a", torch.float32, (2, 3)), base[1]),
        "order": plan_of(base[1], base[0]),
        "cut": plan_of(*base, capacity=16),
        "alignment": plan_of(*base, wire=FOLDER, capacity=1024),
        "fewer": plan_of(base[0]),
        "same": plan_of(*base),
    }
    hashes = {name: plan.hash for name, plan in variants.items()}
    assert hashes.pop("same") == plan_of(*base).hash
    assert len({*hashes.values(), plan_of(*base).hash}) == len(hashes) + 1


def test_the_size_of_a_bucket_is_part_of_the_hash() -> None:
    entry = Entry(spec("a", torch.uint8, (4,)), 0, 4)
    groups = (GroupSpec((entry.spec,)),)
    plans = [Plan(groups, (BucketLayout(0, (entry,), size),)) for size in (4, 8)]
    plans.append(Plan(groups, (BucketLayout(0, (entry,), 4), BucketLayout(1, (), 0))))
    assert len({p.hash for p in plans}) == 3


def test_names_cannot_imitate_one_another_in_the_hash() -> None:
    evil = "a uint8 (4,) 0 4 0\n0 b"
    one = plan_of(spec(evil, torch.uint8, (4,)))
    two = plan_of(spec("a", torch.uint8, (4,)), spec("b", torch.uint8, (4,)))
    assert one.hash != two.hash


@given(groups=streams(), capacity=st.integers(1, 3000), wire=st.sampled_from(list(WIRES.values())))
@settings(max_examples=30)
def test_a_plan_survives_its_json(groups: list[Group], capacity: int, wire: Wire) -> None:
    plan = make_plan(specs_of(groups), capacity, wire)
    back = plan_from_json(json.loads(json.dumps(plan_to_json(plan))))
    assert back.buckets == plan.buckets
    assert back.tensors == plan.tensors
    assert back.hash == plan.hash


# -- hostile plans ----------------------------------------------------------------------------------------------

GOOD = plan_to_json(plan_of(spec("a", torch.float32, (30,)), spec("b", torch.bfloat16, (2, 3))))


def forged(change: Any) -> dict[str, Any]:
    """A plan with a change and the hash that goes with it, as a sender that means harm would make it."""
    data = copy.deepcopy(GOOD)
    change(data)
    try:
        plan_from_json(data | {"hash": ""})
    except PlanMismatch as error:
        words = str(error).split()
        if "hash" in words:
            data["hash"] = words[words.index("is") + 1].rstrip(",")
    return data


HOSTILE = {
    "negative offset": lambda d: d["buckets"][0][1][0].__setitem__(1, -4),
    "beyond the bucket": lambda d: d["buckets"][0][1][0].__setitem__(1, 1 << 40),
    "negative length": lambda d: d["buckets"][0][1][0].__setitem__(2, -4),
    "beyond the tensor": lambda d: d["buckets"][0][1][0].__setitem__(3, 4096),
    "negative start": lambda d: d["buckets"][0][1][0].__setitem__(3, -4),
    "negative index": lambda d: d["buckets"][0][1][0].__setitem__(0, -1),
    "unknown index": lambda d: d["buckets"][0][1][0].__setitem__(0, 99),
    "negative dimension": lambda d: d["tensors"][0].__setitem__(2, [-5, -6]),
    "negative bucket": lambda d: d["buckets"].append([-1, []]),
    "infinite size": lambda d: d["buckets"][0].__setitem__(0, float("inf")),
    "not a size": lambda d: d["buckets"][0].__setitem__(0, float("nan")),
    "half a byte": lambda d: d["buckets"][0][1][0].__setitem__(1, 0.5),
    "not a dtype": lambda d: d["tensors"][0].__setitem__(1, "Tensor"),
    "dtype of no text": lambda d: d["tensors"][0].__setitem__(1, ["float32"]),
    "name of no text": lambda d: d["tensors"][0].__setitem__(0, {"a": 1}),
    "a name twice": lambda d: d["tensors"][1].__setitem__(0, "a"),
    "no tensors": lambda d: d.pop("tensors"),
    "tensors of no list": lambda d: d.__setitem__("tensors", 3),
    "short entry": lambda d: d["buckets"][0][1][0].pop(),
    "missing piece": lambda d: d["buckets"].pop(),
    "second piece first": lambda d: d["buckets"].reverse(),
    "piece twice": lambda d: d["buckets"].append(copy.deepcopy(d["buckets"][0])),
    "tensor without bytes": lambda d: d["tensors"].append(["c", "float32", [3]]),
    "half an item": lambda d: d["tensors"][0].__setitem__(1, "complex128"),
}


@pytest.mark.parametrize("change", HOSTILE.values(), ids=list(HOSTILE))
def test_a_hostile_plan_is_refused(change: Any) -> None:
    with pytest.raises(PlanMismatch):
        plan_from_json(forged(change))


def test_the_unchanged_plan_is_accepted() -> None:
    assert plan_from_json(forged(lambda d: None)).hash == GOOD["hash"]


def test_a_plan_of_another_hash_is_refused_with_both() -> None:
    with pytest.raises(PlanMismatch, match=GOOD["hash"]):
        plan_from_json(GOOD | {"hash": "0" * 32})


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)


@given(data=st.one_of(json_values, st.fixed_dictionaries(dict.fromkeys(("hash", "tensors", "buckets"), json_values))))
@example(data={"hash": "", "tensors": [["a", "float32", [float("inf")]]], "buckets": []})
@settings(max_examples=100)
def test_nonsense_only_ever_raises_plan_mismatch(data: Any) -> None:
    with pytest.raises(PlanMismatch):
        plan_from_json(data)


@given(path=st.lists(st.integers(0, 9), max_size=5), value=json_values)
@settings(max_examples=100)
def test_a_plan_with_one_value_replaced_is_refused_or_means_the_same(path: list[int], value: Any) -> None:
    data = copy.deepcopy(GOOD)
    node: Any = data
    for step in path:
        keys = list(node) if isinstance(node, dict) else list(range(len(node))) if isinstance(node, list) else []
        if not keys:
            break
        key = keys[step % len(keys)]
        if not isinstance(node[key], dict | list) or step == path[-1]:
            node[key] = value
            break
        node = node[key]
    try:
        plan = plan_from_json(data)
    except PlanMismatch:
        return
    assert plan.hash == GOOD["hash"]
