from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def small_checkpoint() -> Path:
    """A small HF folder, in the cache of the toy trainer."""
    from pipelines.trainers.toy import ToyTrainer

    return ToyTrainer(layers=1, hidden_size=64).reference
