"""The trainers of the command line: real checkpoints, real steps, a cache that processes can share."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipelines.config import CONF
from pipelines.trainers.checkpoint import CheckpointTrainer
from pipelines.trainers.toy import ToyTrainer
from stages.errors import ConfigError


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "weightstream" / "toy"


@pytest.mark.parametrize("arch", ["qwen3", "llama", "qwen3_moe"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_reference_is_a_checkpoint_of_the_model_before_any_step(cache: Path, arch: str, dtype: str) -> None:
    trainer = ToyTrainer(arch=arch, layers=1, dtype=dtype)
    config = json.loads((trainer.reference / "config.json").read_text())
    assert config["model_type"] == arch
    assert config["architectures"]
    tensors = load_file(trainer.reference / "model.safetensors")
    assert {str(tensor.dtype) for tensor in tensors.values()} == {f"torch.{dtype}"}
    assert torch.equal(tensors["model.norm.weight"].float(), trainer.source.model.norm.weight)
    assert {p.dtype for p in trainer.source.parameters()} == {torch.float32}
    assert trainer.reference.parent == cache


def test_steps_are_real_and_lower_the_loss(cache: Path) -> None:
    trainer = ToyTrainer(layers=1, lr=3e-3)
    prompt = trainer.prompts()[0]
    before = sum(s.logprob for s in trainer.score(prompt[:4], prompt[4:]))
    for _ in range(20):
        trainer.step()
    assert sum(s.logprob for s in trainer.score(prompt[:4], prompt[4:])) > before + 1


def test_the_same_settings_train_the_same_and_a_seed_changes_it(cache: Path) -> None:
    def after_a_step(seed: int) -> torch.Tensor:
        trainer = ToyTrainer(layers=1, seed=seed)
        trainer.step()
        return trainer.source.model.norm.weight.detach().clone()

    assert torch.equal(after_a_step(0), after_a_step(0))
    assert not torch.equal(after_a_step(0), after_a_step(1))


def test_score_is_that_of_the_weights_in_the_checkpoints_dtype(cache: Path) -> None:
    trainer = ToyTrainer(layers=1, dtype="bfloat16")
    trainer.step()
    prompt = trainer.prompts()[1]
    tokens = []
    model = trainer.source.to(torch.bfloat16).eval()
    with torch.no_grad():
        for _ in range(4):
            tokens.append(model(input_ids=torch.tensor([[*prompt, *tokens]])).logits[0, -1].argmax().item())
    trainer.source.float()
    for score in trainer.score(prompt, tokens):
        assert score.best - score.logprob < trainer.tolerance


def test_tied_and_untied(cache: Path) -> None:
    for tied in (True, False):
        trainer = ToyTrainer(layers=1, tied=tied)
        assert ("lm_head.weight" in load_file(trainer.reference / "model.safetensors")) is not tied
        assert (trainer.source.lm_head.weight is trainer.source.model.embed_tokens.weight) is tied


def test_the_cache_is_used_again_and_told_apart_by_settings(cache: Path) -> None:
    first = ToyTrainer(layers=1)
    stamp = (first.reference / "model.safetensors").stat().st_mtime_ns
    assert ToyTrainer(layers=1, lr=0.5).reference == first.reference
    assert (first.reference / "model.safetensors").stat().st_mtime_ns == stamp
    assert ToyTrainer(layers=2).reference != first.reference


def test_two_processes_can_make_it_at_once(cache: Path) -> None:
    code = "from pipelines.trainers.toy import ToyTrainer; print(ToyTrainer(layers=1).reference)"
    processes = [
        subprocess.Popen([sys.executable, "-c", code], cwd=CONF.parent, stdout=subprocess.PIPE) for _ in range(2)
    ]
    folders = {process.communicate(timeout=120)[0].splitlines()[-1] for process in processes}
    assert [process.returncode for process in processes] == [0, 0]
    assert len(folders) == 1
    assert [path.name for path in cache.iterdir()] == [Path(folders.pop().decode()).name], "no unfinished folder stays"


def test_a_cache_that_cannot_be_written_is_an_error_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="XDG_CACHE_HOME"):
        ToyTrainer(layers=1)


def test_a_hidden_size_that_no_head_fits_is_refused(cache: Path) -> None:
    with pytest.raises(ConfigError, match="multiple of 64"):
        ToyTrainer(layers=1, hidden_size=100)


def test_a_checkpoint_trainer_is_its_folder(tmp_path: Path) -> None:
    save_file({"a.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    trainer = CheckpointTrainer(str(tmp_path))
    trainer.step()
    assert trainer.source == trainer.reference == tmp_path
    assert trainer.prompts() == []


@pytest.mark.parametrize("content", ["nothing", "bin only", "missing shard", "half a file"])
def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path: Path, content: str) -> None:
    folder = tmp_path / "model"
    if content != "nothing":
        folder.mkdir()
    if content == "bin only":
        (folder / "pytorch_model.bin").write_bytes(b"x")
    if content == "missing shard":
        index = {"weight_map": {"a.weight": "model-00001-of-00001.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    if content == "half a file":
        save_file({"a.weight": torch.ones(200)}, folder / "model.safetensors")
        whole = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match=str(folder)):
        CheckpointTrainer(str(folder))
