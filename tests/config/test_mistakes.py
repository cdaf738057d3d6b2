"""Mistakes that are easily made with checkpoints and sizes: two lines each, what is wrong and what to do."""

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pipelines.executor import plan_chain
from stages.bucket import Bucket
from stages.errors import ConfigError
from stages.gather import GatherParams
from stages.gather.checkpoint import INDEX, Checkpoint
from tests.support.chains import SPLIT, make_run


def two_lines(folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        Checkpoint(folder)
    assert len(str(caught.value).splitlines()) == 2
    return str(caught.value)


def test_a_missing_shard(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2)}, tmp_path / "one.safetensors")
    index = {"a": "one.safetensors", "b": "two.safetensors", "c": "three.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": index}))
    said = two_lines(tmp_path)
    assert "lacks 2 of the 3 files that its index lists, first two.safetensors" in said
    assert "fetch the rest" in said


@pytest.mark.parametrize(
    ("content", "said"), [(b"", "it is empty"), (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer")]
)
def test_a_file_that_is_none(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    assert said in two_lines(tmp_path)


@pytest.mark.parametrize(("capacity", "warned"), [(256, True), ("1MiB", False)])
def test_a_tiny_bucket_is_warned_of_once(capacity: int | str, warned: bool, caplog: pytest.LogCaptureFixture) -> None:
    run = make_run(SPLIT, model=torch.nn.Linear(256, 256))
    stages = [GatherParams(), Bucket(capacity)]
    with caplog.at_level(logging.WARNING, "weightstream"):
        for _ in range(3):
            plan_chain(stages, run)
    for stage in stages:
        stage.close()
    assert [r.message.splitlines()[1].strip()[:21] for r in caplog.records] == ["raise bucket.capacity"] * warned
