"""Other processes that run functions of the tests.

They are forked from a server that has imported the large libraries once, which makes each of them cheap.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest


@dataclass
class Outcome:
    """What became of a call: its value, or the error it raised (class name, text, full traceback)."""

    value: Any = None
    error: str | None = None
    text: str = ""
    trace: str = ""

    def __str__(self) -> str:
        return f"{self.error}: {self.text}" if self.error else f"returned {self.value!r}"


class Pool:
    """`size` processes, numbered from 0."""

    def __init__(self, size: int) -> None:
        context = _forkserver()
        self._pipes: list[Connection] = []
        self.processes = []
        for _ in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(process)

    def start(self, index: int, function: Callable[..., Any], *args: Any) -> None:
        self._pipes[index].send((function, args))

    def result(self, index: int, timeout: float = 60.0) -> Outcome:
        """The outcome of the call that runs there. A process that died is the error "EOFError"."""
        if not self._pipes[index].poll(timeout):
            raise AssertionError(f"process {index} did not answer within {timeout} s")
        try:
            outcome: Outcome = self._pipes[index].recv()
        except (EOFError, ConnectionError) as error:
            return Outcome(error="EOFError", text=str(error))
        return outcome

    def each(self, function: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Outcome]:
        """`function(index, *args)` in every process at once."""
        for index in range(len(self.processes)):
            self.start(index, function, index, *args)
        return [self.result(index, timeout) for index in range(len(self.processes))]

    def call(self, function: Callable[..., Any], *args: Any, index: int = 0, timeout: float = 60.0) -> Any:
        """The value of `function(*args)` in one process; its error fails the test with the traceback from there."""
        self.start(index, function, *args)
        outcome = self.result(index, timeout)
        assert outcome.error is None, f"in the other process:\n{outcome.trace}"
        return outcome.value

    def kill(self, index: int) -> None:
        self.processes[index].kill()
        self.processes[index].join(10.0)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process, pipe in zip(self.processes, self._pipes, strict=True):
            process.join(10.0)
            pipe.close()


@cache
def _forkserver() -> Any:
    """A server that has imported what all tests need; it finds our packages by PYTHONPATH only."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["support.adapters", "support.vllm_like", "safetensors.torch", "torch.distributed"])
    tests = Path(__file__).parents[1]
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(tests.parent), str(tests), before]))
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    return context


def _serve(pipe: Connection) -> None:
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            outcome = Outcome(function(*args))
        except BaseException as error:
            outcome = Outcome(error=type(error).__name__, text=str(error), trace=traceback.format_exc())
        pipe.send(outcome)


@pytest.fixture(scope="session")
def child() -> Iterator[Pool]:
    """One other process, shared by all tests: leave it as you found it."""
    pool = Pool(1)
    yield pool
    pool.close()


@pytest.fixture
def victim() -> Iterator[Pool]:
    """One other process of this test alone, to be killed."""
    pool = Pool(1)
    yield pool
    pool.close()


def _join(rank: int, size: int, port: int) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)


def ranks(size: int) -> Pool:
    """`size` processes that are the ranks of a gloo process group."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pool = Pool(size)
    failed = [str(o) for o in pool.each(_join, size, port) if o.error]
    assert not failed, failed
    return pool


@pytest.fixture(scope="session")
def pair() -> Iterator[Pool]:
    """Two trainer ranks, shared by all tests: leave them in step with each other."""
    pool = ranks(2)
    yield pool
    pool.close()
