"""What the machine can do at best with the same bytes, and what a user would do without us. Each is a `Way`."""

from __future__ import annotations

import ctypes
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import torch
import torch.multiprocessing
from safetensors.torch import save_file

from stages.threads import start
from stages.transport.group import BroadcastGroup, GroupStore
from stages.transport.messages import GroupInit
from tests.bench import peer
from tests.bench.models import Weights
from tests.bench.peer import Peer

BUCKET = 256 << 20  # of the naive way: what trainers use today


class Way:
    """One way of bringing the weights of `model` into other processes. `once` returns the seconds that it took."""

    name: str

    def once(self) -> float:
        start = time.perf_counter()
        self.move()
        return time.perf_counter() - start

    def move(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Release what it holds."""


class MemcpyRing(Way):
    """Limit: memcpy into a ring of two shared slots and out of it, both processes at once."""

    def __init__(self, model: Weights, other: Peer, slot_bytes: int = 16 << 20, slots: int = 2) -> None:
        self.name = f"memcpy ring, {slots} x {slot_bytes >> 20} MiB"
        self._block, self._other, self._slot_bytes, self._slots = model.block, other, slot_bytes, slots
        with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
            os.posix_fallocate(file.fileno(), 0, slots * slot_bytes)
            self._ring = peer.map_shared(file.name, slots * slot_bytes)
            self._ring.zero_()
            other.call(peer.attach_ring, file.name, slots * slot_bytes)

    def move(self) -> None:
        slots, size, fd = self._slots, self._slot_bytes, self._other.pipe.fileno()
        self._other.start(peer.take_ring, size, slots)
        source, target, total = self._block.data_ptr(), self._ring.data_ptr(), self._block.numel()
        starts = range(0, total, size)
        for number, begin in enumerate(starts):
            if number >= slots:
                os.read(fd, 1)
            ctypes.memmove(target + number % slots * size, source + begin, min(size, total - begin))
            os.write(fd, b".")
        for _ in range(min(slots, len(starts))):
            os.read(fd, 1)
        self._other.finish()


class Broadcast(Way):
    """Limit: gloo broadcasts from where the weights are to where they belong, in messages of `nbytes`."""

    def __init__(self, model: Weights, others: list[Peer], nbytes: int) -> None:
        self.name = f"gloo broadcast, {nbytes >> 20} MiB messages, {len(others)} receiver{'s'[: len(others) > 1]}"
        self._block, self._others, self._nbytes = model.block, others, nbytes
        self._store = GroupStore("127.0.0.1", 0, 60)
        init = GroupInit("127.0.0.1", self._store.port, 1, 1 + len(others), f"raw-{nbytes}", "gloo", 60)
        lead = start(lambda: BroadcastGroup.lead(self._store, init, torch.device("cpu")), "lead")
        for rank, other in enumerate(others, 1):
            other.start(peer.join, init, rank)
        for other in others:
            other.finish()
        self._group = lead.result()

    def move(self) -> None:
        for other in self._others:
            other.start(peer.take_broadcast, self._group.name, self._nbytes)
        for part in self._block.split(self._nbytes):
            self._group.broadcast(part)
        for other in self._others:
            other.finish()

    def close(self) -> None:
        self._group.destroy()
        for other in self._others:
            other.call(peer.leave, self._group.name)


class RawFile(Way):
    """Limit: write, fsync, read."""

    name = "write, fsync, read one file"

    def __init__(self, model: Weights, other: Peer, folder: Path) -> None:
        self._block, self._other, self._path = model.block, other, folder / "raw"

    def move(self) -> None:
        view = self._block.numpy().data
        with open(self._path, "wb", buffering=0) as file:
            while view:
                view = view[file.write(view) :]
            os.fsync(file.fileno())
        self._other.call(peer.take_file, str(self._path))

    def once(self) -> float:
        with suppress(FileNotFoundError):
            self._path.unlink()  # every update writes a new file
        return super().once()


class Safetensors(Way):
    """Baseline: save_file into shared memory, load_file, copy."""

    name = "safetensors in /dev/shm, load, copy"

    def __init__(self, model: Weights, other: Peer) -> None:
        self._tensors, self._other = dict(model.named_parameters()), other

    def move(self) -> None:
        with tempfile.NamedTemporaryFile(dir="/dev/shm", suffix=".safetensors") as file:
            save_file(self._tensors, file.name)
            self._other.call(peer.take_safetensors, file.name)


class Handles(Way):
    """Baseline: pickled handles of tensors in freshly allocated shared buckets, as trainers do it today."""

    name = f"pickled handles, new {BUCKET >> 20} MiB buckets"

    def __init__(self, model: Weights, other: Peer) -> None:
        self._tensors, self._other = dict(model.named_parameters()), other

    def move(self) -> None:
        before = torch.multiprocessing.get_sharing_strategy()
        torch.multiprocessing.set_sharing_strategy("file_system")
        try:
            self._other.start(peer.take_handles)
            for names in self._buckets():
                self._send(names)
            self._other.pipe.send_bytes(b"")
            self._other.finish()
        finally:
            torch.multiprocessing.set_sharing_strategy(before)

    def _buckets(self) -> Iterator[list[str]]:
        names: list[str] = []
        size = 0
        for name, tensor in self._tensors.items():
            if names and size + tensor.nbytes > BUCKET:
                yield names
                names, size = [], 0
            names.append(name)
            size += tensor.nbytes
        yield names

    def _send(self, names: list[str]) -> None:
        tensors = [self._tensors[n] for n in names]
        bucket = torch.empty(sum(t.nbytes for t in tensors), dtype=torch.uint8).share_memory_()
        parts = bucket.split([t.nbytes for t in tensors])
        views = [p.view(t.dtype).view(t.shape) for p, t in zip(parts, tensors, strict=True)]
        torch._foreach_copy_(views, tensors)
        self._other.pipe.send_bytes(bytes(ForkingPickler.dumps(list(zip(names, views, strict=True)))))
        self._other.pipe.recv_bytes()
