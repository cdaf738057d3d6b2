"""The trainer ranks of a run: processes of this machine that rank 0 starts, or those that torchrun started.

Rank 0 is the run itself: it composes the config, talks to the engines, prints and reports. The others are sent its settings,
resolved, and do the same updates in silence.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

import torch.distributed

from pipelines import torchrun
from stages.errors import ConfigError, WaitTimeout, WeightstreamError

dist: Any = torch.distributed

_TIMEOUT = timedelta(seconds=300)  # until all ranks have met; of a collective of the trainer's
_HERE = "weightstream/here"
_DONE = "weightstream/done"
_GRACE_SECONDS = 15.0  # that a rank may take to end
_LAST_LINES = 5


@contextlib.contextmanager
def lead(settings: Mapping[str, Any]) -> Iterator[None]:
    """As rank 0: while the block runs, all ranks are up and torch.distributed connects them, if there are several.

    Raises ConfigError when torchrun has started other ranks than the config asks for, WeightstreamError with its last words
    when a rank that was started here ends before its time.
    """
    count = settings["launcher"]["ranks"]
    if torchrun.ranks() > 1:
        if count > 1:
            raise ConfigError(
                f"launcher.ranks={count}, but torchrun has started {torchrun.ranks()} ranks already\n"
                "  under torchrun leave launcher.ranks out"
            )
        join()
        with _leading(settings):
            yield
    elif count > 1:
        with _Processes(count) as processes, processes.watched(), _leading(settings):
            yield
    else:
        yield


def follow(work: Callable[[dict[str, Any]], int]) -> int:
    """As any other rank of torch.distributed: do `work` with the settings of rank 0, and end when it has ended.

    Under torchrun a rank that ends early with an error takes the others with it, and so their reports.
    """
    logging.getLogger("weightstream").addHandler(logging.NullHandler())  # rank 0 says it
    try:
        return work(_shared(None))
    finally:
        with contextlib.suppress(RuntimeError):  # rank 0 and its store are gone
            dist.distributed_c10d._get_default_store().wait([_DONE], _TIMEOUT)
        dist.destroy_process_group()


def join() -> None:
    """Meet the other ranks that torchrun started."""
    dist.init_process_group("gloo", timeout=_TIMEOUT)


def make_store(address: str, size: int) -> Any:
    """As rank 0: the store that all `size` ranks meet at, on a port that the system chooses."""
    return dist.TCPStore(address, 0, size, is_master=True, timeout=_TIMEOUT, wait_for_workers=False)


@contextlib.contextmanager
def joined(rank: int, size: int, address: str, port: int, store: Any) -> Iterator[None]:
    """torch.distributed over `size` ranks while the block runs, if there are several; `store` is what rank 0 made."""
    if size == 1:
        yield
        return
    store = store or dist.TCPStore(address, port, size, is_master=False, timeout=_TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=_TIMEOUT)
    try:
        yield
    finally:
        dist.destroy_process_group()


def join_local(rank: int, size: int, port: int) -> None:
    """Meet the other ranks on this machine, at the store of rank 0."""
    store = dist.TCPStore("127.0.0.1", port, size, is_master=False, timeout=_TIMEOUT)
    store.set(f"{_HERE}/{rank}", "1")
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=_TIMEOUT)


def _shared(settings: Mapping[str, Any] | None) -> dict[str, Any]:
    """What rank 0 has."""
    box = [settings]
    dist.broadcast_object_list(box)
    assert box[0] is not None
    return dict(box[0])


@contextlib.contextmanager
def _leading(settings: Mapping[str, Any]) -> Iterator[None]:
    try:
        _shared(settings)
        yield
    finally:
        with contextlib.suppress(RuntimeError):  # the store is gone with torchrun
            dist.distributed_c10d._get_default_store().set(_DONE, "1")
        dist.destroy_process_group()


class _Processes:
    """Ranks 1 to `count` - 1 as processes that end when we do; entering it meets them, leaving it waits for their end."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> _Processes:
        self._logs = tempfile.TemporaryDirectory(prefix="weightstream-")
        store = make_store("127.0.0.1", self._count)
        try:
            for rank in range(1, self._count):
                with open(self._log(rank), "wb") as log:
                    self._processes.append(_start(rank, self._count, store.port, log))
            with self.watched():
                self._await(store)
                dist.init_process_group("gloo", store=store, rank=0, world_size=self._count, timeout=_TIMEOUT)
        except BaseException:
            self._end(0.0)
            raise
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._end(_GRACE_SECONDS if kind is None else 2.0)  # after a failure they may be waiting for us

    def _await(self, store: Any) -> None:
        """Until all ranks are there: torch would wait its full time for one that has died."""
        deadline = time.monotonic() + _TIMEOUT.total_seconds()
        while not store.check([f"{_HERE}/{rank}" for rank in range(1, self._count)]):
            if self._lost() is not None or time.monotonic() > deadline:
                raise WaitTimeout(f"the trainer ranks did not meet within {_TIMEOUT.total_seconds():.0f} s")
            time.sleep(0.02)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """What fails because a rank has died says so."""
        try:
            yield
        except Exception as error:
            lost = self._lost()
            if lost is None:
                raise
            raise WeightstreamError(lost) from error

    def _lost(self) -> str | None:
        for rank, process in enumerate(self._processes, 1):
            if process.poll() is not None:
                words = self._log(rank).read_text(errors="replace").strip().splitlines()[-_LAST_LINES:]
                return f"trainer rank {rank} ended with exit code {process.returncode}: " + " | ".join(words)
        return None

    def _end(self, grace: float) -> None:
        deadline = time.monotonic() + grace
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdin is not None
            process.stdin.close()
        self._logs.cleanup()

    def _log(self, rank: int) -> Path:
        return Path(self._logs.name) / f"rank-{rank}.log"


def _start(rank: int, size: int, port: int, log: IO[bytes]) -> subprocess.Popen[bytes]:
    root = str(Path(__file__).resolve().parent.parent)
    return subprocess.Popen(
        [sys.executable, "-m", "pipelines.cli.rank", str(rank), str(size), str(port)],
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=log,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))},
        start_new_session=True,  # Ctrl-C reaches rank 0 alone, which tells the others
    )
