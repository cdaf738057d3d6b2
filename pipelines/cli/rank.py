"""The process of a trainer rank above 0; started by pipelines/world.py, or by torchrun as run.py itself."""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

from pipelines.cli.job import show
from stages.errors import RemoteRankError, UpdateFailed, WeightstreamError


def main() -> int:
    """One of the ranks that rank 0 has started on this machine."""
    threading.Thread(target=_end_with_rank_0, daemon=True, name="weightstream-rank-0").start()
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    from pipelines import world

    rank, size, port = map(int, sys.argv[1:])
    world.join_local(rank, size, port)
    return world.follow(_run)


def under_torchrun() -> int:
    """One of the ranks that torchrun has started beside rank 0."""
    from pipelines import world

    world.join()
    return world.follow(_run)


def _run(settings: dict[str, Any]) -> int:
    from pipelines.main import make_updates

    try:
        return make_updates(settings)
    except WeightstreamError as error:
        cause = error.__cause__ if isinstance(error, UpdateFailed) else error
        if not isinstance(cause, RemoteRankError):  # which the rank that it happened on has said
            show(error)
        return 1


def _end_with_rank_0() -> None:
    """End this process once rank 0's end of the pipe is closed: it waits for nothing of ours."""
    while os.read(0, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
