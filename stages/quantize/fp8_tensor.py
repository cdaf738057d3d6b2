"""fp8_tensor: float8_e4m3fn codes and one scale for the whole weight.

    X.weight        float8_e4m3fn [M, N]
    X.weight_scale  float32 [1]

The scale is that of the weight under its checkpoint name; engines that fuse weights make one of several themselves.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from stages.flow import TensorSpec
from stages.quantize.base import Quantize, Weight
from stages.quantize.strips import AMAX_FLOOR, FP8_MAX, Scratch, quotient, rows_per_piece, store_scale


class Fp8Tensor(Quantize):
    """Reads each weight twice: the scale must be known before the first code."""

    format = "fp8_tensor"

    def outputs(self, weight: TensorSpec) -> tuple[TensorSpec, ...]:
        scale = TensorSpec(weight.name + "_scale", torch.float32, (1,))
        return TensorSpec(weight.name, torch.float8_e4m3fn, weight.shape), scale

    def block_of(self, shape: tuple[int, int]) -> tuple[int, int]:
        return shape

    def encode(self, weights: Sequence[Weight], made: Sequence[tuple[torch.Tensor, ...]]) -> None:
        for weight, (codes, scale) in zip(weights, made, strict=True):
            self._encode(weight, codes, scale)

    def _encode(self, weight: Weight, codes: torch.Tensor, scale: torch.Tensor) -> None:
        amax = self.peak(weight)
        self.check(weight, amax)
        # One dimension, not none: a 0-dim float32 would not promote what it divides.
        stored = store_scale((amax.clamp(min=AMAX_FLOOR) / FP8_MAX).view(scale.shape), scale).view(1)

        def strip(number: int, rows: slice, scratch: Scratch) -> None:
            codes[rows] = quotient(weight.tensor[rows], weight.dtype, stored, FP8_MAX, scratch)

        self.strips.each(weight.tensor, rows_per_piece(codes.shape[1]), strip)
