"""Which modules are quantized: whole segments, the engine's own lists, fused sets wholly or not at all."""

from __future__ import annotations

import pytest

from stages.errors import ConfigError
from stages.quantize.modules import Rules, always_kept, check_whole, matches

LAYER = "model.layers.1."


@pytest.mark.parametrize(
    "module",
    [
        *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "self_attn.q_a_proj"),
        *("self_attn.kv_a_proj_with_mqa", "self_attn.q_b_proj", "self_attn.kv_b_proj", "self_attn.indexer.wq_b"),
        *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "mlp.experts.0.gate_proj", "mlp.shared_experts.up_proj"),
        *("linear_attn.in_proj_qkvz", "linear_attn.out_proj", "mlp.gate_up_proj"),
    ],
)
def test_projections_are_quantized(module: str) -> None:
    assert Rules().wants(LAYER + module)


@pytest.mark.parametrize(
    "module",
    [
        *("model.embed_tokens", "lm_head", "model.norm", "language_model.lm_head", "transformer.wte"),
        *(LAYER + m for m in ("mlp.gate", "mlp.router", "block_sparse_moe.gate", "mlp.shared_expert_gate")),
        *(LAYER + m for m in ("input_layernorm", "self_attn.q_norm", "self_attn.kv_a_layernorm")),
        *(
            LAYER + m
            for m in ("eh_proj", "self_attn.indexer.weights_proj", "linear_attn.conv1d", "linear_attn.in_proj_a")
        ),
        *("visual.blocks.0.attn.qkv", "model.vision_tower.layers.0.q_proj", "multi_modal_projector.linear_1"),
    ],
)
def test_the_rest_stays_as_it_is(module: str) -> None:
    assert always_kept(module)
    assert not Rules().wants(module)


@pytest.mark.parametrize(
    ("rule", "module", "inside", "expected"),
    [
        ("lm_head", "lm_head", False, True),
        ("lm_head", "model.lm_head", False, False),
        ("lm_head", "model.lm_head", True, True),
        ("mlp.gate", "model.layers.0.mlp.gate", True, True),
        ("mlp.gate", "model.layers.0.mlp.gate_proj", True, False),
        ("gate", "model.layers.0.mlp.gate_up_proj", True, False),
        ("model.layers.1", "model.layers.1.mlp.up_proj", False, True),
        ("model.layers.1", "model.layers.10.mlp.up_proj", False, False),
        ("model.layers.1.", "model.layers.1.mlp.up_proj", False, True),
        ("layers.1.mlp", "model.layers.1.mlp.up_proj", False, False),
        ("layers.1.mlp", "model.layers.1.mlp.up_proj", True, True),
        ("re:.*mlp.gate$", "model.layers.0.mlp.gate", False, True),
        ("re:.*mlp.gate$", "model.layers.0.mlp.gate_proj", False, False),
        ("re:mlp", "model.layers.0.mlp.up_proj", True, False),  # from the start of the name
        (r"re:model\.layers\.(0|2)\..*", "model.layers.2.mlp.up_proj", False, True),
        (r"re:model\.layers\.(0|2)\..*", "model.layers.1.mlp.up_proj", False, False),
    ],
)
def test_a_rule_matches_whole_segments(rule: str, module: str, inside: bool, expected: bool) -> None:
    assert matches(rule, module, inside=inside) is expected


def test_lists_may_name_what_the_engine_fuses() -> None:
    rules = Rules.hf(["model.layers.0.self_attn.qkv_proj", "model.layers.1.mlp.gate_up_proj"])
    assert not any(rules.wants(f"model.layers.0.self_attn.{m}_proj") for m in "qkv")
    assert not any(rules.wants(f"model.layers.1.mlp.{m}_proj") for m in ("gate", "up"))
    assert rules.wants("model.layers.0.self_attn.o_proj")


def test_compressed_tensors_ignores_exact_names_and_expressions_and_not_runs_of_segments() -> None:
    rules = Rules.compressed(["mlp.up_proj", "re:.*down_proj", "model.layers.3"], ["Linear"])
    assert rules.wants("model.layers.0.mlp.up_proj")
    assert not rules.wants("model.layers.0.mlp.down_proj")
    assert not rules.wants("model.layers.3.mlp.up_proj")


def test_targets_that_are_names_leave_everything_else_alone() -> None:
    rules = Rules.compressed([], ["re:.*mlp.*", "model.layers.0.self_attn.o_proj"])
    assert rules.wants("model.layers.4.mlp.up_proj")
    assert rules.wants("model.layers.0.self_attn.o_proj")
    assert not rules.wants("model.layers.1.self_attn.o_proj")


def test_a_class_of_modules_that_names_do_not_tell_is_refused() -> None:
    with pytest.raises(ConfigError, match="targets the class 'Attention'"):
        Rules.compressed([], ["Attention"])


def test_a_set_that_engines_fuse_is_quantized_wholly_or_not_at_all() -> None:
    both = [("a.mlp.gate_proj", True), ("a.mlp.up_proj", True), ("a.mlp.down_proj", False), ("b.mlp.up_proj", False)]
    check_whole(both)
    with pytest.raises(ConfigError, match=r"engines fuse \['a.self_attn.q_proj'\] with \['a.self_attn.v_proj'\]"):
        check_whole([("a.self_attn.q_proj", True), ("a.self_attn.v_proj", False)])
