"""engine: weights travel wide, and the engine quantizes them as it loads them."""

from __future__ import annotations

from collections.abc import Iterable

from stages.base import GroupMapper
from stages.errors import ConfigError
from stages.flow import GroupSpec
from stages.quantize.scheme import scheme_of
from stages.run import Run


class ByEngine(GroupMapper):
    """Passes every group on, and tells preflight which weights may come wide and without scales.

    Raises ConfigError for an engine that would take such weights as they are, over stale scales.
    """

    phase = "quantize"

    def plan(self, specs: Iterable[GroupSpec], run: Run) -> Iterable[GroupSpec]:
        scheme = scheme_of(run.reference) if run.reference is not None else None
        if scheme is not None and scheme.format not in run.backend.quantizes_on_load:
            raise ConfigError(
                f"quantize=engine: backend={run.backend.name} does not quantize {scheme.format} weights as it loads them; "
                f"use quantize=auto"
            )
        planned = list(super().plan(specs, run))
        wanted = () if scheme is None else (t.name for spec in planned for t in spec.tensors)
        run.on_load = frozenset(n for n in wanted if scheme and scheme.rules.wants(n.removesuffix(".weight")))
        return planned
