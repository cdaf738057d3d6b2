"""int4: 4-bit integers, eight to an int32, with one scale per group of a row: w4a16 as compressed-tensors packs it.

    X.weight_packed      int32 [M, ceil(N/8)]; code + 8, the element with the lowest index in the lowest bits
    X.weight_scale       float32 [M, N/group_size]
    X.weight_shape       int64 [2], M and N
    X.weight_zero_point  int32 [ceil(M/8), N/group_size], packed down the rows; only where not symmetric

value = (code - zero point) * scale. Symmetric scales are amax / 7.5: the codes reach from -8 to 7.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from stages.errors import ConfigError
from stages.flow import TensorSpec
from stages.quantize.base import Quantize, Weight
from stages.quantize.scheme import Scheme
from stages.quantize.strips import AMAX_FLOOR, Scratch, as_float, row_peaks, rows_per_piece, store_scale

GROUP = 128
_LOW, _HIGH = -8.0, 7.0


class Int4(Quantize):
    """`group_size` columns share a scale, -1 for whole rows; null takes the engine's, or 128. Likewise `symmetric`."""

    format = "int4"

    def __init__(
        self,
        group_size: int | None = None,
        symmetric: bool | None = None,
        skip: Sequence[str] | None = None,
        allow_nonfinite: bool = False,
        look_ahead: bool = True,
    ) -> None:
        super().__init__(skip, allow_nonfinite, look_ahead)
        if group_size is not None and group_size != -1 and group_size < 1:
            raise ConfigError(f"quantize.group_size: {group_size} must be above zero, or -1 for whole rows")
        self.group_size = group_size
        self.symmetric = symmetric
        self._group_size = group_size or GROUP
        self._symmetric = symmetric is not False

    def adopt(self, scheme: Scheme) -> None:
        assert scheme.group_size is not None
        for name, ours, theirs in (
            ("group_size", self.group_size, scheme.group_size),
            ("symmetric", self.symmetric, scheme.symmetric),
        ):
            if ours not in (None, theirs):
                raise ConfigError(
                    f"quantize.{name}: {ours} is set, the engine has {theirs}; leave it null to take that"
                )
        self._group_size, self._symmetric = scheme.group_size, scheme.symmetric

    def outputs(self, weight: TensorSpec) -> tuple[TensorSpec, ...]:
        rows, columns = weight.shape
        size = self._columns(weight.shape[1])
        if columns % size:
            raise ConfigError(
                f"quantize=int4: {weight.name} has {columns} columns, not a multiple of its group size {size}; "
                f"see quantize.skip"
            )
        groups = columns // size
        parts = (
            TensorSpec(weight.name + "_packed", torch.int32, (rows, -(-columns // 8))),
            TensorSpec(weight.name + "_scale", torch.float32, (rows, groups)),
            TensorSpec(weight.name + "_shape", torch.int64, (2,)),
        )
        if self._symmetric:
            return parts
        return (*parts, TensorSpec(weight.name + "_zero_point", torch.int32, (-(-rows // 8), groups)))

    def block_of(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Zero points are packed by eight rows, and codes by eight columns."""
        size = self._columns(shape[1])
        return 1 if self._symmetric else 8, size if size % 8 == 0 else shape[1]

    def encode(self, weights: Sequence[Weight], made: Sequence[tuple[torch.Tensor, ...]]) -> None:
        for weight, (packed, scales, shape, *zero_points) in zip(weights, made, strict=True):
            shape.copy_(torch.tensor(weight.tensor.shape))
            zeros = self.kept("zeros", scales.shape, packed.device) if zero_points else None
            self._encode(weight, packed, scales, zeros)
            for place in zero_points:
                assert zeros is not None
                place.copy_(pack_int4(zeros.t()).t())

    def _encode(self, weight: Weight, packed: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None) -> None:
        amax = self.kept("amax", scales.shape, packed.device)
        columns = weight.tensor.shape[1]

        def strip(number: int, rows: slice, scratch: Scratch) -> None:
            values = as_float(weight.tensor[rows], weight.dtype, scratch).view(
                -1, scales.shape[1], self._columns(columns)
            )
            amax[rows] = row_peaks(values)
            if zeros is None:
                scale = store_scale(amax[rows].clamp(min=AMAX_FLOOR) / ((_HIGH - _LOW) / 2), scales[rows])
                values.div_(scale[..., None])
            else:
                low, high = values.amin(-1).clamp(max=0.0), values.amax(-1).clamp(min=0.0)
                scale = store_scale((high - low).clamp(min=AMAX_FLOOR) / (_HIGH - _LOW), scales[rows])
                zeros[rows] = torch.sub(_LOW, low / scale).clamp_(_LOW, _HIGH).round_()
                values.div_(scale[..., None]).add_(zeros[rows, :, None])
            packed[rows] = pack_int4(values.clamp_(_LOW, _HIGH).round_().flatten(1))

        self.strips.each(weight.tensor, rows_per_piece(columns), strip)
        self.check(weight, amax)

    def _columns(self, columns: int) -> int:
        return columns if self._group_size == -1 else self._group_size


def pack_int4(codes: torch.Tensor) -> torch.Tensor:
    """Whole numbers from -8 to 7 -> int32 [rows, ceil(columns/8)] of code + 8; the rest of the last word is zero."""
    rows, columns = codes.shape
    nibbles = codes.new_zeros((rows, -(-columns // 8) * 8), dtype=torch.int32)
    nibbles[:, :columns] = codes.to(torch.int32) + 8
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=codes.device)
    return (nibbles.view(rows, -1, 8) << shifts).sum(-1, dtype=torch.int32)
