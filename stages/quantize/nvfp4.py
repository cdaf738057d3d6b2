"""nvfp4: 4-bit floats (e2m1), a float8_e4m3fn scale per 16 elements of a row, and one float32 scale over a fused set.

    X.weight          uint8 [M, N/2], the element with the lower index in the lower half; N a multiple of 16
    X.weight_scale    float8_e4m3fn [M, N/16]
    X.weight_scale_2  float32 [], what to multiply with: value = code * weight_scale * weight_scale_2

compressed-tensors names them X.weight_packed, X.weight_scale and X.weight_global_scale [1], and divides by the last.
The sets that engines fuse (q/k/v, gate/up) share the global scale, since a fused weight has only one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from stages.errors import ConfigError
from stages.flow import TensorSpec
from stages.quantize.base import Quantize, Weight
from stages.quantize.scheme import Scheme
from stages.quantize.strips import AMAX_FLOOR, FP8_MAX, Scratch, as_float, divide, row_peaks, rows_per_piece

GROUP = 16
FP4_MAX = 6.0
# Midpoints between the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6. A value on one of them goes to the even code, so every
# other midpoint belongs to the upper interval: it is moved down by one float32.
_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_SMALLEST = 2.0**-9  # of the block scales: the smallest float8_e4m3fn, so that none becomes zero


class Nvfp4(Quantize):
    """Reads each weight twice: the global scale must be known before the first code."""

    format = "nvfp4"

    def __init__(
        self, skip: Sequence[str] | None = None, allow_nonfinite: bool = False, look_ahead: bool = True
    ) -> None:
        super().__init__(skip, allow_nonfinite, look_ahead)
        self._compressed = False

    def adopt(self, scheme: Scheme) -> None:
        self._compressed = scheme.compressed

    def outputs(self, weight: TensorSpec) -> tuple[TensorSpec, ...]:
        rows, columns = weight.shape
        if columns % GROUP:
            raise ConfigError(
                f"quantize=nvfp4: {weight.name} has {columns} columns, not a multiple of {GROUP}; see quantize.skip"
            )
        module = weight.name.removesuffix("weight")
        packed, last, shape = (
            ("weight_packed", "weight_global_scale", (1,)) if self._compressed else ("weight", "weight_scale_2", ())
        )
        return (
            TensorSpec(module + packed, torch.uint8, (rows, columns // 2)),
            TensorSpec(module + "weight_scale", torch.float8_e4m3fn, (rows, columns // GROUP)),
            TensorSpec(module + last, torch.float32, shape),
        )

    def block_of(self, shape: tuple[int, int]) -> tuple[int, int]:
        return shape

    def encode(self, weights: Sequence[Weight], made: Sequence[tuple[torch.Tensor, ...]]) -> None:
        peaks = []
        for weight in weights:
            peaks.append(self.peak(weight))
            self.check(weight, peaks[-1])
        amax = torch.stack(peaks).amax().clamp(min=AMAX_FLOOR)
        # Two conventions, reciprocal to one another. compressed-tensors computes its own by way of 1 / amax.
        written = amax.reciprocal() * (FP8_MAX * FP4_MAX) if self._compressed else amax / (FP8_MAX * FP4_MAX)
        for weight, (packed, scales, total) in zip(weights, made, strict=True):
            total.copy_(written.view(total.shape))
            self._encode(weight, packed, scales, written)

    def _encode(self, weight: Weight, packed: torch.Tensor, scales: torch.Tensor, written: torch.Tensor) -> None:
        def strip(number: int, rows: slice, scratch: Scratch) -> None:
            values = as_float(weight.tensor[rows], weight.dtype, scratch).view(-1, scales.shape[1], GROUP)
            local = row_peaks(values) / FP4_MAX
            local = local * written if self._compressed else local / written
            scales[rows] = local.clamp_(_SMALLEST, FP8_MAX)
            stored = scales[rows].float()
            scale = stored / written if self._compressed else stored * written
            packed[rows] = pack_fp4(divide(values, scale[..., None], FP4_MAX).flatten(1))

        self.strips.each(weight.tensor, rows_per_piece(2 * packed.shape[1]), strip)


def pack_fp4(values: torch.Tensor) -> torch.Tensor:
    """float32 within +-6 -> e2m1 codes, two to a byte, rounded to the nearest, ties to even."""
    even = torch.tensor(_MIDPOINTS[0::2], device=values.device)
    odd = torch.tensor(_MIDPOINTS[1::2], device=values.device)
    edges = torch.empty(len(_MIDPOINTS), device=values.device)
    edges[0::2] = even
    edges[1::2] = torch.nextafter(odd, torch.zeros_like(odd))
    codes = torch.bucketize(values.abs(), edges, out_int32=True).to(torch.uint8)
    codes |= (values < 0).to(torch.uint8) << 3
    return codes[:, 0::2] | codes[:, 1::2] << 4
