"""A trainer that does not train: the weights of an HF checkpoint folder."""

from __future__ import annotations

from pathlib import Path

from pipelines.trainers.base import Trainer
from stages.gather.checkpoint import Checkpoint


class CheckpointTrainer(Trainer):
    """Streams a safetensors folder of any architecture, sharded or not. Raises ConfigError for anything else."""

    def __init__(self, path: str) -> None:
        Checkpoint(path)  # only reads the headers: what is wrong with the folder shows before an engine is touched
        self.reference = Path(path)
        self.source = self.reference

    def step(self) -> None:
        """Nothing to do."""
