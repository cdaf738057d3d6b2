"""What lies on disk and in shared memory: whose it is, who can read it, and that no name leads elsewhere."""

from __future__ import annotations

import json
import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.adapters import TRANSPORTS
from support.fakes import Toy, engines_of, updater_for

from pipelines.engine.checkpoint import Checkpoint as EngineCheckpoint
from pipelines.launch import EngineLauncher
from stages.errors import ConfigError, TransportError, UpdateFailed, WeightstreamError
from stages.gather.checkpoint import INDEX, Checkpoint
from stages.transport.shm import SHM_DIR, Segment, attach
from tests.engine.conftest import Start


@pytest.fixture(autouse=True)
def no_umask() -> Iterator[None]:
    """Modes must not depend on the user's."""
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.fixture
def segment() -> Iterator[Segment]:
    made = Segment(64)
    yield made
    made.unlink()


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def test_segments_are_the_owners_alone_and_cannot_be_guessed(segment: Segment) -> None:
    assert mode(SHM_DIR / segment.name) == 0o600
    others = [Segment(1) for _ in range(8)]
    try:
        parts = [s.name.split("_") for s in (segment, *others)]
        assert len({p[2] for p in parts}) > 1  # a random number, not a counter
        assert sum(int(p[2]).bit_length() for p in parts) / len(parts) > 24
    finally:
        for other in others:
            other.unlink()


def test_the_manager_of_segments_listens_in_a_folder_of_its_owner(segment: Segment) -> None:
    manager = Path(segment.memory.untyped_storage()._share_filename_cpu_()[0].decode())
    assert mode(manager.parent) == 0o700
    assert manager.parent.stat().st_uid == os.geteuid()


@pytest.mark.parametrize(
    "name",
    [
        *("", "torch_", "torch_../x", "../torch_x", "/etc/passwd", "torch_x/y", "psm_1"),
        *("torch_a\0b", "torch_\udcff", "torch_" + "x" * 300),
    ],
)
def test_a_name_that_is_none_of_ours_is_not_opened(name: str) -> None:
    with pytest.raises(TransportError, match="is not the name"):
        attach(name, 1)


def test_a_link_in_shared_memory_is_not_followed(tmp_path: Path, segment: Segment) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(1000))
    for target in (secret, SHM_DIR / segment.name):
        link = SHM_DIR / f"torch_{os.getpid()}_link"
        link.symlink_to(target)
        try:
            with pytest.raises(TransportError, match="cannot open"):
                attach(link.name, 10)
        finally:
            link.unlink()


def test_a_pipe_in_shared_memory_blocks_nobody() -> None:
    pipe = SHM_DIR / f"torch_{os.getpid()}_pipe"
    os.mkfifo(pipe)
    try:
        with pytest.raises(TransportError):
            attach(pipe.name, 0)
    finally:
        pipe.unlink()


# -- disk -------------------------------------------------------------------------------------------------------------


def disk(path: Path, **settings: object) -> dict[str, object]:
    return {**TRANSPORTS["disk"], "path": str(path), **settings}


def test_version_folders_are_the_owners_alone(tmp_path: Path) -> None:
    seen: list[tuple[int, list[int]]] = []

    def look() -> None:
        (folder,) = [p for p in (tmp_path / "v").iterdir() if p.name.startswith(".tmp-")]
        seen.append((mode(folder), [mode(f) for f in folder.iterdir()]))

    with updater_for(transport=disk(tmp_path / "v"), wire="folder") as updater:
        engines_of(updater)[0].script("put", None, look)
        updater.update(Toy())
    assert mode(tmp_path / "v") == mode(tmp_path / "v" / "1") == 0o700
    ((unfinished, files),) = seen
    assert unfinished == 0o700
    assert files and set(files) == {0o600}
    assert {mode(f) for f in (tmp_path / "v" / "1").glob("*.safetensors")} == {0o600}


def test_a_version_that_is_a_link_is_neither_written_through_nor_removed(tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "v", tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "weightstream.json").write_text("{}")
    (elsewhere / "kept").write_text("mine")
    root.mkdir()
    (root / "1").symlink_to(elsewhere)
    (root / "2").symlink_to(tmp_path / "nowhere")
    with updater_for(transport=disk(root, keep=1), wire="folder") as updater:
        for version in ("1", "2"):
            with pytest.raises(WeightstreamError):
                updater.update(Toy(), version)
        for version in ("3", "4", "5"):
            updater.update(Toy(), version)
    assert sorted(p.name for p in elsewhere.iterdir()) == ["kept", "weightstream.json"]
    assert not (tmp_path / "nowhere").exists()


def test_a_leftover_that_is_a_link_leads_nowhere(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept").write_text("mine")
    root = tmp_path / "v"
    root.mkdir()
    (root / f".tmp-{os.uname().nodename}-999999999-abc").symlink_to(elsewhere)
    with updater_for(transport=disk(root), wire="folder") as updater:
        updater.update(Toy())
    assert (elsewhere / "kept").read_text() == "mine"


def test_a_file_that_waits_where_a_bucket_goes_is_not_written_to(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")

    def plant() -> None:
        (folder,) = [p for p in (tmp_path / "v").iterdir() if p.name.startswith(".tmp-")]
        for number in range(2, 5):
            for total in range(3, 6):
                (folder / f"model-{number:05d}-of-{total:05d}.safetensors").symlink_to(victim)

    with updater_for(transport=disk(tmp_path / "v"), wire="folder") as updater:
        engines_of(updater)[0].script("begin", plant)
        with pytest.raises(UpdateFailed, match="File exists"):
            updater.update(Toy())
    assert victim.read_text() == "mine"


@pytest.mark.parametrize("version", ["..", ".", "../x", "a/b", "/abs", ".hidden", "a\0b", "x" * 300, "-x", "a\nb"])
def test_a_version_is_a_folder_name_and_no_path(tmp_path: Path, version: str) -> None:
    with (
        updater_for(transport=disk(tmp_path / "v"), wire="folder") as updater,
        pytest.raises(ConfigError, match="cannot be a folder name"),
    ):
        updater.update(Toy(), version)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["v"]


# -- checkpoints ------------------------------------------------------------------------------------------------------

OUTSIDE = [
    "../outside.safetensors",
    "/outside.safetensors",
    "sub/x.safetensors",
    "..",
    ".",
    "",
    "a\0b",
    "x/../../outside.safetensors",
]


@pytest.mark.parametrize("name", OUTSIDE)
@pytest.mark.parametrize("reader", [Checkpoint, EngineCheckpoint])
def test_an_index_names_files_of_its_own_folder_only(tmp_path: Path, name: str, reader: type) -> None:
    folder = tmp_path / "checkpoint"
    (folder / "sub").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    for file in (tmp_path / "outside.safetensors", folder / "sub" / "x.safetensors"):
        save_file({"w": torch.zeros(1)}, file)
    if name.startswith("/"):
        name = str(tmp_path) + name
    (folder / INDEX).write_text(json.dumps({"weight_map": {"w": name}}))
    with pytest.raises(ConfigError, match="no file of its folder"):
        reader(folder)


@pytest.mark.parametrize("backend", ["sglang", "vllm"])
def test_an_engine_that_is_told_to_load_such_a_folder_keeps_its_weights(
    start: Start, tmp_path: Path, backend: str
) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"lm_head.weight": "../../etc/passwd"}}))
    engine = start(backend)
    before = engine.digest()["digest"]
    if backend == "sglang":
        answer = engine.post("/update_weights_from_disk", {"model_path": str(tmp_path)})
    else:
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(tmp_path)}}
        answer = engine.post("/collective_rpc", body)
    assert answer.status_code in (400, 500)
    assert "no file of its folder" in answer.text
    assert engine.digest()["digest"] == before


@pytest.mark.parametrize("name", ["config.json", INDEX])
@pytest.mark.parametrize("reader", [Checkpoint, EngineCheckpoint])
def test_a_pipe_where_a_file_belongs_blocks_nobody(tmp_path: Path, name: str, reader: type) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    done = threading.Event()

    def read() -> None:
        try:
            reader(tmp_path)
        except ConfigError:
            done.set()

    threading.Thread(target=read, daemon=True).start()
    assert done.wait(10)


def test_logs_of_engines_lie_in_a_folder_of_their_owner(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    launcher = EngineLauncher()
    folders: list[Path] = []
    monkeypatch.setattr(launcher, "_spawn", lambda command: folders.append(Path(launcher._logs.name)) or (None, None))  # type: ignore[union-attr, func-returns-value]
    monkeypatch.setattr(launcher, "_await_url", lambda *_: "")
    launcher.start(tmp_path, "sglang")
    try:
        assert [mode(f) for f in folders] == [0o700]
    finally:
        launcher.close()
