"""A disk or a shared memory that is really full: a small file system of its own, in a process that sees no other."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fakes import engines_of, updater_for
from support.processes import Pool

from stages.errors import TransportError, UpdateFailed

CLONE_NEWNS, MS_REC, MS_PRIVATE = 0x20000, 0x4000, 0x40000
MB = 1 << 20

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="mounting a file system takes root")


def small_world(disk: str) -> None:
    """From now on /dev/shm and `disk` are 8 MB each, for this process only."""
    libc = ctypes.CDLL(None, use_errno=True)

    def call(name: str, *args: Any) -> None:
        if getattr(libc, name)(*args):
            raise OSError(ctypes.get_errno(), name)

    call("unshare", CLONE_NEWNS)
    call("mount", None, b"/", None, MS_REC | MS_PRIVATE, None)
    for place in ("/dev/shm", disk):
        call("mount", b"tmpfs", place.encode(), b"tmpfs", 0, b"size=8m")


class Large(torch.nn.Module):
    def __init__(self, megabytes: int) -> None:
        super().__init__()
        for i in range(megabytes):
            self.register_parameter(f"p{i}", torch.nn.Parameter(torch.full((MB // 4,), float(i))))


def push(transport: dict[str, Any], sizes: list[int], capacity: int, fill: str | None = None) -> list[dict[str, Any]]:
    """One update per size; with `fill`, a file there takes what is left once the second update has sent a bucket."""
    results = []
    with updater_for(transport=transport, wire="folder", capacity=capacity) as updater:
        (engine,) = engines_of(updater)
        for number, megabytes in enumerate(sizes):
            if fill and number == 1:
                engine.script("put", lambda: Path(fill).write_bytes(b"x" * (4 * MB + MB // 2)))
            try:
                updater.update(Large(megabytes))
                error = ""
            except (TransportError, UpdateFailed) as caught:
                error = f"{type(caught).__name__}: {caught}"
            if fill:
                Path(fill).unlink(missing_ok=True)
            results.append({"error": error, "serving": engine.serving, "held": len(engine.weights)})
    return results


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Any:
    disk = str(tmp_path_factory.mktemp("disk"))
    pool = Pool(1)
    pool.start(0, small_world, disk)
    if (outcome := pool.result(0)).error:
        pool.close()
        pytest.skip(f"no mount namespace here: {outcome}")
    yield pool, disk
    pool.close()


def test_shared_memory_that_is_too_small_refuses_before_the_pause_and_says_the_way_out(small: Any) -> None:
    pool, _ = small
    ipc = {"_target_": "stages.transport.ipc.Ipc"}
    first, second, third = pool.call(push, ipc, [1, 16, 1], 16 * MB)
    assert first["error"] == third["error"] == ""
    assert second["error"].startswith("TransportError: need ")
    assert "bucket.capacity" in second["error"]
    assert "--shm-size" in second["error"]
    assert second["serving"]
    assert third["held"] == 1
    assert pool.call(os.listdir, "/dev/shm") == []


def test_a_disk_that_is_too_small_refuses_before_the_pause(small: Any) -> None:
    pool, disk = small
    transport = {"_target_": "stages.transport.disk.Disk", "path": f"{disk}/versions", "keep": 1}
    first, second, third = pool.call(push, transport, [1, 16, 1], MB)
    assert first["error"] == third["error"] == ""
    assert "bytes needed" in second["error"]
    assert "transport.path" in second["error"]
    assert second["serving"]
    assert pool.call(os.listdir, f"{disk}/versions") == ["2"]


def test_a_disk_that_fills_up_meanwhile_publishes_nothing(small: Any) -> None:
    pool, disk = small
    transport = {"_target_": "stages.transport.disk.Disk", "path": f"{disk}/full", "keep": 1}
    first, second, third = pool.call(push, transport, [1, 2, 1], MB, f"{disk}/other")
    assert first["error"] == third["error"] == ""
    assert "the disk is full" in second["error"]
    assert "transport.path" in second["error"]
    assert pool.call(os.listdir, f"{disk}/full") == ["3"]
