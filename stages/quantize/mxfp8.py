"""mxfp8: float8_e4m3fn codes and one power-of-two scale per 32 elements of a row (OCP MX), stored as its exponent.

    X.weight            float8_e4m3fn [M, N], N a multiple of 32
    X.weight_scale_inv  uint8 [M, N/32], the exponent + 127; no padding, no swizzle

compressed-tensors calls the second one X.weight_scale. The exponent is rounded up, so that no code exceeds the range, as
vLLM 0.32 does (compressed-tensors 0.20 differs where the largest magnitude is 1.75 times a power of two exactly).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from stages.errors import ConfigError
from stages.flow import TensorSpec
from stages.quantize.base import Quantize, Weight
from stages.quantize.fp8_block import round_up_to_power_of_two
from stages.quantize.scheme import Scheme
from stages.quantize.strips import AMAX_FLOOR, FP8_MAX, Scratch, as_float, divide, row_peaks, rows_per_piece

GROUP = 32


class Mxfp8(Quantize):
    """Microscaling fp8."""

    format = "mxfp8"

    def __init__(
        self, skip: Sequence[str] | None = None, allow_nonfinite: bool = False, look_ahead: bool = True
    ) -> None:
        super().__init__(skip, allow_nonfinite, look_ahead)
        self._scale = "weight_scale_inv"

    def adopt(self, scheme: Scheme) -> None:
        self._scale = "weight_scale" if scheme.compressed else "weight_scale_inv"

    def outputs(self, weight: TensorSpec) -> tuple[TensorSpec, ...]:
        rows, columns = weight.shape
        if columns % GROUP:
            raise ConfigError(
                f"quantize=mxfp8: {weight.name} has {columns} columns, not a multiple of {GROUP}; see quantize.skip"
            )
        name = weight.name.removesuffix("weight") + self._scale
        return (
            TensorSpec(weight.name, torch.float8_e4m3fn, weight.shape),
            TensorSpec(name, torch.uint8, (rows, columns // GROUP)),
        )

    def block_of(self, shape: tuple[int, int]) -> tuple[int, int]:
        return 1, GROUP

    def encode(self, weights: Sequence[Weight], made: Sequence[tuple[torch.Tensor, ...]]) -> None:
        for weight, (codes, exponents) in zip(weights, made, strict=True):
            self._encode(weight, codes, exponents)

    def _encode(self, weight: Weight, codes: torch.Tensor, exponents: torch.Tensor) -> None:
        amax = self.kept("amax", exponents.shape, codes.device)

        def strip(number: int, rows: slice, scratch: Scratch) -> None:
            values = as_float(weight.tensor[rows], weight.dtype, scratch).view(-1, exponents.shape[1], GROUP)
            amax[rows] = row_peaks(values)
            scale = round_up_to_power_of_two(amax[rows].clamp(min=AMAX_FLOOR) / FP8_MAX)
            exponents[rows] = (scale.view(torch.int32) >> 23).to(torch.uint8)
            codes[rows] = divide(values, scale[..., None], FP8_MAX).flatten(1)

        self.strips.each(weight.tensor, rows_per_piece(codes.shape[1]), strip)
        self.check(weight, amax)
