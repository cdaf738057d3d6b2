"""From settings to objects: the stages of a recipe, the backend, the timeouts."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from pipelines.config import STAGES, build
from pipelines.executor import check_chain
from stages.backends.base import Backend
from stages.base import Stage
from stages.errors import CompositionError
from stages.gather import GatherParams
from stages.quantize.auto import Auto
from stages.quantize.base import Quantize
from stages.run import Timeouts
from stages.transport.base import Transport


def compose_backend(settings: Mapping[str, Any]) -> Backend:
    return build(settings["backend"], Backend)  # type: ignore[type-abstract]


def compose_chain(settings: Mapping[str, Any], backend: Backend) -> list[Stage]:
    """The stages that `recipe.stages` lists, in order, checked against one another and against the backend.

    A word whose node is null (quantize=none) is left out. Raises CompositionError or ConfigError, before anything starts.
    """
    stages: list[Stage] = []
    for item in settings["recipe"]["stages"]:
        node = settings[STAGES[item]] if isinstance(item, str) else item
        if node is not None:
            stages.append(build(node, Stage))
    check_chain(stages)
    for first, second in pairwise(stages):
        if isinstance(first, GatherParams) and isinstance(second, Auto | Quantize):
            first.encoder = second
    backend.check(transport_of(stages).name)
    return stages


def transport_of(stages: list[Stage]) -> Transport:
    """The one transport of a chain. Raises CompositionError when there is none, or more than one."""
    found = [s for s in stages if isinstance(s, Transport)]
    if len(found) != 1:
        names = [type(s).__name__ for s in found] or "none"
        raise CompositionError(f"recipe.stages must hold one transport, found {names}")
    return found[0]


def compose_timeouts(settings: Mapping[str, Any]) -> Timeouts:
    return Timeouts(**settings["session"]["timeouts"])
