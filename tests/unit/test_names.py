"""Names: what wrappers add goes, what engines fuse stays together, layers come in order."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.errors import PlanMismatch
from stages.gather.names import WRAPPERS, fusion_key, match_dtype, stream_order, strip_wrappers

PLAIN = ["model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "lm_head.weight"]


@given(data=st.data())
def test_wrapper_segments_go_wherever_they_are(data: st.DataObject) -> None:
    """FSDP leaves its segment at every nesting level (pytorch/pytorch#111648)."""
    wrapped = {}
    for name in PLAIN:
        segments = name.split(".")
        for _ in range(data.draw(st.integers(0, 3))):
            at = data.draw(st.integers(0, len(segments) - 1))
            segments.insert(at, data.draw(st.sampled_from(sorted(WRAPPERS))))
        wrapped[".".join(segments)] = name
    assert strip_wrappers(wrapped) == wrapped


@pytest.mark.parametrize("order", list(permutations(["module", "_orig_mod", "_fsdp_wrapped_module"])), ids=".".join)
def test_the_root_of_data_parallel_goes_in_any_order(order: tuple[str, ...]) -> None:
    prefix = ".".join(order)
    assert strip_wrappers([f"{prefix}.{n}" for n in PLAIN]) == {f"{prefix}.{n}": n for n in PLAIN}


@pytest.mark.parametrize(
    "name", ["module_list.0.weight", "my_module.x", "a._orig_mod_x.b", "layers.module.weight", "_orig"]
)
def test_names_that_only_look_alike_stay(name: str) -> None:
    assert strip_wrappers([name, "other.weight"])[name] == name


def test_module_stays_where_it_is_not_the_root_of_all() -> None:
    assert strip_wrappers(["module.a", "b"]) == {"module.a": "module.a", "b": "b"}


def test_two_names_that_become_one_are_refused_with_both() -> None:
    with pytest.raises(PlanMismatch, match=r"a\.w and a\._orig_mod\.w are both a\.w"):
        strip_wrappers(["a.w", "a._orig_mod.w"])


FUSED = [
    ["l.0.self_attn.q_proj.weight", "l.0.self_attn.k_proj.weight", "l.0.self_attn.v_proj.bias"],
    ["l.0.mlp.gate_proj.weight", "l.0.mlp.up_proj.weight"],
    ["l.0.mlp.experts.3.gate_proj.weight", "l.0.mlp.experts.3.up_proj.weight_scale_inv"],
    ["l.0.self_attn.q_a_proj.weight", "l.0.self_attn.kv_a_proj_with_mqa.weight_scale_inv"],
    ["l.0.mlp.down_proj.weight", "l.0.mlp.down_proj.weight_scale_inv", "l.0.mlp.down_proj.bias"],
    ["l.0.x.weight_packed", "l.0.x.weight_scale", "l.0.x.weight_shape", "l.0.x.weight_global_scale"],
]


@pytest.mark.parametrize("names", FUSED, ids=lambda names: names[0])
def test_what_engines_load_together_shares_a_key(names: list[str]) -> None:
    assert len({fusion_key(n) for n in names}) == 1


def test_what_they_do_not_stays_apart() -> None:
    keys = {
        fusion_key(n)
        for n in [names[0] for names in FUSED]
        + [
            "l.1.self_attn.q_proj.weight",
            "l.0.cross_attn.q_proj.weight",
            "l.0.self_attn.o_proj.weight",
            "l.0.mlp.gate.weight",
            "l.0.mlp.gate.e_score_correction_bias",
            "l.0.mlp.experts.4.gate_proj.weight",
            "l.0.mlp.shared_experts.gate_proj.weight",
            "l.0.input_layernorm.weight",
        ]
    }
    assert len(keys) == len(FUSED) + 8


def test_layers_come_by_number_between_embedding_and_head() -> None:
    names = [
        "lm_head.weight",
        "model.layers.10.a",
        "model.norm.weight",
        "model.layers.2.b",
        "model.embed_tokens.weight",
    ]
    assert sorted(names, key=stream_order) == [names[4], names[3], names[1], names[0], names[2]]


def test_routed_experts_come_behind_everything_dense() -> None:
    """Under expert parallelism they have other owners, and are most of the bytes: batches of one kind only."""
    names = [
        "model.layers.0.mlp.experts.1.up_proj.weight",
        "model.layers.1.mlp.shared_experts.up_proj.weight",
        "model.layers.1.mlp.experts.0.up_proj.weight",
        "lm_head.weight",
        "model.layers.0.mlp.experts.0.down_proj.weight",
        "model.layers.0.mlp.gate.weight",
    ]
    assert sorted(names, key=stream_order) == [names[5], names[1], names[3], names[0], names[4], names[2]]


def test_the_first_pattern_that_matches_the_whole_name_wins() -> None:
    patterns = {"*.gate.weight": "float32", "*weight": "bfloat16"}
    assert match_dtype("l.0.mlp.gate.weight", patterns) == "float32"
    assert match_dtype("l.0.mlp.gate_proj.weight", patterns) == "bfloat16"
    assert match_dtype("l.0.mlp.gate.weight.x", patterns) is None
