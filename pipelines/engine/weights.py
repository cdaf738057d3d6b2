"""The weights of one rank, addressed and stored by their names, dtypes and shapes in the Hugging Face checkpoint."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from pipelines.engine.checkpoint import Checkpoint
from stages.digest import combine_digests, tensor_digest
from stages.errors import ConfigError
from stages.flow import dtype_name, dtype_of

SCALE_SUFFIX = "_scale_inv"


class UnknownNameError(Exception):
    """No tensor of the model has this name."""


class ShapeMismatchError(Exception):
    """A tensor of the right name has another shape."""


@dataclass
class Weights:
    """`tensors` by name, applied in place; `tied` maps an alias to the name it shares storage with.

    `block` is set for block-fp8 weights: `X.weight` holds the codes and `X.weight_scale_inv` the scales, and `served`
    the tensors that the model computes with, which `refresh` makes from them.
    """

    tensors: dict[str, torch.Tensor]
    tied: dict[str, str]
    block: tuple[int, int] | None = None
    served: dict[str, torch.Tensor] | None = None

    @classmethod
    def replica(cls, folder: str, dtype: str, device: str, tied: dict[str, str]) -> Weights:
        """A copy of a checkpoint that no model computes with: what the ranks above 0 hold."""
        checkpoint = Checkpoint(folder)
        tensors = {
            name: tensor.to(device, stored_dtype(tensor.dtype, dtype), copy=True)
            for name, tensor in checkpoint.tensors()
            if name not in tied
        }
        return cls(tensors, tied, checkpoint.block_fp8)

    def resolve(self, name: str) -> torch.Tensor:
        """The tensor of this name or alias. Raises UnknownNameError."""
        tensor = self.tensors.get(self.tied.get(name, name))
        if tensor is None:
            raise UnknownNameError(name)
        return tensor

    @torch.no_grad()
    def apply(self, name: str, value: torch.Tensor) -> str | None:
        """Write one whole tensor; another dtype is cast. Returns what was silently done, if anything.

        Raises UnknownNameError or ShapeMismatchError.
        """
        target = self.resolve(name)
        if target.shape != value.shape:
            raise ShapeMismatchError(f"{name}: the model has shape {list(target.shape)}, got {list(value.shape)}")
        target.copy_(value)
        return None if target.dtype == value.dtype else cast_note(name, value.dtype, target.dtype)

    def memory(self, name: str) -> torch.Tensor:
        """The tensor's bytes, flat uint8, for writing a piece of it."""
        return self.resolve(name).reshape(-1).view(torch.uint8)

    @torch.no_grad()
    def refresh(self, names: Iterable[str] | None = None) -> None:
        """Make the served tensors of block-fp8 weights from codes and scales: all of them, or those of `names`."""
        if self.served is None:
            return
        for name in self.served if names is None else [n for n in names if n in self.served]:
            self.served[name].copy_(self._dequantized(name))

    def _dequantized(self, name: str) -> torch.Tensor:
        assert self.block is not None
        codes, scales = self.tensors[name], self.tensors[name + SCALE_SUFFIX]
        rows, columns = codes.shape
        grid = scales.repeat_interleave(self.block[0], 0)[:rows].repeat_interleave(self.block[1], 1)[:, :columns]
        return codes.float() * grid

    @torch.no_grad()
    def fill(self, value: float, names: Iterable[str] | None = None) -> None:
        """Overwrite tensors with one value, as memory that nobody initialized."""
        for name in self.tensors if names is None else names:
            self.tensors[name].fill_(value)
        self.refresh(names)

    def digests(self) -> dict[str, str]:
        return {name: tensor_digest(self.tensors[name]) for name in sorted(self.tensors)}

    def digest(self, digests: dict[str, str]) -> str:
        """The digest of the set, from `digests()`."""
        return combine_digests((n, t.dtype, tuple(t.shape), digests[n]) for n, t in self.tensors.items())

    def describe(self) -> dict[str, list[object]]:
        return {name: [dtype_name(t.dtype), list(t.shape)] for name, t in sorted(self.tensors.items())}


def stored_dtype(found: torch.dtype, wanted: str) -> torch.dtype:
    """The dtype to keep a checkpoint tensor in: its own for "auto" and for anything but plain floats."""
    plain = found in (torch.float32, torch.float16, torch.bfloat16)
    return dtype_of(wanted) if wanted != "auto" and plain else found


def cast_note(name: str, found: torch.dtype, kept: torch.dtype) -> str:
    return f"{name} was cast from {dtype_name(found)} to {dtype_name(kept)}"


def check_names(expected: set[str], found: set[str], folder: str) -> None:
    """Raises ConfigError where a checkpoint does not hold exactly the tensors of the model."""
    if expected == found:
        return
    missing, unknown = sorted(expected - found), sorted(found - expected)
    raise ConfigError(
        f"{folder} does not fit the model class: {len(missing)} tensors missing {missing[:5]}, "
        f"{len(unknown)} unknown {unknown[:5]}"
    )


def quantize(value: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Block-fp8 codes and their fp32 scales, one per block."""
    rows, columns = value.shape
    grid = (-(-rows // block[0]), -(-columns // block[1]))
    padded = torch.zeros(grid[0] * block[0], grid[1] * block[1], device=value.device)
    padded[:rows, :columns] = value.float()
    tiles = padded.view(grid[0], block[0], grid[1], block[1])
    scales = tiles.abs().amax((1, 3)).clamp(min=1e-10) / 448
    codes = (tiles / scales[:, None, :, None]).clamp(-448, 448).view_as(padded)[:rows, :columns]
    return codes.to(torch.float8_e4m3fn), scales
