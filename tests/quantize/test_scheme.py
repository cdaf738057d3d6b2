"""quantize=auto: the format, its sizes and its modules out of the engine's config.json, or an error that says why not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from stages.errors import ConfigError
from stages.quantize.scheme import scheme_of

from .made import CLASSES, FP8, WEIGHT, group_of, parts_of, quantize, stage_of, write_config


def compressed(weights: dict[str, Any], *, targets: tuple[str, ...] = ("Linear",), **more: Any) -> dict[str, Any]:
    group = {"targets": [*targets], "weights": weights, "input_activations": more.pop("inputs", None)}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, **more}


F8 = {"type": "float", "num_bits": 8, "symmetric": True}
F4 = {"type": "float", "num_bits": 4, "strategy": "tensor_group", "group_size": 16, "symmetric": True}
I4 = {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": True}
MX = {**F8, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
DYNAMIC = {"type": "float", "num_bits": 8, "strategy": "token", "dynamic": True}

KNOWN: list[tuple[dict[str, Any], str, list[tuple[str, torch.dtype, tuple[int, ...]]]]] = [
    (FP8, "fp8_block", [("weight", torch.float8_e4m3fn, (130, 256)), ("weight_scale_inv", torch.float32, (2, 2))]),
    (
        {**FP8, "weight_block_size": [64, 128]},
        "fp8_block",
        [("weight", torch.float8_e4m3fn, (130, 256)), ("weight_scale_inv", torch.float32, (3, 2))],
    ),
    (
        {**FP8, "scale_fmt": "ue8m0"},
        "fp8_block_ue8m0",
        [("weight", torch.float8_e4m3fn, (130, 256)), ("weight_scale_inv", torch.float32, (2, 2))],
    ),
    (
        {k: v for k, v in FP8.items() if k != "weight_block_size"},
        "fp8_tensor",
        [("weight", torch.float8_e4m3fn, (130, 256)), ("weight_scale", torch.float32, (1,))],
    ),
    (
        {"quant_method": "mxfp8", "weight_block_size": [1, 32], "activation_scheme": "dynamic"},
        "mxfp8",
        [("weight", torch.float8_e4m3fn, (130, 256)), ("weight_scale_inv", torch.uint8, (130, 8))],
    ),
    (
        compressed({**F8, "strategy": "tensor"}),
        "fp8_tensor",
        [("weight", torch.float8_e4m3fn, (130, 256)), ("weight_scale", torch.float32, (1,))],
    ),
    (
        compressed({**F8, "strategy": "channel"}, inputs=DYNAMIC),
        "fp8_channel",
        [("weight", torch.float8_e4m3fn, (130, 256)), ("weight_scale", torch.float32, (130, 1))],
    ),
    (
        compressed({**F8, "strategy": "block", "block_structure": [128, 128]}, inputs=DYNAMIC),
        "fp8_block",
        [("weight", torch.float8_e4m3fn, (130, 256)), ("weight_scale", torch.float32, (2, 2))],
    ),
    (
        compressed(MX),
        "mxfp8",
        [("weight", torch.float8_e4m3fn, (130, 256)), ("weight_scale", torch.uint8, (130, 8))],
    ),
    (
        compressed(F4),
        "nvfp4",
        [
            ("weight_packed", torch.uint8, (130, 128)),
            ("weight_scale", torch.float8_e4m3fn, (130, 16)),
            ("weight_global_scale", torch.float32, (1,)),
        ],
    ),
    (
        compressed(I4),
        "int4",
        [
            ("weight_packed", torch.int32, (130, 32)),
            ("weight_scale", torch.float32, (130, 8)),
            ("weight_shape", torch.int64, (2,)),
        ],
    ),
    (
        compressed({**I4, "strategy": "channel", "group_size": None, "symmetric": False}),
        "int4",
        [
            ("weight_packed", torch.int32, (130, 32)),
            ("weight_scale", torch.float32, (130, 1)),
            ("weight_shape", torch.int64, (2,)),
            ("weight_zero_point", torch.int32, (17, 1)),
        ],
    ),
]


@pytest.mark.parametrize(("config", "name", "parts"), KNOWN, ids=lambda v: v if isinstance(v, str) else "")
def test_auto_makes_the_names_dtypes_and_shapes_of_the_format(
    config: dict[str, Any], name: str, parts: list[tuple[str, torch.dtype, tuple[int, ...]]], tmp_path: Path
) -> None:
    stage = stage_of("auto")
    made = parts_of(stage, torch.randn(130, 256), reference=write_config(tmp_path, config))
    assert stage.chosen.format == name
    assert [(p, t.dtype, tuple(t.shape)) for p, t in made.items()] == parts


@pytest.mark.parametrize(("config", "name", "parts"), KNOWN, ids=lambda v: v if isinstance(v, str) else "")
def test_a_named_format_takes_what_it_is_not_told_from_the_engine(
    config: dict[str, Any], name: str, parts: list[Any], tmp_path: Path
) -> None:
    folder = write_config(tmp_path, config)
    weight = torch.randn(130, 256)
    by_name, by_auto = (parts_of(stage_of(n), weight, reference=folder) for n in (name, "auto"))
    assert [*by_name] == [*by_auto] == [p for p, _, _ in parts]


@pytest.mark.parametrize("asked", sorted(set(CLASSES) - {"auto", "fp8_block"}))
def test_another_format_than_the_engines_is_refused(asked: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"quantize={asked}: .* is quantized as fp8_block; choose quantize=auto"):
        parts_of(stage_of(asked), torch.zeros(4, 256), reference=write_config(tmp_path, FP8))


def test_nothing_is_done_for_an_engine_that_is_not_quantized(tmp_path: Path) -> None:
    weight = torch.randn(4, 4)
    group = group_of({WEIGHT: weight})
    stage = stage_of("auto")
    made = quantize(stage, [group], reference=write_config(tmp_path, None))
    assert stage.chosen is None
    assert torch.equal(made[WEIGHT], weight)


def test_auto_needs_the_engines_checkpoint() -> None:
    with pytest.raises(ConfigError, match="set session.reference"):
        parts_of(stage_of("auto"), torch.zeros(4, 4))


def test_auto_follows_a_changed_checkpoint(tmp_path: Path) -> None:
    stage = stage_of("auto")
    weight = torch.randn(4, 256)
    for config, name, parts in KNOWN:
        made = parts_of(stage, weight, reference=write_config(tmp_path, config))
        assert stage.chosen.format == name
        assert [*made] == [p for p, _, _ in parts]


def test_the_config_may_be_that_of_the_text_model(tmp_path: Path) -> None:
    folder = write_config(tmp_path, None, text_config={"quantization_config": FP8})
    found = scheme_of(folder)
    assert found is not None
    assert (found.format, found.block) == ("fp8_block", (128, 128))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "awq"}, "quant_method 'awq' is none that quantize can make .fp8, mxfp8, compressed-tensors"),
        ({"bits": 4}, "quant_method None is none"),
        ({**FP8, "fmt": "e5m2"}, "fp8 format 'e5m2' cannot be made"),
        ({**FP8, "activation_scheme": "static"}, "activation_scheme 'static' needs calibrated input scales"),
        ({**FP8, "weight_block_size": [128]}, r"\[128\] is no block size"),
        ({**FP8, "weight_block_size": [0, 128]}, "is no block size"),
        (compressed({**F8, "strategy": "channel"}, inputs={**DYNAMIC, "dynamic": False}), "static input_activations"),
        (compressed({**I4, "actorder": "group"}), "actorder 'group' needs calibration"),
        (compressed({**I4, "num_bits": 3}), "type 'int', 3 bits, strategy 'group', group_size 32 cannot be made"),
        (compressed({**F8, "strategy": "token"}), "strategy 'token'"),
        (compressed(I4, targets=("Attention",)), "targets the class 'Attention'"),
        ({"quant_method": "compressed-tensors"}, "without config_groups"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "a": {"targets": ["re:.*mlp.*"], "weights": I4},
                    "b": {"targets": ["re:.*attn.*"], "weights": {**F8, "strategy": "channel"}},
                },
            },
            "config_groups of different formats or sizes .fp8_channel, int4. cannot be made in one stage",
        ),
    ],
)
def test_what_cannot_be_made_is_refused_by_name(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        parts_of(stage_of("auto"), torch.zeros(4, 256), reference=write_config(tmp_path, config))


@pytest.mark.parametrize(
    ("name", "own", "config"),
    [
        ("fp8_block", {"block": [128, 128]}, {**FP8, "weight_block_size": [64, 128]}),
        ("int4", {"group_size": 128}, compressed(I4)),
        ("int4", {"symmetric": False}, compressed(I4)),
    ],
)
def test_a_setting_that_contradicts_the_engine_stops_at_the_start(
    name: str, own: dict[str, Any], config: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="is set, the engine has .*; leave it null"):
        parts_of(stage_of(name, **own), torch.zeros(4, 256), reference=write_config(tmp_path, config))


@pytest.mark.parametrize(
    ("name", "own", "message"),
    [
        ("fp8_block", {"block": [128]}, "quantize.block"),
        ("fp8_block", {"block": [0, 1]}, "quantize.block"),
        ("int4", {"group_size": 0}, "quantize.group_size"),
        ("int4", {"group_size": -2}, "quantize.group_size"),
    ],
)
def test_settings_that_cannot_work_are_refused(name: str, own: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        stage_of(name, **own)


def test_lists_of_the_engine_and_skip_of_the_user_add_up(tmp_path: Path) -> None:
    names = [f"model.layers.{i}.mlp.{m}_proj.weight" for i in (0, 1) for m in ("gate", "up", "down")]
    config = {**FP8, "modules_to_not_convert": ["model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"]}
    groups = [group_of({n: torch.randn(8, 8) for n in names})]
    made = quantize(stage_of("auto", skip=["1.mlp.down_proj"]), groups, reference=write_config(tmp_path, config))
    scaled = {n.removesuffix("_scale_inv") for n in made if n.endswith("_scale_inv")}
    assert scaled == {names[2], names[3], names[4]}


def test_half_of_a_fused_set_is_refused(tmp_path: Path) -> None:
    config = {**FP8, "modules_to_not_convert": ["model.layers.0.mlp.gate_proj"]}
    names = [f"model.layers.0.mlp.{m}_proj.weight" for m in ("gate", "up")]
    with pytest.raises(ConfigError, match="quantize all of them or none"):
        quantize(
            stage_of("auto"),
            [group_of({n: torch.zeros(8, 8) for n in names})],
            reference=write_config(tmp_path, config),
        )
