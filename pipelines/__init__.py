"""weightstream: an RL trainer's weights into running inference engines, by a pipeline composed from config."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipelines.report import Report as Report
    from pipelines.report import UpdateReport as UpdateReport
    from pipelines.updater import WeightUpdater as WeightUpdater

__all__ = ["Report", "UpdateReport", "WeightUpdater"]


def __getattr__(name: str) -> Any:
    """Names are imported when they are used: torch takes a second, `--help` should not."""
    import importlib

    homes = {"WeightUpdater": "pipelines.updater", "Report": "pipelines.report", "UpdateReport": "pipelines.report"}
    if name not in homes:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(homes[name]), name)
