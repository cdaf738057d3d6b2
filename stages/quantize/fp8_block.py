"""fp8_block: float8_e4m3fn codes and one scale per block of rows and columns; in fp8_block_ue8m0 a power of two.

    X.weight            float8_e4m3fn [M, N]
    X.weight_scale_inv  float32 [ceil(M/bm), ceil(N/bn)], what to multiply the codes with (in spite of its name)

compressed-tensors calls the second one X.weight_scale.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from stages.errors import ConfigError
from stages.flow import TensorSpec
from stages.quantize.base import Quantize, Weight
from stages.quantize.scheme import Scheme
from stages.quantize.strips import (
    AMAX_FLOOR,
    FP8_MAX,
    Scratch,
    column_peaks,
    columns_per_piece,
    pieces,
    quotient,
    store_scale,
)

BLOCK = (128, 128)
UE8M0_FLOOR = 1e-4  # of the block's largest magnitude, as in DeepGEMM: the smallest scale is 2^-22


class Fp8Block(Quantize):
    """`block` is the size of a block; null takes the engine's, or 128x128 where its checkpoint is not known."""

    format = "fp8_block"
    floor = AMAX_FLOOR

    def __init__(
        self,
        block: Sequence[int] | None = None,
        skip: Sequence[str] | None = None,
        allow_nonfinite: bool = False,
        look_ahead: bool = True,
    ) -> None:
        super().__init__(skip, allow_nonfinite, look_ahead)
        if block is not None and (len(block) != 2 or min(block) < 1):
            raise ConfigError(f"quantize.block: {block!r} must be two numbers above zero")
        self.block = None if block is None else (int(block[0]), int(block[1]))
        self._block = self.block or BLOCK
        self._scale = "weight_scale_inv"

    def adopt(self, scheme: Scheme) -> None:
        assert scheme.block is not None
        if self.block not in (None, scheme.block):
            raise ConfigError(
                f"quantize.block: {self.block} is set, the engine has {scheme.block}; leave it null to take that"
            )
        self._block = scheme.block
        self._scale = "weight_scale" if scheme.compressed else "weight_scale_inv"

    def outputs(self, weight: TensorSpec) -> tuple[TensorSpec, ...]:
        grid = tuple(-(-size // step) for size, step in zip(weight.shape, self._block, strict=True))
        module = weight.name.removesuffix("weight")
        return (
            TensorSpec(weight.name, torch.float8_e4m3fn, weight.shape),
            TensorSpec(module + self._scale, torch.float32, grid),
        )

    def block_of(self, shape: tuple[int, int]) -> tuple[int, int]:
        return self._block

    def scale_of(self, amax: torch.Tensor) -> torch.Tensor:
        """Scales of blocks with these largest magnitudes, which are not below the floor."""
        return amax / FP8_MAX

    def encode(self, weights: Sequence[Weight], made: Sequence[tuple[torch.Tensor, ...]]) -> None:
        for weight, (codes, scales) in zip(weights, made, strict=True):
            self._encode(weight, codes, scales)

    def _encode(self, weight: Weight, codes: torch.Tensor, scales: torch.Tensor) -> None:
        rows, columns = self._block
        amax = self.kept("amax", scales.shape, codes.device)
        width = columns_per_piece(rows, columns)

        def strip(number: int, where: slice, scratch: Scratch) -> None:
            for part in pieces(codes.shape[1], width):
                piece = weight.tensor[where, part]
                blocks = slice(part.start // columns, -(-part.stop // columns))
                found = amax[number, blocks]
                _peaks_by_block(column_peaks(piece, weight.dtype, scratch), columns, found)
                scale = store_scale(self.scale_of(found.clamp(min=self.floor)), scales[number, blocks])
                by_column = scale.repeat_interleave(columns)[: piece.shape[1]]
                codes[where, part] = quotient(piece, weight.dtype, by_column, FP8_MAX, scratch)

        self.strips.each(weight.tensor, rows, strip)
        self.check(weight, amax)


class Fp8BlockUe8m0(Fp8Block):
    """Scales rounded up to powers of two, so that no code exceeds the range; still float32, in the same grid and name.

    The packed form that DeepGEMM's kernels want is the engine's to make.
    """

    format = "fp8_block_ue8m0"
    floor = UE8M0_FLOOR

    def scale_of(self, amax: torch.Tensor) -> torch.Tensor:
        return round_up_to_power_of_two(amax / FP8_MAX)


def round_up_to_power_of_two(scale: torch.Tensor) -> torch.Tensor:
    """2^ceil(log2(scale)) of positive float32 values, from their bits and thus exact."""
    bits = scale.view(torch.int32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0)
    return (exponent.clamp(1, 254) << 23).to(torch.int32).view(torch.float32)


def _peaks_by_block(by_column: torch.Tensor, columns: int, out: torch.Tensor) -> None:
    whole = by_column.numel() // columns
    if whole:
        torch.amax(by_column[: whole * columns].view(whole, columns), 1, out=out[:whole])
    if whole < out.numel():
        out[whole] = by_column[whole * columns :].amax()
