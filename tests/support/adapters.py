"""Updates of the real adapters over scripted servers."""

from __future__ import annotations

from typing import Any

from pipelines.updater import WeightUpdater
from stages.run import Timeouts
from support.fakes import settings_for
from support.httpd import Server

TRANSPORTS: dict[str, dict[str, Any]] = {
    "ipc": {"_target_": "stages.transport.ipc.Ipc"},
    "nccl": {"_target_": "stages.transport.nccl.Nccl", "port": 0},
    "disk": {"_target_": "stages.transport.disk.Disk"},
}
TIMEOUTS = Timeouts(connect=5.0, control=20.0, put=20.0, group=20.0, agree=20.0)


def updater_over(
    server: Server, backend: dict[str, Any], transport: str = "ipc", tp: int = 1, capacity: int = 64, **settings: Any
) -> WeightUpdater:
    """A WeightUpdater with one engine, the server, of `tp` ranks. `path=` is disk's."""
    chosen = dict(TRANSPORTS[transport])
    if transport == "disk":
        chosen["path"] = str(settings.pop("path"))
    made = settings_for([server.url], transport=chosen, capacity=capacity, timeouts=TIMEOUTS, **settings)
    made["backend"] = backend
    made["engines"]["tp"] = tp
    return WeightUpdater(made)


def pieces(body: dict[str, Any], *names: str) -> dict[str, Any]:
    """Some fields of a request, for comparison; a missing one is an error."""
    return {name: body[name] for name in names}
