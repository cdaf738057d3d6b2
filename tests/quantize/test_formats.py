"""Any shape, dtype and stride: the same values make the same bytes, and those of the independent implementation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from . import reference
from .golden import FORMATS
from .inputs import KINDS, bell, spread_out
from .made import assert_same, bytes_of, parts_of, stage_of
from .reference import Array, Parts

SHAPES = {1: (67, 203), 16: (67, 208), 32: (67, 224), 128: (67, 256)}
STRIDES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda w: w,
    "transposed": lambda w: w.t().contiguous().t(),
    "every other column": lambda w: torch.stack([w, -w], -1).flatten(1)[:, ::2],
    "middle of a larger one": lambda w: torch.nn.functional.pad(w, (3, 5, 2, 1))[2:-1, 3:-5],
    "expert of a fused one": lambda w: torch.stack([-w, w, w + 1])[1],
}


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted(FORMATS)),
    rows=st.integers(1, 150),
    columns=st.integers(1, 300),
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 1000),
)
def test_ragged_shapes_make_what_the_reference_makes(
    name: str, rows: int, columns: int, kind: Callable[..., Array], seed: int
) -> None:
    format_, own, multiple, expected = FORMATS[name]
    weight = kind((rows, -(-columns // multiple) * multiple), seed)
    made = parts_of(stage_of(format_, **own), torch.from_numpy(weight.copy()))
    assert_same(made, expected(weight.astype(np.float64)))


@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("columns", [1, 2, 5])
def test_blocks_of_any_size(rows: int, columns: int) -> None:
    weight = spread_out((7, 11), 3)
    made = parts_of(stage_of("fp8_block", block=[rows, columns]), torch.from_numpy(weight.copy()))
    assert_same(made, reference.fp8_block(weight.astype(np.float64), (rows, columns)))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_strides_change_nothing(name: str, stride: str, dtype: torch.dtype) -> None:
    format_, own, multiple, expected = FORMATS[name]
    weight = torch.from_numpy(bell(SHAPES[multiple], 1)).to(dtype)
    made = parts_of(stage_of(format_, **own), STRIDES[stride](weight))
    assert_same(made, expected(weight.double().numpy()))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16], ids=str)
def test_the_dtype_that_holds_a_value_changes_nothing(name: str, narrow: torch.dtype) -> None:
    format_, own, multiple, _ = FORMATS[name]
    weight = torch.from_numpy(bell(SHAPES[multiple], 2)).to(narrow)
    made = [parts_of(stage_of(format_, **own), weight.to(d)) for d in (narrow, torch.float32, torch.float64)]
    for other in made[1:]:
        assert all(bytes_of(other[part]) == bytes_of(made[0][part]) for part in made[0])


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_tensor_wider_than_its_spec_is_rounded_first(name: str, dtype: torch.dtype) -> None:
    """An engine that quantizes a bfloat16 checkpoint sees bfloat16 values, whatever the trainer's masters are."""
    format_, own, multiple, expected = FORMATS[name]
    masters = torch.from_numpy(bell(SHAPES[multiple], 3))
    assert_same(parts_of(stage_of(format_, **own), masters, dtype), expected(masters.to(dtype).double().numpy()))
    unrounded = parts_of(stage_of(format_, **own), masters)
    assert_same(unrounded, expected(masters.double().numpy()))


def test_bfloat16_is_rounded_to_a_float16_spec() -> None:
    weight = torch.from_numpy(bell((20, 128), 3, 1e-6)).bfloat16()
    made = parts_of(stage_of("fp8_channel"), weight, torch.float16)
    assert_same(made, reference.fp8_channel(weight.half().double().numpy()))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("threads", [1, 2])
def test_threads_change_nothing(name: str, threads: int) -> None:
    format_, own, _, expected = FORMATS[name]
    weight = bell((300, 2560), 4)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert_same(parts_of(stage_of(format_, **own), torch.from_numpy(weight)), expected(weight.astype(np.float64)))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["fp8_block", "fp8_block_ue8m0", "fp8_tensor", "fp8_channel", "mxfp8"])
def test_codes_and_scales_are_finite_and_scales_not_zero(name: str, kind: Callable[..., Array]) -> None:
    made = [*parts_of(stage_of(name), torch.from_numpy(kind((40, 256), 5))).values()]
    assert torch.isfinite(made[0].float()).all()
    assert made[0].float().abs().max() <= 448
    assert name == "mxfp8" or (torch.isfinite(made[1]).all() and (made[1] > 0).all())


def test_a_zero_block_beside_others_has_zero_codes_and_the_floor_as_scale() -> None:
    weight = torch.zeros(256, 256)
    weight[0, 0] = 1
    codes, scales = parts_of(stage_of("fp8_block"), weight).values()
    assert codes.float().count_nonzero() == 1
    assert scales.tolist() == [[pytest.approx(1 / 448), pytest.approx(1e-10 / 448)], [pytest.approx(1e-10 / 448)] * 2]
    _, scales = parts_of(stage_of("fp8_block_ue8m0"), weight).values()
    assert scales.tolist() == [[2.0**-8, 2.0**-22], [2.0**-22] * 2]


def test_ue8m0_scales_round_up_and_never_down() -> None:
    for amax in (448.0, 447.9, 448.1, 1.0, 2.0**-60, 2.0**100):
        _, scale = parts_of(stage_of("fp8_block_ue8m0"), torch.full((3, 3), amax)).values()
        assert amax / scale.item() <= 448 or amax < 1e-4
        assert scale.item() < 2 * max(amax, 1e-4) / 448


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), kind=st.sampled_from(KINDS[:4]))
def test_fp8_error_stays_within_half_a_step(seed: int, kind: Callable[..., Array]) -> None:
    weight = kind((130, 140), seed).astype(np.float64)
    codes, scales = parts_of(stage_of("fp8_block"), torch.from_numpy(weight.astype(np.float32))).values()
    back = reference.dequantize_block(codes.view(torch.uint8).numpy(), scales.numpy())
    step = np.repeat(np.repeat(scales.double().numpy(), 128, 0), 128, 1)[:130, :140]
    assert (np.abs(back - weight) <= np.maximum(np.abs(weight) * 2.0**-4 * 1.0001, step * 2.0**-10 * 1.0001)).all()


def test_dividing_in_bfloat16_would_be_another_result() -> None:
    """A 0-dim float32 scale does not promote a bfloat16 matrix: the trap that fp8_tensor must stay out of."""
    weight = torch.from_numpy(bell((128, 256), 6)).bfloat16()
    codes, scale = parts_of(stage_of("fp8_tensor"), weight).values()
    trap = (weight / scale[0]).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert (trap.view(torch.uint8) != codes.view(torch.uint8)).float().mean() > 0.01


@pytest.mark.parametrize("fused", [2, 3])
@pytest.mark.parametrize("compressed", [False, True])
def test_nvfp4_shares_the_global_scale_over_a_fused_set(fused: int, compressed: bool, tmp_path: Any) -> None:
    from .made import group_of, quantize, write_config

    names = [f"model.layers.0.{m}.weight" for m in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")][:fused]
    weights = [bell((8 * (i + 1), 64), i, 0.02 * 4**i) for i in range(fused)]
    config = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
    groups = {"group_0": {"targets": ["Linear"], "weights": config, "input_activations": None}}
    run = {"reference": write_config(tmp_path, {"quant_method": "compressed-tensors", "config_groups": groups})}
    made = quantize(
        stage_of("nvfp4"),
        [group_of({n: torch.from_numpy(w) for n, w in zip(names, weights, strict=True)})],
        **(run if compressed else {}),
    )
    wide = [w.astype(np.float64) for w in weights]
    for name, weight in zip(names, wide, strict=True):
        expected: Parts = reference.nvfp4(weight, fused=wide, compressed=compressed)
        prefix = name.removesuffix("weight")
        assert_same({p: made[prefix + p] for p in expected}, expected)


def test_fp4_ties_go_to_the_even_code() -> None:
    from stages.quantize.nvfp4 import pack_fp4

    values = torch.tensor(
        [[0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.25, -0.75, -5.0, -0.0, 0.2500001, 0.7499999]]
    )
    packed = pack_fp4(values)[0].tolist()
    codes = [half for byte in packed for half in (byte & 15, byte >> 4)]
    assert codes == [0, 2, 2, 4, 4, 6, 6, 7, 8, 10, 14, 0, 1, 1]


def test_int4_pads_the_last_word_with_zero_bits() -> None:
    weight = torch.from_numpy(bell((3, 11), 8))
    assert_same(
        parts_of(stage_of("int4", group_size=-1), weight), partial(reference.int4, group=-1)(weight.double().numpy())
    )


@pytest.mark.parametrize(("name", "columns"), [("mxfp8", 40), ("nvfp4", 24), ("int4", 96)])
def test_columns_that_do_not_divide_are_refused_when_planned(name: str, columns: int) -> None:
    from stages.errors import ConfigError

    with pytest.raises(ConfigError, match=r"down_proj.weight has \d+ columns, not a multiple of"):
        parts_of(stage_of(name), torch.zeros(8, columns))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["fp8_block", "fp8_tensor", "fp8_channel", "int4"])
def test_codes_belong_to_the_scale_as_it_is_stored(name: str, dtype: torch.dtype) -> None:
    """Where the engine's checkpoint has narrow scales, they are rounded first, and codes made with the rounded ones."""
    from stages.flow import TensorSpec

    from .made import WEIGHT

    suffix = "weight_scale_inv" if name == "fp8_block" else "weight_scale"
    weight = torch.from_numpy(bell((256, 256), 9))
    wide = parts_of(stage_of(name), weight)
    scale_name = WEIGHT.removesuffix("weight") + suffix
    expected = {scale_name: TensorSpec(scale_name, dtype, tuple(wide[suffix].shape))}
    made = parts_of(stage_of(name), weight, expected=expected)
    assert made[suffix].dtype == dtype
    assert torch.equal(made[suffix], wide[suffix].to(dtype))
    if name != "int4":
        block = weight.shape if name == "fp8_tensor" else (1, 256) if name == "fp8_channel" else (128, 128)
        grid = made[suffix].double().numpy().reshape(-(-256 // block[0]), -1)
        spread = np.repeat(np.repeat(grid, block[0], 0), block[1], 1)
        codes = reference.to_e4m3(reference.f32(weight.double().numpy() / spread))
        assert bytes_of(made["weight"]) == codes.tobytes()


def test_zero_scales_do_not_vanish_in_float16() -> None:
    from stages.flow import TensorSpec

    from .made import WEIGHT

    name = WEIGHT + "_scale_inv"
    made = parts_of(stage_of("fp8_block"), torch.zeros(4, 4), expected={name: TensorSpec(name, torch.float16, (1, 1))})
    assert made["weight_scale_inv"].item() > 0
    assert made["weight"].float().count_nonzero() == 0
