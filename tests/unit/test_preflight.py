"""Preflight: what engines would answer with success and wrong output is refused, all of it at once, before a byte moves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.chains import FOLDER, MIXED

from pipelines.preflight import check
from stages.bucket import make_plan
from stages.errors import PreflightError
from stages.flow import Plan, TensorSpec
from stages.gather import group_specs
from stages.run import Wire

TEXT = ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"] + [
    f"model.layers.{i}.{part}.weight"
    for i in range(3)
    for part in (
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj",
        "input_layernorm",
    )
]
VISION = [f"visual.blocks.{i}.mlp.{part}.weight" for i in range(3) for part in ("gate_proj", "up_proj", "down_proj")]


def specs(names: list[str], dtype: torch.dtype = torch.bfloat16) -> list[TensorSpec]:
    return [TensorSpec(n, dtype, (4, 4)) for n in names]


def planned(tensors: list[TensorSpec], aliases: list[tuple[str, str]] | None = None, wire: Wire = MIXED) -> Plan:
    return make_plan(tuple(group_specs(tensors, aliases or [])), 1024, wire)


def expected(tensors: list[TensorSpec]) -> dict[str, TensorSpec]:
    return {t.name: t for t in tensors}


def refusal(plan: Plan, engine: list[TensorSpec], config: dict[str, Any] | None = None) -> PreflightError:
    with pytest.raises(PreflightError) as caught:
        check(plan, expected(engine), config or {}, "http://e:1")
    assert caught.value.engine == "http://e:1"
    assert "nothing was touched" in str(caught.value)
    return caught.value


def test_what_fits_passes() -> None:
    check(planned(specs(TEXT)), expected(specs(TEXT)), {}, "e")


# -- names ----------------------------------------------------------------------------------------------------------


def test_unknown_and_missing_names_are_all_listed() -> None:
    """Unmapped and unreached names, both: with relaxed rules a wrong prefix on most passes (sgl-project/sglang#9663)."""
    sent = [n for n in TEXT if "layers.1" not in n] + ["extra.a", "extra.b"]
    error = refusal(planned(specs(sent)), specs(TEXT))
    assert {p for p in error.problems if "unknown" in p} == {"unknown name: extra.a", "unknown name: extra.b"}
    assert {p for p in error.problems if "missing" in p} == {f"missing: {n}" for n in TEXT if "layers.1" in n}


def test_one_good_name_among_many_unknown_ones_does_not_pass() -> None:
    sent = [TEXT[0], *(f"wrong.{n}" for n in TEXT[1:])]
    assert len([p for p in refusal(planned(specs(sent)), specs(TEXT)).problems if "unknown" in p]) == len(TEXT) - 1


@pytest.mark.parametrize(
    "ours, theirs, hint",
    [
        # the text tower of a multimodal engine, and the other way round (huggingface/trl#6028)
        (TEXT, [f"language_model.{n}" for n in TEXT] + VISION, ("nothing", "'language_model.'")),
        ([f"language_model.{n}" for n in TEXT] + VISION, TEXT, ("'language_model.'", "nothing")),
        (
            [n for n in TEXT if n.startswith("model.")],
            [f"model.language_{n}" for n in TEXT],
            ("'model.'", "'model.language_model.'"),
        ),
        (VISION + [f"base.{n}" for n in TEXT], TEXT, ("'base.'", "nothing")),
        (["a.weight"], ["b.a.weight"], ("nothing", "'b.'")),
    ],
)
def test_one_change_of_prefix_that_explains_most_is_hinted_at(
    ours: list[str], theirs: list[str], hint: tuple[str, str]
) -> None:
    text = str(refusal(planned(specs(ours)), specs(theirs)))
    assert f"names here begin with {hint[0]}, the engine's begin with {hint[1]}; add a Rename stage" in text


@pytest.mark.parametrize("ours, theirs", [(["a.x"], ["b.y"]), (TEXT[:5], TEXT[5:]), (["extra"], [])])
def test_no_hint_where_no_prefix_explains_anything(ours: list[str], theirs: list[str]) -> None:
    common = ["same.weight"]
    assert "hint" not in str(refusal(planned(specs(ours + common)), specs(theirs + common)))


def test_names_that_engines_skip_by_design_are_no_mismatch() -> None:
    rotary = ["model.layers.0.self_attn.rotary_emb.inv_freq"]
    check(planned(specs(TEXT + rotary)), expected(specs(TEXT)), {}, "e")
    check(planned(specs(TEXT)), expected(specs(TEXT + rotary)), {}, "e")


def test_many_mismatches_are_counted_and_the_text_is_cut() -> None:
    names = [f"t{i}" for i in range(1000)]
    error = refusal(planned(specs(names)), specs(["other"]))
    assert len(error.problems) == 1001
    assert "(1001 mismatches)" in str(error)
    assert "... and 961 more" in str(error)
    assert len(str(error).splitlines()) < 50


def test_thousands_of_names_do_not_take_minutes() -> None:
    experts = [f"model.layers.{i}.mlp.experts.{e}.up_proj.weight" for i in range(10) for e in range(64)]
    error = refusal(planned(specs(experts)), specs([f"language_model.{n}" for n in experts]))
    assert "'language_model.'" in str(error)


# -- shapes and dtypes ------------------------------------------------------------------------------------------------


def test_shapes_and_dtypes_are_compared_one_by_one() -> None:
    ours = [
        TensorSpec("a", torch.float32, (2, 3)),
        TensorSpec("b", torch.bfloat16, (4,)),
        TensorSpec("c", torch.int64, ()),
    ]
    theirs = [
        TensorSpec("a", torch.float32, (3, 2)),
        TensorSpec("b", torch.float16, (4,)),
        TensorSpec("c", torch.int64, (1,)),
    ]
    error = refusal(planned(ours), theirs)
    assert {p.split(" (")[0] for p in error.problems} == {
        "shape: a is [2, 3], the engine has [3, 2]",
        "dtype: b is bfloat16, the engine has float16",
        "shape: c is [], the engine has [1]",
    }


def test_a_quantized_engine_fed_bf16_is_refused_with_what_to_do() -> None:
    """bf16 into an fp8 model is cast with stale scales: garbage, and success."""
    name = "model.layers.0.mlp.down_proj.weight"
    theirs = [TensorSpec(name, torch.float8_e4m3fn, (4, 4)), TensorSpec(f"{name}_scale_inv", torch.float32, (1, 1))]
    error = refusal(planned(specs([name])), theirs, {"quantization_config": {"quant_method": "fp8"}})
    assert f"missing: {name}_scale_inv" in error.problems
    assert "quantized with fp8; use quantize=auto" in str(error)


# -- sets and ties ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "left_out, named",
    [
        ("self_attn.k_proj", "self_attn.k_proj"),
        ("mlp.up_proj", "mlp.up_proj"),
    ],
)
def test_half_of_a_fused_set_is_refused(left_out: str, named: str) -> None:
    """Only q_proj sent: 200, and the rest of qkv is uninitialised memory."""
    sent = [n for n in TEXT if f"layers.1.{left_out}" not in n]
    problems = refusal(planned(specs(sent)), specs(TEXT)).problems
    (half,) = [p for p in problems if p.startswith("half of a fused set")]
    assert f"without ['model.layers.1.{named}.weight']" in half


TIE = [("lm_head.weight", "model.embed_tokens.weight")]
UNTIED = [n for n in TEXT if n != "lm_head.weight"]


@pytest.mark.parametrize(
    "config", [{"tie_word_embeddings": True}, {"text_config": {"tie_word_embeddings": True}}], ids=str
)
@pytest.mark.parametrize("wire", [MIXED, FOLDER], ids=["sent once", "sent twice"])
@pytest.mark.parametrize("stored", [TEXT, UNTIED], ids=["stored", "not stored"])
def test_a_tied_head_may_be_sent_or_left_out_where_the_engine_ties_it(
    config: dict[str, Any], wire: Wire, stored: list[str]
) -> None:
    check(planned(specs(UNTIED), TIE, wire), expected(specs(stored)), config, "e")
    check(planned(specs(UNTIED)), expected(specs(stored)), config, "e")


def test_a_head_that_is_tied_here_only_would_keep_its_old_values() -> None:
    error = refusal(planned(specs(UNTIED), TIE), specs(TEXT))
    assert error.problems == [
        "tied here, a tensor of its own in the engine, which would keep the old values: lm_head.weight"
    ]
    check(planned(specs(UNTIED), TIE, FOLDER), expected(specs(TEXT)), {}, "e")  # there it travels as one of its own


def test_a_head_that_is_missing_is_missing() -> None:
    assert refusal(planned(specs(UNTIED)), specs(TEXT)).problems == ["missing: lm_head.weight"]
