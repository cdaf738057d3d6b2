"""disk: a version is a whole checkpoint or nothing, old ones go only once a newer one was committed."""

from __future__ import annotations

import json
import os
import socket
import stat
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from safetensors import safe_open
from safetensors.torch import load_file
from support.chains import DTYPES, FOLDER, MIXED, expected_bytes, group_of, make_run, raw, tensor_of
from support.fakes import FakeEngine, Toy, engines_of, updater_for

from pipelines.updater import WeightUpdater
from stages.bucket import Bucket
from stages.errors import ConfigError, TransportError, UpdateFailed
from stages.flow import Group
from stages.gather.checkpoint import Checkpoint
from stages.run import Run, Wire
from stages.transport import disk
from stages.transport.disk import MANIFEST, Disk

GROUPS = [
    group_of({f"{str(d)[6:]}.{n}": tensor_of(d, s, i) for n, s in enumerate(((), (0, 3), (7,), (3, 5)))})
    for i, d in enumerate(DTYPES)
] + [group_of({"model.embed_tokens.weight": torch.randn(8, 4)}, [("lm_head.weight", "model.embed_tokens.weight")])]


def push(transport: Disk, version: str, groups: list[Group] = GROUPS, wire: Wire = FOLDER, **run_fields: Any) -> Run:
    """Write and publish one version, as the updater would up to commit."""
    run = make_run(wire, transport=transport, version=version, **run_fields)
    bucket = Bucket(300, 2)
    bucket.plan(tuple(g.spec for g in groups), run)
    transport.open(run)
    bucket.prepare(run)
    transport.prepare(run)
    for item in bucket(iter(groups), run):
        transport.ship(item, run)
        item.release()
    transport.publish(run)
    return run


# -- what is written ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wire", [FOLDER, MIXED], ids=["tied twice", "tied once"])
@pytest.mark.parametrize("fsync", [False, True])
def test_the_safetensors_library_reads_it_bit_equal(tmp_path: Path, wire: Wire, fsync: bool) -> None:
    push(Disk(str(tmp_path), fsync=fsync), "7", wire=wire)
    found = {}
    for file in (tmp_path / "7").glob("*.safetensors"):
        found |= load_file(file)
    assert {n: raw(t) for n, t in found.items()} == expected_bytes(GROUPS, wire)
    for group in GROUPS:
        for spec in group.spec.tensors:
            assert (found[spec.name].dtype, tuple(found[spec.name].shape)) == (spec.dtype, spec.shape)


def test_it_is_a_checkpoint_by_our_own_reader_too(tmp_path: Path) -> None:
    push(Disk(str(tmp_path)), "7")
    assert set(Checkpoint(tmp_path / "7").specs) == set(expected_bytes(GROUPS, FOLDER))


def test_the_index_is_built_from_what_was_written(tmp_path: Path) -> None:
    """An index that names a tied tensor which no file holds is refused by loaders (pytorch/torchtitan#3764)."""
    push(Disk(str(tmp_path)), "7", wire=MIXED)
    index = json.loads((tmp_path / "7" / "model.safetensors.index.json").read_text())
    assert "lm_head.weight" not in index["weight_map"]
    for name, file in index["weight_map"].items():
        with safe_open(str(tmp_path / "7" / file), framework="pt") as opened:
            assert name in opened.keys()  # noqa: SIM118
    total = sum(t.numel() * t.element_size() for g in GROUPS for t in g.tensors)
    assert index["metadata"]["total_size"] == total


def test_the_manifest_holds_size_and_digest_of_every_file(tmp_path: Path) -> None:
    run = push(Disk(str(tmp_path)), "7")
    manifest = json.loads((tmp_path / "7" / MANIFEST).read_text())
    assert manifest["version"] == "7"
    assert manifest["plan_hash"] == run.current_plan.hash
    files = {f.name for f in (tmp_path / "7").glob("*.safetensors")}
    assert set(manifest["files"]) == files
    for name, entry in manifest["files"].items():
        content = (tmp_path / "7" / name).read_bytes()
        body = content[8 + struct.unpack("<Q", content[:8])[0] :]
        assert (len(body), f"{xxhash.xxh3_64_intdigest(body):016x}") == (entry["nbytes"], entry["xxh3_64"])


def test_a_changed_byte_is_a_changed_digest(tmp_path: Path) -> None:
    transport = Disk(str(tmp_path))
    push(transport, "1", [group_of({"a": torch.zeros(10)})])
    push(transport, "2", [group_of({"a": torch.zeros(10).index_fill(0, torch.tensor([3]), 1e-30)})])
    one, two = (json.loads((tmp_path / v / MANIFEST).read_text())["files"] for v in "12")
    assert one.keys() == two.keys()
    assert one != two


def test_only_its_owner_may_read_it(tmp_path: Path) -> None:
    push(Disk(str(tmp_path / "new")), "7")
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "new" / "7").stat().st_mode) == 0o700


def test_config_and_tokenizer_come_from_the_reference(tmp_path: Path) -> None:
    reference = tmp_path / "reference"
    reference.mkdir()
    for name in ("config.json", "tokenizer.json", "vocab.txt", "tokenizer.model", "chat_template.jinja"):
        (reference / name).write_text(name)
    for name in ("model.safetensors.index.json", "model.safetensors", "pytorch_model.bin", "README.md"):
        (reference / name).write_text("no")
    push(Disk(str(tmp_path / "out")), "7", reference=reference)
    published = tmp_path / "out" / "7"
    assert (published / "config.json").read_text() == "config.json"
    assert (published / "tokenizer.model").exists()
    assert not (published / "README.md").exists()
    assert "no" not in (published / "model.safetensors.index.json").read_text()


def test_a_reference_that_is_a_version_of_ours_lends_no_manifest(tmp_path: Path) -> None:
    """SGLang serves the folder that it loaded last, and names it when asked."""
    transport = Disk(str(tmp_path))
    push(transport, "1")
    (tmp_path / "1" / "config.json").write_text("{}")
    push(transport, "2", reference=tmp_path / "1")
    assert json.loads((tmp_path / "2" / MANIFEST).read_text())["version"] == "2"
    assert (tmp_path / "2" / "config.json").exists()


def test_a_dtype_that_the_format_does_not_know_is_an_error_of_ours(tmp_path: Path) -> None:
    with pytest.raises(TransportError, match="odd complex64"):
        push(Disk(str(tmp_path)), "1", [group_of({"odd": torch.zeros(2, dtype=torch.complex64)})])


# -- visible or not -----------------------------------------------------------------------------------------------


def visible(path: Path) -> list[str]:
    return sorted(p.name for p in path.iterdir() if not p.name.startswith("."))


def hidden(path: Path) -> list[str]:
    return sorted(p.name for p in path.iterdir() if p.name.startswith("."))


def test_nothing_is_visible_before_it_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers that race the writer see half files (vllm-project/llm-compressor#2665): one rename shows all at once."""
    seen: list[list[str]] = []
    rename = os.rename

    def watched(source: Any, target: Any) -> None:
        seen.append(visible(tmp_path))
        assert (Path(source) / MANIFEST).exists()
        rename(source, target)

    monkeypatch.setattr(disk.os, "rename", watched)
    push(Disk(str(tmp_path)), "7")
    assert seen == [[]]
    assert visible(tmp_path) == ["7"]
    assert hidden(tmp_path) == []


def test_a_version_is_never_overwritten(tmp_path: Path) -> None:
    """Same path, new content: engines reload what they have cached (vllm-project/vllm#32718)."""
    transport = Disk(str(tmp_path))
    push(transport, "7")
    with pytest.raises(ConfigError, match="7 exists: a version is never overwritten"):
        push(transport, "7")
    (tmp_path / "8").write_text("a file of somebody else's")
    with pytest.raises(ConfigError, match="8 exists"):
        push(transport, "8")


@pytest.mark.parametrize(
    "version", ["", ".", "..", "../x", "a/b", "/tmp/x", ".hidden", "-x", "a b", "a\n", "ä", "v" * 201, "\0"]
)
def test_a_version_that_cannot_be_a_folder_is_refused(tmp_path: Path, version: str) -> None:
    with pytest.raises(ConfigError, match="cannot be a folder name"):
        push(Disk(str(tmp_path)), version)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("version", ["1", "0777", "1e234", "step-57", "v1.2_a", "A" * 200])
def test_any_other_version_names_its_folder(tmp_path: Path, version: str) -> None:
    push(Disk(str(tmp_path)), version)
    assert visible(tmp_path) == [version]


def test_what_was_given_up_is_gone(tmp_path: Path) -> None:
    transport = Disk(str(tmp_path))
    run = make_run(FOLDER, transport=transport, version="1")
    bucket = Bucket(300, 2)
    bucket.plan(tuple(g.spec for g in GROUPS), run)
    bucket.prepare(run)
    transport.open(run)
    transport.prepare(run)
    transport.ship(next(bucket(iter(GROUPS), run)), run)
    assert len(hidden(tmp_path)) == 1
    transport.discard(run)
    assert list(tmp_path.iterdir()) == []
    transport.prepare(run)
    transport.close()
    assert list(tmp_path.iterdir()) == []


def test_a_published_version_that_is_not_committed_is_gone_too(tmp_path: Path) -> None:
    transport = Disk(str(tmp_path))
    run = push(transport, "1")
    transport.discard(run)
    assert list(tmp_path.iterdir()) == []
    push(transport, "1")


def test_old_versions_go_when_a_newer_one_is_committed_not_before(tmp_path: Path) -> None:
    transport = Disk(str(tmp_path), keep=2)
    for version in ("1", "2", "3", "4"):
        push(transport, version)
        assert version in visible(tmp_path)
        if version == "3":
            assert visible(tmp_path) == ["1", "2", "3"]  # whoever serves 1 or 2 may still need it
        transport.committed(version)
    transport.close()
    assert visible(tmp_path) == ["3", "4"]
    assert not list(tmp_path.glob(".*"))


def test_only_versions_of_ours_are_pruned(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-100").mkdir()
    (tmp_path / "notes.txt").write_text("x")
    transport = Disk(str(tmp_path), keep=1)
    for version in ("1", "2", "3"):
        push(transport, version)
        transport.committed(version)
    transport.close()
    assert visible(tmp_path) == ["3", "checkpoint-100", "notes.txt"]
    assert not list(tmp_path.glob(".*"))


def test_the_reference_is_not_pruned(tmp_path: Path) -> None:
    transport = Disk(str(tmp_path), keep=1)
    for version in ("1", "2", "3"):
        push(transport, version, reference=tmp_path / "1" if version != "1" else None)
        transport.committed(version)
    transport.close()
    assert visible(tmp_path) == ["1", "3"]
    assert not list(tmp_path.glob(".*"))


def test_leftovers_of_dead_processes_of_this_host_are_removed(tmp_path: Path) -> None:
    here = socket.gethostname()
    dead = next(p for p in range(400_000, 4_000_000) if not Path(f"/proc/{p}").exists())
    mine, theirs = f".tmp-{here}-{os.getpid()}-abcd", f".tmp-{here}-1-abcd"
    gone, elsewhere, odd = f".tmp-{here}-{dead}-abcd", f".tmp-other-{dead}-abcd", f".tmp-{here}-x"
    for name in (mine, theirs, gone, elsewhere, odd):
        (tmp_path / name).mkdir()
        (tmp_path / name / "half.safetensors").write_text("x")
    Disk(str(tmp_path)).open(make_run())
    assert hidden(tmp_path) == sorted([mine, theirs, elsewhere, odd])


def test_only_the_head_rank_writes(tmp_path: Path) -> None:
    from stages.comm import Comm

    push(Disk(str(tmp_path)), "1", comm=Comm(1, 2, object()))  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


# -- trouble with the file system ----------------------------------------------------------------------------------


def test_too_little_room_is_known_before_anything_is_paused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 10})())
    with pytest.raises(TransportError, match=r"bytes needed, 10 free.*transport\.path"):
        push(Disk(str(tmp_path)), "1")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("what", ["file", "missing parent"])
def test_a_path_that_cannot_hold_folders_is_an_error_of_ours(tmp_path: Path, what: str) -> None:
    (tmp_path / "file").write_text("x")
    path = tmp_path / "file" if what == "file" else tmp_path / "file" / "below"
    with pytest.raises(TransportError, match=r"cannot write .*transport\.path"):
        push(Disk(str(path)), "1")


def test_keep_must_be_positive() -> None:
    with pytest.raises(ConfigError, match=r"transport\.keep"):
        Disk("/nowhere", keep=0)


# -- as engines see it ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mapping, seen",
    [
        ({}, "{path}/7"),
        ({"{path}": "/data"}, "/data/7"),
        ({"{path}/": "/data/"}, "/data/7"),
        ({"{path}/7": "/models/current"}, "/models/current"),
        ({"{parent}": "/mnt"}, "/mnt/w/7"),
        ({"{path}x": "/wrong", "/elsewhere": "/wrong"}, "{path}/7"),
    ],
)
def test_paths_are_translated_by_whole_folders(tmp_path: Path, mapping: dict[str, str], seen: str) -> None:
    path = tmp_path / "w"
    places = {"path": str(path), "parent": str(tmp_path)}
    run = push(Disk(str(path), path_map={k.format(**places): v for k, v in mapping.items()}), "7")
    assert run.folder == seen.format(**places)


# -- whole updates --------------------------------------------------------------------------------------------------


@pytest.fixture
def updater(tmp_path: Path) -> Any:
    made = updater_for(
        ["http://a:1", "http://b:1"],
        transport={"_target_": "stages.transport.disk.Disk", "path": str(tmp_path)},
        wire="folder",
    )
    with made:
        yield made


def test_publish_comes_before_the_engines_are_asked_to_load(updater: WeightUpdater, tmp_path: Path) -> None:
    """Waiting for results before publishing what they need hangs (areal-project/AReaL#443)."""
    folders = []
    for engine in engines_of(updater):
        engine.script("prepare", lambda: folders.append(updater._run.folder))
    updater.update(Toy(1.0), "57")
    assert folders == [str(tmp_path / "57")] * 2
    assert (tmp_path / "57" / MANIFEST).exists()


def test_no_process_group_is_made(updater: WeightUpdater) -> None:
    for value in (1.0, 2.0):
        updater.update(Toy(value))
    for engine in engines_of(updater):
        assert not {"join", "leave", "attach"} & set(engine.log)


def test_default_versions_go_on_where_an_earlier_run_ended(tmp_path: Path) -> None:
    for name in ("step-9", "7"):
        (tmp_path / name).mkdir(parents=True)
    with updater_for(
        ["http://a:1"],
        transport={"_target_": "stages.transport.disk.Disk", "path": str(tmp_path)},
        wire="folder",
    ) as later:
        assert [later.update(Toy(value)).version for value in (1.0, 2.0)] == ["8", "9"]


def test_a_version_whose_commit_fails_is_gone_and_its_name_free(updater: WeightUpdater, tmp_path: Path) -> None:
    updater.update(Toy(1.0))
    engine: FakeEngine = engines_of(updater)[1]
    engine.script("commit", engine.refuse("commit", "cannot load"))
    with pytest.raises(UpdateFailed, match="cannot load"):
        updater.update(Toy(2.0))
    assert visible(tmp_path) == ["1"]
    updater.update(Toy(3.0), "2")
    assert visible(tmp_path) == ["1", "2"]


def test_a_retry_within_one_update_writes_the_same_version_again(tmp_path: Path) -> None:
    transport = {"_target_": "stages.transport.disk.Disk", "path": str(tmp_path)}
    with updater_for(transport=transport, wire="folder", retries=1) as updater:
        (engine,) = engines_of(updater)
        engine.script("commit", engine.refuse("commit", "not now"))
        report = updater.update(Toy(1.0), "9")
        assert (report.outcome, report.attempts) == ("committed", 2)
    assert visible(tmp_path) == ["9"]
