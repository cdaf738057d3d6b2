"""What `task=` names besides a run: plan, doctor, matrix. None of them changes an engine; each returns an exit code."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any


def run(settings: dict[str, Any]) -> int:
    """Do the task that `settings` name, and print what came of it. Raises WeightstreamError."""
    task: ModuleType = importlib.import_module(f"{__name__}.{settings['task']}")
    return int(task.run(settings))
