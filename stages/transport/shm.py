"""Shared memory that torch engines can open as it is, and that we can map without torch's help.

A segment is a torch storage shared by file name (POSIX shared memory, mode 0600, random name). Its layout, seen in torch
2.4 to 2.14: a 64-byte header whose first integer counts the processes that hold it, then the bytes. torch's own
`torch_shm_manager` removes the file when this process dies, however it dies.
"""

from __future__ import annotations

import contextlib
import errno
import io
import mmap
import os
import pickle
import re
import struct
import threading
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing import reductions

from stages.errors import TransportError
from stages.transport.cuda_ipc import DEVICE_ARG, device_uuid

SHM_DIR = Path("/dev/shm")
HEADER_BYTES = 64
_HOLDERS = 1 << 30
_NAME = re.compile(r"torch_[A-Za-z0-9_-]{1,200}")

_starting = threading.Lock()
_manager_started = False


class Segment:
    """One shared buffer of `nbytes`, touched once. The creator is the only one who removes the file.

    Raises TransportError when /dev/shm has not that much room.
    """

    def __init__(self, nbytes: int) -> None:
        need = nbytes + HEADER_BYTES
        room = os.statvfs(SHM_DIR)
        free = room.f_bavail * room.f_frsize
        if need > free:
            raise _no_room(need, free)
        with _detached_manager():
            self._storage: Any = torch.UntypedStorage._new_using_filename_cpu(max(nbytes, 1))
        _, handle, _ = self._storage._share_filename_cpu_()
        self.name: str = handle.decode().lstrip("/")
        self.nbytes = nbytes
        fd = os.open(SHM_DIR / self.name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        with open(fd, "r+b", buffering=0) as file:
            try:
                # Reserve the pages: a full /dev/shm is an error here, not a SIGBUS at the first write.
                os.posix_fallocate(file.fileno(), 0, need)
            except OSError as error:
                self.unlink()
                if error.errno == errno.ENOSPC:
                    raise _no_room(need, free) from error
                raise
            finally:
                # Whoever opens it through torch counts itself out, once per time: torch must never see the last one go,
                # since it would remove the file, or abort where it is gone.
                file.write(struct.pack("i", _HOLDERS))
        self.memory = torch.empty(0, dtype=torch.uint8).set_(self._storage, 0, (nbytes,), (1,))
        self.memory.zero_()

    def unlink(self) -> None:
        """Remove the file; memory that is still mapped somewhere stays valid there."""
        with contextlib.suppress(FileNotFoundError):
            (SHM_DIR / self.name).unlink()


@contextlib.contextmanager
def _detached_manager() -> Iterator[None]:
    """Let `torch_shm_manager`, which the first segment starts, inherit /dev/null as stderr instead of ours.

    It lives as long as any engine maps a segment, and `train.py 2>&1 | tee log` would wait for it that long.
    """
    global _manager_started
    with _starting:
        if _manager_started:
            yield
            return
        kept, null = os.dup(2), os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        os.dup2(null, 2)
        try:
            yield
            _manager_started = True
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            os.close(null)


def _no_room(need: int, free: int) -> TransportError:
    return TransportError(
        f"need {need} bytes of shared memory (/dev/shm), {free} are free; lower bucket.capacity or bucket.slots, "
        f"or give the container more (docker --shm-size)"
    )


def attach(name: str, nbytes: int) -> torch.Tensor:
    """Map a segment of another process: uint8 [nbytes]. Never removes it and leaves no tracker behind.

    Raises TransportError when it does not exist, is not ours to open, or is smaller than `nbytes`.
    """
    fd = _open(name, nbytes)
    try:
        mapped = mmap.mmap(fd, nbytes + HEADER_BYTES)
    finally:
        os.close(fd)
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(mapped, dtype=torch.uint8, offset=HEADER_BYTES, count=nbytes)


def check_segment(name: str, nbytes: int) -> None:
    """Raise TransportError where `attach` would."""
    os.close(_open(name, nbytes))


def _open(name: str, nbytes: int) -> int:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise TransportError(f"{name!r} is not the name of a shared-memory segment of ours")
    if type(nbytes) is not int or not 0 <= nbytes < 1 << 62:
        raise TransportError(f"shared memory {name}: {nbytes!r} is no number of bytes")
    path = SHM_DIR / name
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise TransportError(
            f"cannot open shared memory {path}: {error.strerror}; the sender is gone, or this engine does not share "
            f"/dev/shm with it (containers need --ipc=host or a common /dev/shm)"
        ) from error
    size = os.fstat(fd).st_size
    if size < nbytes + HEADER_BYTES:
        os.close(fd)
        raise TransportError(f"shared memory {path} has {size} bytes, {nbytes + HEADER_BYTES} expected")
    return fd


class _HandlePickler(ForkingPickler):
    """Pickles tensors as handles: CPU storages by file name, CUDA tensors as IPC handles; never the bytes."""

    device_by_uuid = False

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.UntypedStorage) and obj.device.type == "cpu":
            if not obj.is_shared():
                raise TransportError("a CPU tensor outside shared memory cannot be sent as a handle")
            return reductions.rebuild_storage_filename, (torch.UntypedStorage, *obj._share_filename_cpu_())
        if self.device_by_uuid and isinstance(obj, torch.Tensor) and obj.is_cuda:
            rebuild, args = reductions.reduce_tensor(obj)
            return rebuild, (*args[:DEVICE_ARG], device_uuid(obj.device), *args[DEVICE_ARG + 1 :])
        return NotImplemented


def handle_pickle(obj: Any, device_by_uuid: bool = False) -> bytes:
    """Pickle `obj` with every tensor in it replaced by a handle that another process on this host can open.

    With `device_by_uuid` a CUDA handle names its GPU by UUID, for receivers that understand that (SGLang): an index means
    another GPU where CUDA_VISIBLE_DEVICES differs.
    """
    out = io.BytesIO()
    pickler = _HandlePickler(out, pickle.HIGHEST_PROTOCOL)
    pickler.device_by_uuid = device_by_uuid
    pickler.dump(obj)
    return out.getvalue()


def reduce_handle(tensor: torch.Tensor) -> tuple[Any, tuple[Any, ...]]:
    """`(rebuild function, its arguments)` of a handle, as torch's own reduction makes it."""
    reduced: tuple[Any, tuple[Any, ...]] = reductions.reduce_tensor(tensor)
    return reduced
