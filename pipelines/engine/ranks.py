"""Tensor-parallel ranks as processes.

Rank 0 is the server process; every further rank is a process of its own, with its own full replica of the weights. Real
engines shard there; ours holds whole tensors on each rank, decodes each rank's own payload and joins groups under each
rank's own number, so that per-rank mistakes show, and generates on rank 0 only.
"""

from __future__ import annotations

import multiprocessing
import threading
from multiprocessing.connection import wait
from typing import Any

import torch

from pipelines.engine.loading.base import Loader
from pipelines.engine.rank_process import serve_rank


class RankLostError(Exception):
    """A rank's process ended or its call raised something that no engine catches."""


class Ranks:
    """All ranks of one engine. Calls go to all of them at once, since in a collective they wait for one another."""

    def __init__(self, backend: str, tp: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._remotes = [_Remote(context, backend, rank) for rank in range(1, tp)]
        self._one_call = threading.Lock()
        self.local: Loader

    def start(self, local: Loader, folder: str, dtype: str, device: str, tied: dict[str, str], model_type: str) -> None:
        """Give every remote rank its replica; the processes have been importing since the constructor."""
        self.local = local
        for remote in self._remotes:
            remote.send("load", (folder, dtype, device_of(device, remote.rank), tied, model_type))
        for remote in self._remotes:
            remote.answer()

    def call(self, method: str, *args: Any) -> list[Any]:
        """Every rank's result, rank 0 first. Raises RankLostError when a rank's process is gone."""
        with self._one_call:
            for remote in self._remotes:
                remote.send(method, args)
            try:
                first = getattr(self.local, method)(*args)
            finally:
                rest = [remote.answer() for remote in self._remotes]
            return [first, *rest]

    def wait_for_loss(self) -> int:
        """Block until a rank process ends; returns its rank."""
        ended = wait([remote.process.sentinel for remote in self._remotes])
        return next(r.rank for r in self._remotes if r.process.sentinel in ended)

    @property
    def pids(self) -> list[int]:
        return [remote.process.pid for remote in self._remotes if remote.process.pid is not None]

    def kill(self) -> None:
        """End all rank processes at once, whatever they are waiting for."""
        for remote in self._remotes:
            remote.process.kill()
        for remote in self._remotes:
            remote.process.join(1)


class _Remote:
    def __init__(self, context: Any, backend: str, rank: int) -> None:
        self.rank = rank
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(
            target=serve_rank, args=(theirs, backend, rank), name=f"rank-{rank}", daemon=True
        )
        self.process.start()
        theirs.close()

    def send(self, method: str, args: tuple[Any, ...]) -> None:
        try:
            self._pipe.send((method, args))
        except OSError as error:
            raise RankLostError(f"rank {self.rank} is gone") from error

    def answer(self) -> Any:
        try:
            ok, value = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise RankLostError(f"rank {self.rank} is gone") from error
        if not ok:
            raise RankLostError(f"rank {self.rank}: {value}")
        return value


def device_of(device: str, rank: int) -> str:
    """The device of a rank: on GPUs one each, as long as there are enough."""
    if not device.startswith("cuda"):
        return device
    return f"cuda:{rank % torch.cuda.device_count()}"
