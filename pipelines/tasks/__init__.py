"""What `task=` names besides a run: plan, doctor, matrix. None of them changes an engine; each returns an exit code."""

from __future__ import annotations

from typing import Any


def run(settings: dict[str, Any]) -> int:
    """Do the task that `settings` name, and print what came of it. Raises WeightstreamError."""
    task = settings["task"]
    if task == "plan":
        from pipelines.tasks import plan

        return plan.run(settings)
    raise AssertionError(f"task={task} is not in the schema")
