"""Agreement with the libraries that make such checkpoints; where they differ, how and how much.

compressed-tensors computes in the dtype of the weight: in float32, where the arithmetic is the same, so are the bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from .inputs import bell, huge, one_hot, spread_out
from .made import bytes_of, parts_of, stage_of, write_config

KINDS = (bell, huge, one_hot, spread_out)


# ---------------------------------------------------------------------------------------------- compressed-tensors


FP8 = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
FP4 = {
    "num_bits": 4,
    "type": "float",
    "symmetric": True,
    "dynamic": False,
    "strategy": "tensor_group",
    "group_size": 16,
}
INT4 = {"num_bits": 4, "type": "int", "dynamic": False, "strategy": "group", "group_size": 32}
MX = {**FP8, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
SCHEMES: dict[str, dict[str, Any]] = {
    "fp8_tensor": {**FP8, "strategy": "tensor"},
    "fp8_channel": {**FP8, "strategy": "channel"},
    "fp8_block": {**FP8, "strategy": "block", "block_structure": [128, 128]},
    "mxfp8": MX,
    "nvfp4": {**FP4, "scale_dtype": "torch.float8_e4m3fn", "zp_dtype": "torch.float8_e4m3fn"},
    "int4": {**INT4, "symmetric": True},
    "int4 with zero points": {**INT4, "symmetric": False},
}


def by_compressed_tensors(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """What llm-compressor would write: min-max observer, then the library's own qparams and compressor."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    args = QuantizationArgs(**SCHEMES[name])
    rows, columns = weight.shape
    if args.strategy == "tensor":
        low, high = weight.min(), weight.max()
    elif args.strategy == "channel":
        low, high = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    elif args.strategy == "block":
        blocks = weight.view(rows // 128, 128, columns // 128, 128)
        low, high = blocks.amin((1, 3)), blocks.amax((1, 3))
    else:
        grouped = weight.view(rows, -1, args.group_size)
        low, high = grouped.amin(-1), grouped.amax(-1)
    total = generate_gparam(weight.min(), weight.max()) if name == "nvfp4" else None
    scale, zero = calculate_qparams(low, high, args, global_scale=total)
    state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
    if total is not None:
        state["weight_global_scale"] = total
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    kinds = {"fp8": "naive-quantized", "mxf": "mxfp8-quantized", "nvf": "nvfp4-pack-quantized", "int": "pack-quantized"}
    return dict(BaseCompressor.get_value_from_registry(kinds[name[:3]]).compress(state, scheme))


def ours(name: str, weight: torch.Tensor, folder: Path) -> dict[str, torch.Tensor]:
    """By way of quantize=auto and the scheme as a checkpoint would state it."""
    config = {
        "quant_method": "compressed-tensors",
        "config_groups": {"g": {"targets": ["Linear"], "weights": SCHEMES[name]}},
    }
    return parts_of(stage_of("auto"), weight, reference=write_config(folder, config))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SCHEMES)
def test_same_bytes_as_compressed_tensors(name: str, kind: Callable[..., Any], tmp_path: Path) -> None:
    weight = torch.from_numpy(kind((256, 512), 1))
    if kind is huge:
        weight = weight / 1e30  # the library's zero points overflow beyond
    theirs, made = by_compressed_tensors(name, weight), ours(name, weight, tmp_path)
    assert set(made) <= set(theirs)
    for part, tensor in made.items():
        expected = theirs[part].reshape(tensor.shape)
        assert tensor.dtype == expected.dtype, part
        if kind is not one_hot:
            assert bytes_of(tensor) == bytes_of(expected), part
        elif "scale" in part:
            # Zero blocks: the library puts an epsilon of the scale's dtype, we the floor of the largest magnitude.
            used = expected.double() != float(expected.double().reshape(-1)[0])
            assert torch.equal(tensor[used].view(torch.uint8), expected[used].view(torch.uint8))
        elif "zero points" not in name:  # of zero groups it makes by way of 0/0 and a cast of NaN
            assert bytes_of(tensor) == bytes_of(expected), part


def test_mxfp8_differs_from_compressed_tensors_only_at_1_75_times_a_power_of_two(tmp_path: Path) -> None:
    weight = torch.from_numpy(bell((256, 512), 1)).bfloat16().float()
    theirs, made = by_compressed_tensors("mxfp8", weight), ours("mxfp8", weight, tmp_path)
    mantissa, _ = torch.frexp(weight.view(256, 16, 32).abs().amax(-1))
    special = mantissa == 0.875
    assert special.any()
    difference = theirs["weight_scale"].int() - made["weight_scale"].int()
    assert torch.equal(difference, special.int())  # there the library leaves half of the range unused


def test_bfloat16_arithmetic_of_compressed_tensors_is_less_exact(tmp_path: Path) -> None:
    """Why bytes differ for a bfloat16 weight: the library divides in bfloat16, by a scale in bfloat16."""
    weight = torch.from_numpy(bell((256, 512), 2)).bfloat16()
    theirs, made = by_compressed_tensors("fp8_channel", weight), ours("fp8_channel", weight, tmp_path)

    def error(parts: dict[str, torch.Tensor]) -> float:
        return float((parts["weight"].double() * parts["weight_scale"].double() - weight.double()).pow(2).mean())

    different = (made["weight"].view(torch.uint8) != theirs["weight"].view(torch.uint8)).float().mean()
    assert 0 < different < 0.2
    assert error(made) < error(theirs)


# ---------------------------------------------------------------------------------------------------------- torchao


@pytest.fixture
def torchao() -> Any:
    return pytest.importorskip("torchao")


def test_nvfp4_agrees_with_torchao_but_for_its_reciprocal(torchao: Any) -> None:
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale

    weight = torch.from_numpy(bell((256, 512), 3))
    total = per_tensor_amax_to_scale(weight.abs().max())
    scales, packed = nvfp4_quantize(weight, 16, total)
    made = parts_of(stage_of("nvfp4"), weight)
    assert bytes_of(made["weight_scale_2"]) == bytes_of(total)
    assert bytes_of(made["weight_scale"]) == bytes_of(scales)
    # It multiplies with 1 / scale; the codes of values close to a midpoint may fall on its other side.
    wrong = made["weight"] != packed.view(torch.uint8).view(made["weight"].shape)
    assert wrong.float().mean() < 1e-4


def test_mxfp8_agrees_with_torchao_where_it_rounds_up(torchao: Any) -> None:
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    weight = torch.from_numpy(bell((256, 512), 4))
    scales, codes = to_mx(weight, torch.float8_e4m3fn, 32, scaling_mode=ScaleCalculationMode.RCEIL)
    made = parts_of(stage_of("mxfp8"), weight)
    assert bytes_of(made["weight_scale_inv"]) == bytes_of(scales)
    assert bytes_of(made["weight"]) == bytes_of(codes)


@pytest.mark.parametrize("name", ["fp8_block", "fp8_tensor", "fp8_channel"])
def test_fp8_agrees_with_torchao_but_for_its_reciprocal(torchao: Any, name: str) -> None:
    from torchao.float8.inference import FP8Granularity  # noqa: F401 - the installed release has float8 inference
    from torchao.quantization.quant_primitives import _choose_scale_float8, _quantize_affine_float8

    weight = torch.from_numpy(bell((256, 512), 5))
    block = {"fp8_block": [128, 128], "fp8_channel": [1, 512], "fp8_tensor": [256, 512]}[name]
    scale = _choose_scale_float8(weight, block, torch.float8_e4m3fn)
    codes = _quantize_affine_float8(weight, scale, torch.float8_e4m3fn)
    made = [*parts_of(stage_of(name), weight).values()]
    assert bytes_of(made[1]) == bytes_of(scale.float())
    wrong = made[0].view(torch.uint8) != codes.view(torch.uint8)
    assert wrong.float().mean() < 1e-3
