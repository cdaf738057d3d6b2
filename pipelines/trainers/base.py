"""What the command line asks of a trainer. A trainer of your own needs none of this: it calls WeightUpdater."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Score:
    """The trainer's own view of one generated token: its log-probability, and that of the likeliest token."""

    logprob: float
    best: float


class Trainer(ABC):
    """`reference`: the checkpoint folder that engines start from. `source`: what `WeightUpdater.update` is given.

    `tolerance`: how far an engine's log-probabilities may be from `score` when it has the same weights. With several ranks,
    made by launcher.ranks or torchrun, every rank makes one; torch.distributed connects them, and all methods are collective.
    """

    reference: Path
    source: Any
    tolerance: float = 0.0

    @abstractmethod
    def step(self) -> None:
        """Change the weights once."""

    def prompts(self) -> list[list[int]]:
        """Token ids to generate from for the proof; none where the trainer has no forward pass of its own."""
        return []

    def score(self, input_ids: Sequence[int], output_ids: Sequence[int]) -> list[Score]:
        """What the weights as the engines should have them say about each token of `output_ids` after `input_ids`."""
        raise NotImplementedError
