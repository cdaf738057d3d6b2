"""auto: whatever the engine's checkpoint says; nothing where it is not quantized."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from stages.base import Stage
from stages.errors import ConfigError
from stages.flow import Group, GroupSpec, TensorSpec
from stages.quantize.base import Quantize
from stages.quantize.fp8_block import Fp8Block, Fp8BlockUe8m0
from stages.quantize.fp8_channel import Fp8Channel
from stages.quantize.fp8_tensor import Fp8Tensor
from stages.quantize.int4 import Int4
from stages.quantize.mxfp8 import Mxfp8
from stages.quantize.nvfp4 import Nvfp4
from stages.quantize.scheme import Scheme, scheme_of
from stages.run import Run

FORMATS: dict[str, type[Quantize]] = {
    f.format: f for f in (Fp8Block, Fp8BlockUe8m0, Fp8Tensor, Fp8Channel, Mxfp8, Nvfp4, Int4)
}


class Auto(Stage):
    """Takes the format, its sizes and its modules from `quantization_config` of the checkpoint that the engines serve.

    Raises ConfigError for a method that it does not know, and where that checkpoint is not known.
    """

    consumes = Group
    produces = Group
    phase = "quantize"

    def __init__(
        self, skip: Sequence[str] | None = None, allow_nonfinite: bool = False, look_ahead: bool = True
    ) -> None:
        self._settings = {"skip": skip, "allow_nonfinite": allow_nonfinite, "look_ahead": look_ahead}
        self.chosen: Quantize | None = None
        self._scheme: Scheme | None = None

    def plan(self, specs: Iterable[GroupSpec], run: Run) -> Iterable[GroupSpec]:
        self._choose(run)
        return specs if self.chosen is None else self.chosen.plan(specs, run)

    def ahead(
        self, weights: Iterable[TensorSpec], run: Run
    ) -> Mapping[str, tuple[tuple[int, int], tuple[TensorSpec, ...]]]:
        """See Quantize."""
        self._choose(run)
        return {} if self.chosen is None else self.chosen.ahead(weights, run)

    def encode_share(self, name: str, share: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """See Quantize."""
        assert self.chosen is not None
        return self.chosen.encode_share(name, share, dtype)

    def _choose(self, run: Run) -> None:
        if run.reference is None:
            raise ConfigError(
                "quantize=auto must see the engines' checkpoint: set session.reference to its folder, or name a format"
            )
        scheme = scheme_of(run.reference)
        if scheme is not None and scheme == self._scheme and self.chosen is not None:
            return
        self.close()
        self._scheme = scheme
        self.chosen = None if scheme is None else FORMATS[scheme.format](**self._settings)  # type: ignore[arg-type]

    def prepare(self, run: Run) -> None:
        if self.chosen is not None:
            self.chosen.prepare(run)

    def __call__(self, items: Iterator[Group], run: Run) -> Iterator[Group]:
        return items if self.chosen is None else self.chosen(items, run)

    def close(self) -> None:
        if self.chosen is not None:
            self.chosen.close()
