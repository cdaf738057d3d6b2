from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pipelines.engine.settings import Settings
from tests.engine.checkpoints import Folders, write_all
from tests.engine.client import LocalEngine

Start = Callable[..., LocalEngine]


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    torch.set_num_threads(1)
    return write_all(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture
def start(folders: Folders) -> Iterator[Start]:
    """`start(backend, model=folder, **settings)` serves an engine until the end of the test."""
    engines: list[LocalEngine] = []

    def starter(backend: str, model: Path | None = None, **settings: Any) -> LocalEngine:
        engine = LocalEngine(Settings(model=str(model or folders.qwen3_a), backend=backend, **settings))
        engines.append(engine)
        return engine

    yield starter
    for engine in engines:
        engine.close()
