"""fp8_channel: float8_e4m3fn codes and one scale per output row, named as compressed-tensors names them.

X.weight        float8_e4m3fn [M, N]
X.weight_scale  float32 [M, 1]
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from stages.flow import TensorSpec
from stages.quantize.base import Quantize, Weight
from stages.quantize.strips import (
    AMAX_FLOOR,
    FP8_MAX,
    Scratch,
    as_float,
    divide,
    row_peaks,
    rows_per_piece,
    store_scale,
)


class Fp8Channel(Quantize):
    """One scale per output row."""

    format = "fp8_channel"

    def outputs(self, weight: TensorSpec) -> tuple[TensorSpec, ...]:
        scale = TensorSpec(weight.name + "_scale", torch.float32, (weight.shape[0], 1))
        return TensorSpec(weight.name, torch.float8_e4m3fn, weight.shape), scale

    def block_of(self, shape: tuple[int, int]) -> tuple[int, int]:
        return 1, shape[1]

    def encode(self, weights: Sequence[Weight], made: Sequence[tuple[torch.Tensor, ...]]) -> None:
        for weight, (codes, scales) in zip(weights, made, strict=True):
            self._encode(weight, codes, scales)

    def _encode(self, weight: Weight, codes: torch.Tensor, scales: torch.Tensor) -> None:
        amax = self.kept("amax", scales.shape, codes.device)

        def strip(number: int, rows: slice, scratch: Scratch) -> None:
            values = as_float(weight.tensor[rows], weight.dtype, scratch)
            amax[rows, 0] = row_peaks(values)
            scale = store_scale(amax[rows].clamp(min=AMAX_FLOOR) / FP8_MAX, scales[rows])
            codes[rows] = divide(values, scale, FP8_MAX)

        self.strips.each(weight.tensor, rows_per_piece(codes.shape[1]), strip)
        self.check(weight, amax)
