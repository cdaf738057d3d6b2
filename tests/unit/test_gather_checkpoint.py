"""Reading a checkpoint folder: sharded or not, mapped, checked before anything is sent."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.chains import MIXED, SPLIT, WIRES, make_run, pack, raw, tensor_of
from support.processes import Pool

from stages.bucket import Bucket
from stages.errors import ConfigError
from stages.flow import Group
from stages.gather import GatherParams
from stages.gather.checkpoint import INDEX, Checkpoint, read_header
from stages.run import Wire

TENSORS = {
    "model.embed_tokens.weight": tensor_of(torch.bfloat16, (16, 8), 1),
    "model.layers.0.self_attn.q_proj.weight": tensor_of(torch.float8_e4m3fn, (8, 8), 2),
    "model.layers.0.self_attn.q_proj.weight_scale_inv": tensor_of(torch.float32, (1, 1), 3),
    "model.layers.0.self_attn.k_proj.weight": tensor_of(torch.float8_e4m3fn, (4, 8), 4),
    "model.layers.1.mlp.down_proj.weight": tensor_of(torch.float16, (8, 3), 5),
    "model.layers.1.flag": tensor_of(torch.bool, (3,), 6),
    "model.layers.1.count": tensor_of(torch.int64, (), 7),
    "model.empty": torch.zeros(0, 4),
}


def write(folder: Path, files: dict[str, dict[str, torch.Tensor]], config: dict[str, Any] | None = None) -> Path:
    """A checkpoint of these files; with an index when they are several."""
    folder.mkdir(exist_ok=True)
    for name, tensors in files.items():
        save_file(tensors, folder / name)
    if len(files) > 1:
        weight_map = {tensor: name for name, tensors in files.items() for tensor in tensors}
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(config or {}))
    return folder


def sharded(folder: Path) -> Path:
    """Shards cut across layers and fused sets, as save_pretrained does by size."""
    names = list(TENSORS)
    parts = {f"model-0000{i}-of-00003.safetensors": {n: TENSORS[n] for n in names[i::3]} for i in range(3)}
    return write(folder, parts)


def gather(folder: Path, wire: Wire = MIXED) -> list[Group]:
    run = make_run(wire)
    run.model = folder
    stage = GatherParams()
    run.gathered = tuple(stage.plan((), run))
    stage.prepare(run)
    return list(stage(iter(()), run))


@pytest.mark.parametrize("wire", WIRES.values(), ids=list(WIRES))
@pytest.mark.parametrize("shards", [False, True], ids=["one file", "sharded"])
def test_every_tensor_arrives_bit_equal(tmp_path: Path, wire: Wire, shards: bool) -> None:
    folder = sharded(tmp_path) if shards else write(tmp_path, {"model.safetensors": TENSORS})
    sent = pack(gather(folder, wire), wire, 100).decode()
    assert sent == {name: raw(t) for name, t in TENSORS.items()}


def test_fused_sets_come_together_from_different_shards(tmp_path: Path) -> None:
    groups = [{t.name for t in g.spec.tensors} for g in gather(sharded(tmp_path))]
    assert {n for n in TENSORS if "self_attn" in n} in groups


def test_a_path_may_be_text_and_a_checkpoint(tmp_path: Path) -> None:
    folder = write(tmp_path, {"model.safetensors": TENSORS})
    for source in (str(folder), folder, Checkpoint(folder)):
        assert len(gather(source)) == len(gather(folder))  # type: ignore[arg-type]


# -- tied ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config, aliases",
    [
        ({"tie_word_embeddings": True}, (("lm_head.weight", "model.embed_tokens.weight"),)),
        ({"text_config": {"tie_word_embeddings": True}}, (("lm_head.weight", "model.embed_tokens.weight"),)),
        ({"tie_word_embeddings": False}, ()),
        ({}, ()),
    ],
)
def test_a_tied_head_that_is_not_stored_is_an_alias(tmp_path: Path, config: dict[str, Any], aliases: object) -> None:
    groups = gather(write(tmp_path, {"model.safetensors": TENSORS}, config))
    assert sum((g.spec.aliases for g in groups), ()) == aliases


def test_a_tied_head_that_is_stored_all_the_same_is_a_tensor(tmp_path: Path) -> None:
    tensors = TENSORS | {"lm_head.weight": torch.zeros(2)}
    groups = gather(write(tmp_path, {"model.safetensors": tensors}, {"tie_word_embeddings": True}))
    assert sum((g.spec.aliases for g in groups), ()) == ()


def test_the_head_is_tied_to_the_models_own_embedding(tmp_path: Path) -> None:
    """Extra layers for multi-token prediction bring embeddings of their own; ranks must not choose differently."""
    tensors = {f"model.layers.{i}.embed_tokens.weight": torch.zeros(1) for i in range(9)} | TENSORS
    groups = gather(write(tmp_path, {"model.safetensors": tensors}, {"tie_word_embeddings": True}))
    assert sum((g.spec.aliases for g in groups), ()) == (("lm_head.weight", "model.embed_tokens.weight"),)


# -- broken -------------------------------------------------------------------------------------------------------


def good(tmp_path: Path) -> Path:
    return write(tmp_path / "good", {"model.safetensors": TENSORS})


def cut(fraction: float) -> Any:
    def change(file: Path) -> None:
        content = file.read_bytes()
        file.write_bytes(content[: int(len(content) * fraction)])

    return change


DAMAGE = {
    "empty": cut(0.0),
    "header cut": cut(0.01),
    "half": cut(0.5),
    "last byte": cut(0.9999),
    "longer": lambda f: f.write_bytes(f.read_bytes() + b"x"),
    "no json": lambda f: f.write_bytes(b"\x08" + b"\0" * 7 + b"nonsense"),
    "endless header": lambda f: f.write_bytes(b"\xff" * 8 + b"{}"),
    "a list": lambda f: f.write_bytes(b"\x02" + b"\0" * 7 + b"[]"),
    "text": lambda f: f.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"),
    "gone": lambda f: f.unlink(),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=list(DAMAGE))
@pytest.mark.parametrize("indexed", [False, True], ids=["one file", "indexed"])
def test_a_damaged_file_is_refused_by_name_before_anything_is_sent(tmp_path: Path, damage: Any, indexed: bool) -> None:
    """A reader that races a writer sees empty and half files (vllm-project/llm-compressor#2665)."""
    folder = sharded(tmp_path / "c") if indexed else good(tmp_path)
    file = sorted(folder.glob("*.safetensors"))[-1]
    damage(file)
    with pytest.raises(ConfigError, match=r"safetensors"):
        gather(folder)


def test_an_index_that_names_what_no_file_holds_is_refused(tmp_path: Path) -> None:
    """A tied exporter omits lm_head.weight and leaves it in the index (pytorch/torchtitan#3764)."""
    folder = sharded(tmp_path)
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["lm_head.weight"] = "model-00000-of-00003.safetensors"
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"lists 1 tensors.*lm_head\.weight"):
        gather(folder)


def test_files_that_the_index_does_not_name_are_left_alone(tmp_path: Path) -> None:
    folder = sharded(tmp_path)
    save_file({"old": torch.zeros(1)}, folder / "consolidated.safetensors")
    assert "old" not in Checkpoint(folder).specs


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": ["a"]}', '{"weight_map": {}}']
)
def test_an_index_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    folder = sharded(tmp_path)
    (folder / INDEX).write_text(text)
    with pytest.raises(ConfigError, match=r"safetensors"):
        Checkpoint(folder)


@pytest.mark.parametrize("text", ["", "{", "[1]", "null"])
def test_a_broken_config_is_refused_by_name(tmp_path: Path, text: str) -> None:
    folder = good(tmp_path)
    (folder / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json"):
        Checkpoint(folder)


def test_a_folder_that_holds_no_checkpoint_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        Checkpoint(tmp_path / "nowhere")
    torch.save({"a": torch.zeros(1)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="holds no safetensors file.*save_pretrained"):
        Checkpoint(tmp_path)


def test_a_file_that_vanishes_after_planning_is_an_error_by_name(tmp_path: Path) -> None:
    folder = good(tmp_path)
    run = make_run()
    run.model = folder
    stage = GatherParams()
    run.gathered = tuple(stage.plan((), run))
    shutil.rmtree(folder)
    with pytest.raises(ConfigError, match=r"model\.safetensors"):
        list(stage(iter(()), run))


def test_the_header_alone_tells_names_dtypes_and_shapes(tmp_path: Path) -> None:
    specs = read_header(good(tmp_path) / "model.safetensors")
    assert {(s.name, s.dtype, s.shape) for s in specs} == {(n, t.dtype, tuple(t.shape)) for n, t in TENSORS.items()}


# -- memory -------------------------------------------------------------------------------------------------------


def growth_while_streaming(folder: str, capacity: int) -> int:
    """Bytes by which this process grew at most; pages of the mapped files, which are the kernel's to drop, not counted."""

    def own() -> int:
        text = Path("/proc/self/status").read_text()
        return 1024 * sum(int(text.split(k)[1].split()[0]) for k in ("RssAnon:", "RssShmem:"))

    run = make_run(SPLIT)
    run.model = folder
    stage, bucket = GatherParams(dtype="float16"), Bucket(capacity, 2)
    run.gathered = tuple(stage.plan((), run))
    bucket.plan(run.gathered, run)
    bucket.prepare(run)
    before = peak = own()
    for item in bucket(stage(iter(()), run), run):
        peak = max(peak, own())
        item.release()
    bucket.close()
    return peak - before


def test_a_large_checkpoint_streams_within_its_buckets_and_one_tensor(tmp_path: Path, child: Pool) -> None:
    """Copying every tensor at each sync ran out of memory (pytorch/torchtitan#4706)."""
    size = 4 << 20
    shards = {
        f"model-{s}.safetensors": {f"layers.{s * 5 + i}.w": torch.ones(size, dtype=torch.bfloat16) for i in range(5)}
        for s in range(5)
    }
    write(tmp_path, shards)
    assert sum(f.stat().st_size for f in tmp_path.glob("*.safetensors")) > 200_000_000
    tensor = 2 * size
    # The buckets are there before it starts: what comes on top is a tensor, its cast, and a little of the allocator's.
    assert child.call(growth_while_streaming, str(tmp_path), 4 << 20) < 3 * tensor


def test_unusual_names_of_tensors_survive(tmp_path: Path) -> None:
    tensors = {"ä.weight": torch.ones(2), 'with "quotes"\n': torch.zeros(1), "__meta__": torch.ones(1)}
    folder = write(tmp_path, {"model.safetensors": tensors})
    assert set(pack(gather(folder, SPLIT), SPLIT, 64).decode()) == set(tensors)
