"""Worlds of a few trainer ranks: processes of their own on this machine, joined by gloo."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from support.processes import Pool


class World:
    """Processes that become trainer ranks for one call at a time."""

    def __init__(self) -> None:
        self._pool: Pool | None = None

    def run(self, size: int, function: Callable[..., Any], *args: Any, timeout: float = 150.0) -> list[Any]:
        """`function(rank, *args)` on `size` ranks with a default group; returns what each returned, by rank.

        Fails the test with a rank's traceback when it raised, died or did not end in time.
        """
        pool = self._pool
        if pool is None or len(pool.processes) < size:
            self.close()
            pool = self._pool = Pool(size)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        for rank in range(size):
            pool.start(rank, _as_rank, rank, size, port, function, args)
        try:
            outcomes = [pool.result(rank, timeout) for rank in range(size)]
            failed = [f"rank {rank}: {o}\n{o.trace}" for rank, o in enumerate(outcomes) if o.error]
            assert not failed, "\n".join(failed)
        except BaseException:
            self.close()  # some may still be inside
            raise
        return [o.value for o in outcomes]

    def close(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()


def _as_rank(rank: int, size: int, port: int, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=size, timeout=timedelta(seconds=60))
    try:
        return function(rank, *args)
    finally:
        dist.destroy_process_group()
