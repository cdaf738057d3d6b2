"""A process group of gather's own: prefetch runs gather in a thread of its own, which must share no group with the trainer's."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from stages.comm import Comm
from stages.errors import TransportError, WaitTimeout, WeightstreamError
from stages.run import Run, Timeouts

dist: Any = torch.distributed

_ALARM_EVERY = 0.25  # seconds between looks at whether another rank has failed


class Stopped(WeightstreamError):
    """The update was given up while gather waited for another rank."""


class OwnGroup:
    """All trainer ranks, over nccl where tensors are on a GPU and gloo elsewhere. Made and closed by all ranks together.

    An exchange that another rank will never join ends when that rank's failure is known, at latest after
    `session.timeouts.put` or `.agree` without any progress; the group is useless then and must be abandoned.
    """

    def __init__(self, run: Run) -> None:
        self.device = run.device if run.device.type != "cpu" else torch.device("cpu")
        self._comm: Comm = run.comm
        self._timeouts: Timeouts = run.timeouts
        self.stop = threading.Event()
        # The group's own limit only has to end what nobody waits for any more; slow engines are legitimate.
        backstop = 10 * max(run.timeouts.put, run.timeouts.agree)
        try:
            self._group = dist.new_group(
                backend="gloo" if self.device.type == "cpu" else None, timeout=timedelta(seconds=backstop)
            )
        except RuntimeError as error:
            raise TransportError(f"gather: the trainer ranks could not form a process group: {error}") from error

    def swap(self, received: torch.Tensor, sent: torch.Tensor, incoming: list[int], outgoing: list[int]) -> Any:
        """Start sending each rank its bytes of `sent` while receiving each rank's into `received`. Collective."""
        try:
            return dist.all_to_all_single(received, sent, incoming, outgoing, group=self._group, async_op=True)
        except RuntimeError as error:
            raise self._lost(error) from error

    def wait(self, work: Any) -> None:
        """Until an exchange is through. Raises RemoteRankError, WaitTimeout, TransportError or Stopped."""
        pause, looked, seen = 1e-5, time.monotonic(), self._comm.meetings
        deadline = looked + max(self._timeouts.put, self._timeouts.agree)
        while not work.is_completed():
            time.sleep(pause)
            pause = min(2 * pause, 0.002)
            if self.stop.is_set():
                raise Stopped("the update was given up")
            now = time.monotonic()
            if now - looked > _ALARM_EVERY:
                looked = now
                self._comm.check()
                if (met := self._comm.meetings) != seen:
                    seen, deadline = met, now + max(self._timeouts.put, self._timeouts.agree)
            if now > deadline:
                raise WaitTimeout(
                    f"gather: another trainer rank did not send its shares within "
                    f"{max(self._timeouts.put, self._timeouts.agree)} s (session.timeouts.put, .agree): it died or hangs"
                )
        try:
            work.wait()
        except RuntimeError as error:
            raise self._lost(error) from error

    def close(self) -> None:
        """Free it. Only after exchanges that all went through."""
        dist.destroy_process_group(self._group)

    def abandon(self, works: list[Any]) -> None:
        """Let go of a group in which an exchange may be stuck, without waiting for that."""
        group = self._group
        threading.Thread(target=_outlive, args=(group, works), name="weightstream-abandoned", daemon=True).start()
        del self._group

    def _lost(self, error: Exception) -> WeightstreamError:
        """A dropped connection: the other rank says why it left, if it still can."""
        for _ in range(8):
            self._comm.check()
            time.sleep(_ALARM_EVERY)
        return TransportError(f"gather: lost a trainer rank: {error}")


def _outlive(group: Any, works: list[Any]) -> None:
    """Hold what a stuck exchange still uses until it ends; others notice at once that the group is gone."""
    for work in works:
        try:
            work.wait()
        except RuntimeError:
            continue
    dist.destroy_process_group(group)
