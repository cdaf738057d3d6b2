"""What the loaders of all protocols share."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from pipelines.engine.checkpoint import Checkpoint
from pipelines.engine.weights import UnknownNameError, Weights
from stages.errors import ConfigError, TransportError
from stages.transport.group import BroadcastGroup
from stages.transport.messages import GroupInit


@dataclass(slots=True)
class Outcome:
    """What one call did on one rank.

    `applied` lists the tensors written, in order, also when a later one failed; `notes` what a real engine would have
    accepted without a word; `error` what its loader would have raised, and `stage` where: receive, load or init.
    """

    applied: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    error: str | None = None
    stage: str = "load"


class Loader:
    """One rank's receiving end. Subclasses add the calls of their protocol; all answer with an Outcome."""

    def __init__(self, rank: int, weights: Weights, device: torch.device, model_type: str) -> None:
        self.rank = rank
        self.weights = weights
        self.device = device
        self.model_type = model_type
        self.groups: dict[str, BroadcastGroup] = {}

    def digests(self) -> dict[str, str]:
        """Per tensor; see `stages.digest`."""
        return self.weights.digests()

    def fill(self, value: float) -> None:
        """Overwrite every tensor."""
        self.weights.fill(value)

    def close(self) -> None:
        while self.groups:
            self.groups.popitem()[1].destroy()

    def ignores(self, name: str) -> bool:
        """Whether the engine's loader skips this unknown name. The default raises for all."""
        return False

    def skips(self, name: str) -> bool:
        """Whether the engine's loader skips this known name: by default a tied alias, whose owner is sent instead."""
        return name in self.weights.tied

    def load(self, tensors: Iterable[tuple[Any, torch.Tensor]], outcome: Outcome) -> None:
        """Apply whole tensors in order; the first one that fails ends it, earlier ones stay applied."""
        for name, value in tensors:
            if not isinstance(name, str):
                outcome.error = f"a tensor is called by a {type(name).__name__}"
                return
            if self.skips(name):
                continue
            try:
                self.apply(name, value, outcome)
            except UnknownNameError as error:
                if self.ignores(name):
                    outcome.notes.append(f"unknown name {name} was ignored")
                    continue
                outcome.error = repr(str(error))
                return
            except Exception as error:
                outcome.error = str(error)
                return

    def apply(self, name: str, value: torch.Tensor, outcome: Outcome) -> None:
        """Write one tensor and record it."""
        note = self.weights.apply(name, value)
        outcome.applied.append(self.weights.tied.get(name, name))
        if note is not None:
            outcome.notes.append(note)

    def load_folder(self, folder: str) -> Outcome:
        """Apply a checkpoint folder that this process can see."""
        outcome = Outcome(stage="receive")
        try:
            checkpoint = Checkpoint(folder)
        except ConfigError as error:
            outcome.error = str(error)
            return outcome
        outcome.stage = "load"
        try:
            self.load(checkpoint.tensors(), outcome)
        except Exception as error:
            outcome.error = str(error)
        return outcome

    def join_group(self, init: dict[str, Any]) -> Outcome:
        """Join a group as `rank_offset` + this rank; blocks until all are there."""
        outcome = Outcome(stage="init")
        wanted = GroupInit(**init)
        try:
            self.groups[wanted.group_name] = BroadcastGroup.join(wanted, wanted.rank_offset + self.rank, self.device)
        except TransportError as error:
            outcome.error = str(error)
        return outcome

    def leave_group(self, name: str) -> Outcome:
        self.groups.pop(name).destroy()
        return Outcome()


def merge(outcomes: list[Outcome]) -> Outcome:
    """The answer of an engine: rank 0's, with the first rank's error."""
    merged = outcomes[0]
    for outcome in outcomes:
        if outcome.error is not None:
            return Outcome(merged.applied, merged.notes, outcome.error, outcome.stage)
    return merged
