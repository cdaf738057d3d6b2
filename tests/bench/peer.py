"""The other process of a limit or a baseline: it takes what arrives into memory of its own and says so."""

from __future__ import annotations

import ctypes
import mmap
import multiprocessing
import os
import pickle
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from stages.transport.group import BroadcastGroup
from stages.transport.messages import GroupInit
from tests.bench.models import MODELS, arena


class Peer:
    """A process with parameters of its own. `start` asks it to do something, `finish` waits until it has."""

    def __init__(self, model: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(model, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self.finish()  # it has its memory

    def start(self, action: Callable[..., Any], *arguments: Any) -> None:
        """Have it run `action(self, ...)`, one of the functions of this module."""
        self.pipe.send((action, arguments))

    def finish(self) -> Any:
        """What the action returned. Raises RuntimeError with its traceback if it failed."""
        failed, value = self.pipe.recv()
        if failed:
            raise RuntimeError(f"the other process failed:\n{value}")
        return value

    def call(self, action: Callable[..., Any], *arguments: Any) -> Any:
        self.start(action, *arguments)
        return self.finish()

    def close(self) -> None:
        self.pipe.close()
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


class Here:
    """What the other process has."""

    def __init__(self, model: str, pipe: Connection) -> None:
        self.pipe = pipe
        self.block, self.params = arena(MODELS[model]())
        self.ring: torch.Tensor | None = None
        self.groups: dict[str, BroadcastGroup] = {}


def _serve(model: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    here = Here(model, pipe)
    pipe.send((False, None))
    while True:
        try:
            action, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((False, action(here, *arguments)))
        except Exception:
            pipe.send((True, traceback.format_exc()))


def map_shared(path: str, nbytes: int) -> torch.Tensor:
    """A file of shared memory, mapped and touched."""
    with open(path, "r+b") as file:
        mapped = torch.frombuffer(mmap.mmap(file.fileno(), nbytes), dtype=torch.uint8)
    mapped.view(-1, mmap.PAGESIZE)[:, 0].sum()
    return mapped


def zero(here: Here) -> None:
    here.block.zero_()


def sample(here: Here) -> list[float]:
    """The first element of every tensor."""
    return [float(p.view(-1)[0]) for p in here.params.values()]


def attach_ring(here: Here, path: str, nbytes: int) -> None:
    here.ring = map_shared(path, nbytes)


def take_ring(here: Here, slot_bytes: int, slots: int) -> None:
    """Copy every slot out as it is filled: one byte through the pipe says so, one back says that it is free."""
    assert here.ring is not None
    fd, target, source = here.pipe.fileno(), here.block.data_ptr(), here.ring.data_ptr()
    for number, start in enumerate(range(0, here.block.numel(), slot_bytes)):
        size = min(slot_bytes, here.block.numel() - start)
        os.read(fd, 1)
        ctypes.memmove(target + start, source + number % slots * slot_bytes, size)
        os.write(fd, b".")


def take_safetensors(here: Here, path: str) -> None:
    for name, tensor in load_file(path).items():
        here.params[name].copy_(tensor)


def take_handles(here: Here) -> None:
    """Copy out every pickled list of named tensors that comes, until an empty message."""
    while message := here.pipe.recv_bytes():
        for name, tensor in pickle.loads(message):
            here.params[name].copy_(tensor)
        del tensor
        here.pipe.send_bytes(b".")


def join(here: Here, init: GroupInit, rank: int) -> None:
    here.groups[init.group_name] = BroadcastGroup.join(init, rank)


def take_broadcast(here: Here, group: str, nbytes: int) -> None:
    for part in here.block.split(nbytes):
        here.groups[group].broadcast(part)


def leave(here: Here, group: str) -> None:
    here.groups.pop(group).destroy()


def take_file(here: Here, path: str) -> None:
    view = here.block.numpy().data
    with Path(path).open("rb", buffering=0) as file:
        while view and (got := file.readinto(view)):
            view = view[got:]
