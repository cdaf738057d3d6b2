"""Shared-memory segments: who sees them, who removes them, what happens when there is no room."""

from __future__ import annotations

import base64
import errno
import io
import os
import pickle
import stat
import subprocess
import sys
import time
from pathlib import Path
from subprocess import PIPE
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.processes import Pool

from stages.backends.flattened import encode
from stages.errors import TransportError
from stages.transport import shm
from stages.transport.shm import HEADER_BYTES, SHM_DIR, Segment, attach, handle_pickle

ATTACHED: dict[str, Any] = {}  # in the other process: what it holds


def file_of(segment: Segment) -> Path:
    return SHM_DIR / segment.name


@pytest.fixture
def segment() -> Any:
    made = Segment(1000)
    yield made
    made.unlink()


def test_a_segment_is_for_its_owner_only_and_all_zero(segment: Segment) -> None:
    found = file_of(segment).stat()
    assert stat.S_IMODE(found.st_mode) == 0o600
    assert found.st_size >= 1000 + HEADER_BYTES
    assert segment.memory.shape == (1000,)
    assert not segment.memory.any()


def test_names_are_not_guessed() -> None:
    made = [Segment(1) for _ in range(4)]
    assert len({s.name for s in made}) == 4
    for one in made:
        one.unlink()
        one.unlink()  # twice is fine
    assert not any(file_of(s).exists() for s in made)


@pytest.mark.parametrize("nbytes", [1, 63, 4096, 1 << 20])
def test_any_size_works(nbytes: int) -> None:
    made = Segment(nbytes)
    made.memory[-1] = 7
    assert attach(made.name, nbytes)[-1] == 7
    made.unlink()


def test_an_update_without_bytes_needs_no_room() -> None:
    """All tensors of a model may be empty."""
    made = Segment(0)
    assert made.memory.numel() == 0
    assert attach(made.name, 0).numel() == 0
    made.unlink()


# -- across processes ---------------------------------------------------------------------------------------------


def look(name: str, nbytes: int) -> bytes:
    return bytes(attach(name, nbytes).numpy())


def hold(name: str, nbytes: int) -> None:
    ATTACHED[name] = attach(name, nbytes)


def held(name: str) -> bytes:
    return bytes(ATTACHED[name].numpy())


def let_go() -> None:
    ATTACHED.clear()


def test_the_other_process_sees_what_is_written_later(segment: Segment, child: Pool) -> None:
    child.call(hold, segment.name, 1000)
    for value in (1, 2):
        segment.memory.fill_(value)
        assert child.call(held, segment.name) == bytes([value]) * 1000
    child.call(let_go)


def test_mapped_memory_outlives_the_file(child: Pool) -> None:
    made = Segment(100)
    made.memory.fill_(9)
    child.call(hold, made.name, 100)
    made.unlink()
    assert child.call(held, made.name) == bytes([9]) * 100
    child.call(let_go)


def make_segment(nbytes: int) -> str:
    ATTACHED["mine"] = Segment(nbytes)
    name: str = ATTACHED["mine"].name
    return name


def test_a_killed_process_takes_its_own_segments_with_it_and_no_others(
    segment: Segment, victim: Pool, child: Pool
) -> None:
    """A resource tracker of an attaching process unlinks what others still use (python/cpython#82300)."""
    victim.call(hold, segment.name, 1000)
    theirs = SHM_DIR / victim.call(make_segment, 1 << 20)
    assert theirs.exists()
    victim.kill(0)
    deadline = time.monotonic() + 20.0
    while theirs.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not theirs.exists()
    segment.memory.fill_(5)
    assert child.call(look, segment.name, 1000) == bytes([5]) * 1000


SENDER = """
import sys
from stages.transport.shm import Segment, handle_pickle
segment = Segment(1000)
handle = handle_pickle(segment.memory)
sys.stdout.buffer.write(len(handle).to_bytes(4, "little") + handle)
sys.stdout.flush()
sys.stdin.read()
print("at the end", file=sys.stderr)
"""


def test_what_waits_for_a_trainer_s_output_waits_for_the_trainer_alone() -> None:
    """torch's manager process lives on while an engine maps a segment, and with it whatever it inherited."""
    with subprocess.Popen([sys.executable, "-c", SENDER], stdin=PIPE, stdout=PIPE, stderr=PIPE) as sender:
        assert sender.stdout is not None
        held = pickle.loads(sender.stdout.read(int.from_bytes(sender.stdout.read(4), "little")))
        out, errors = sender.communicate(timeout=60)
    assert (held.shape, out, errors) == ((1000,), b"", b"at the end\n")


# -- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", "x", "../etc/passwd", "torch_/../../etc/passwd", "/torch_1", "psm_1234", "torch"])
def test_a_name_that_is_no_segment_of_ours_is_refused(name: str) -> None:
    with pytest.raises(TransportError, match="is not the name of a shared-memory segment"):
        attach(name, 1)


def test_a_symbolic_link_is_not_followed(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"x" * 4096)
    link = SHM_DIR / f"torch_{os.getpid()}_link"
    link.symlink_to(secret)
    try:
        with pytest.raises(TransportError, match="cannot open shared memory"):
            attach(link.name, 100)
    finally:
        link.unlink()


def test_a_segment_that_is_gone_is_explained() -> None:
    with pytest.raises(TransportError, match=r"the sender is gone, or this engine does not share /dev/shm.*--ipc=host"):
        attach("torch_0_nothing", 1)


def test_a_segment_that_is_too_small_is_refused(segment: Segment) -> None:
    size = file_of(segment).stat().st_size
    with pytest.raises(TransportError, match=f"has {size} bytes, {size + 1} expected"):
        attach(segment.name, size - HEADER_BYTES + 1)


@pytest.mark.parametrize("nbytes", [-1, -HEADER_BYTES, -(1 << 20), 1 << 62, "100", None, 1.5])
def test_an_impossible_size_is_refused(segment: Segment, nbytes: Any) -> None:
    with pytest.raises(TransportError):
        attach(segment.name, nbytes)


def test_no_room_says_how_much_and_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    room = os.statvfs(SHM_DIR)
    monkeypatch.setattr(shm.os, "statvfs", lambda path: SimpleNamespace(f_bavail=10, f_frsize=room.f_frsize))
    with pytest.raises(
        TransportError, match=rf"need .* bytes .*{10 * room.f_frsize} are free.*capacity.*slots.*--shm-size"
    ):
        Segment(1 << 30)


def test_room_that_is_gone_in_between_leaves_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full /dev/shm is an error when the segment is made, not a SIGBUS at the first write."""
    mine = f"torch_{os.getpid()}_"
    before = {n for n in os.listdir(SHM_DIR) if n.startswith(mine)}

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shm.os, "posix_fallocate", full)
    with pytest.raises(TransportError, match="--shm-size"):
        Segment(1 << 20)
    assert {n for n in os.listdir(SHM_DIR) if n.startswith(mine)} == before


# -- payloads -----------------------------------------------------------------------------------------------------


def globals_in(data: bytes) -> set[tuple[str, str]]:
    """What a pickle asks for by name."""
    asked = set()

    class Recorder(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            asked.add((module, name))
            return super().find_class(module, name)

    Recorder(io.BytesIO(data)).load()
    return asked


def payload_of(segment: Segment) -> bytes:
    metadata = [SimpleNamespace(name="w", shape=torch.Size((10, 100)), dtype=torch.uint8, start_idx=0, end_idx=1000)]
    return base64.b64decode(encode({"flattened_tensor": segment.memory, "metadata": metadata}))


def test_a_payload_names_only_torch_and_the_standard_library(segment: Segment) -> None:
    """Engines unpickle by an exact list, on which a class of ours is not (Tencent-Hunyuan/UniRL#164)."""
    assert globals_in(payload_of(segment)) == {
        ("torch", "Size"),
        ("torch", "Tensor"),
        ("torch", "uint8"),
        ("torch.multiprocessing.reductions", "rebuild_storage_filename"),
        ("torch.multiprocessing.reductions", "rebuild_tensor"),
        ("torch.multiprocessing.reductions", "rebuild_typed_storage"),
        ("torch.storage", "UntypedStorage"),
        ("types", "SimpleNamespace"),
    }


def test_a_view_into_a_bucket_is_never_pickled_with_its_bytes() -> None:
    """Pickling a slice by value ships the whole storage (pytorch/pytorch#65604)."""
    large = Segment(1 << 22)
    try:
        for part in (large.memory, large.memory[:16], large.memory[100:104].view(torch.float32)):
            assert len(handle_pickle({"flattened_tensor": part, "metadata": []})) < 2000
    finally:
        large.unlink()


def test_memory_that_is_not_shared_cannot_become_a_handle() -> None:
    with pytest.raises(TransportError, match="outside shared memory"):
        handle_pickle({"flattened_tensor": torch.zeros(1 << 20)})


def open_like_an_engine(payload: bytes) -> bytes:
    return bytes(pickle.loads(payload)["flattened_tensor"].numpy())


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def open_twice(payload: bytes) -> bool:
    """A target and a draft model, each of which opens the handle."""
    one, two = (pickle.loads(payload)["flattened_tensor"] for _ in range(2))
    return torch.equal(one, two)


def test_an_engine_that_opens_it_by_torchs_own_means_leaves_it_to_us(segment: Segment, child: Pool) -> None:
    """Each opening counts itself out; the count must not fall to where torch removes the file (sgl-project/sglang#17870)."""
    payload = payload_of(segment)
    for value in range(30):
        segment.memory.fill_(value)
        assert child.call(open_like_an_engine, payload) == bytes([value]) * 1000
        assert child.call(open_twice, payload)
    assert file_of(segment).exists()
    assert bytes(segment.memory.numpy()) == bytes([29]) * 1000


def test_opening_again_and_again_costs_no_descriptors_and_no_memory(child: Pool) -> None:
    """One descriptor per shared tensor ends in "too many open files" (pytorch/pytorch#11201)."""
    made = Segment(1 << 20)
    payload = handle_pickle({"flattened_tensor": made.memory})

    def rounds(count: int) -> tuple[int, int, int]:
        for _ in range(count):
            child.call(open_like_an_engine, payload)
            child.call(look, made.name, 1 << 20)
        return child.call(open_files), open_files(), child.call(resident)

    rounds(10)
    theirs, ours, memory = rounds(5)
    theirs_after, ours_after, memory_after = rounds(50)
    made.unlink()
    assert (theirs_after, ours_after) == (theirs, ours)
    assert memory_after - memory < 8 << 20
