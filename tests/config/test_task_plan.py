"""task=plan: what would move, from a config.json alone; nothing moves and nothing is contacted."""

import json
from pathlib import Path

import pytest
import torch

from pipelines import tasks
from pipelines.config import load, precheck
from pipelines.tasks import plan, room
from stages.bucket import Bucket
from stages.errors import ConfigError
from stages.flow import Slot, TensorSpec
from stages.gather import group_specs, source_of
from stages.gather.checkpoint import INDEX
from tests.config.command import run
from tests.config.models import DEEPSEEK_V3, QWEN3_30B_A3B, SMALL, write
from tests.support.chains import Memory, make_run


def planned(capsys: pytest.CaptureFixture[str], *overrides: str) -> tuple[int, str]:
    code = tasks.run(load(["task=plan", *overrides]))
    return code, " ".join(capsys.readouterr().out.replace("│", " ").split())


def test_thirty_billion_parameters_by_their_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(tmp_path / "m", QWEN3_30B_A3B)
    settings = ["trainer=checkpoint", f"trainer.path={folder / 'config.json'}"]
    code, text = planned(capsys, *settings, "backend=sglang", "transport=nccl", "engines.count=4", "engines.tp=4")
    assert code == 0
    assert "30.53 billion" in text
    assert "61.1 GB in 18,867 tensors: bfloat16" in text
    assert "4 x sglang, tp=4, over nccl" in text
    assert "receives 61.1 GB, keeps about 15.3 GB" in text
    assert "16 of them: 977 GB" in text
    assert "the largest one is model.embed_tokens.weight alone" in text


def test_671_billion_parameters_quantized_as_their_config_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write(tmp_path / "m", DEEPSEEK_V3)
    code, text = planned(
        capsys, "trainer=checkpoint", f"trainer.path={folder}", "backend=vllm", "quantize=auto", "bucket.capacity=1GiB"
    )
    assert code == 0
    assert "671 billion" in text
    assert "669 GB float8_e4m3fn" in text
    assert "90,427 names, shapes and dtypes are as the engines hold them" in text


def test_wide_weights_for_a_quantized_engine_are_refused_with_the_way_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quantized = SMALL | {"quantization_config": DEEPSEEK_V3["quantization_config"]}
    folder = write(tmp_path / "m", quantized)
    code, text = planned(capsys, "trainer=checkpoint", f"trainer.path={folder}", "backend=vllm")
    assert code == 1
    assert "refused, see below" in text
    assert "use quantize=auto" in text
    assert planned(capsys, "trainer=checkpoint", f"trainer.path={folder}", "backend=vllm", "quantize=auto")[0] == 0


def test_an_index_is_held_against_the_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(tmp_path / "m", SMALL)
    settings = ["trainer=checkpoint", f"trainer.path={folder}", "backend=vllm"]
    _, made = plan.prepare(load(settings))
    names = plan.outline_of(folder).expected(made)
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, "model-00001.safetensors")}))
    assert planned(capsys, *settings)[0] == 0
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys([*names, "model.layers.9.mtp"], "a")}))
    code, text = planned(capsys, *settings)
    assert code == 1
    assert "missing: model.layers.9.mtp" in text


def test_engines_of_another_model_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = write(tmp_path / "mine", SMALL)
    theirs = write(tmp_path / "theirs", SMALL | {"vocab_size": 256})
    code, text = planned(capsys, "trainer=checkpoint", f"trainer.path={mine}", f"session.reference={theirs}")
    assert code == 1
    assert "shape: model.embed_tokens.weight is [512, 128], the engine has [256, 128]" in text


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "does not exist"),
        ({}, "needs a model_type"),
        ({"model_type": "no_such_model"}, "needs a model_type"),
        ({"model_type": "vit"}, "builds no language model"),
    ],
)
def test_a_model_that_cannot_be_described_is_refused_in_two_lines(
    tmp_path: Path, content: dict | None, said: str
) -> None:
    folder = tmp_path / "m"
    if content is not None:
        write(folder, content)
    with pytest.raises(ConfigError, match=said) as caught:
        plan.outline_of(folder)
    assert len(str(caught.value).splitlines()) == 2


def test_an_index_without_a_config_says_no_shapes(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "a.safetensors"}}))
    with pytest.raises(ConfigError, match="an index has names alone"):
        plan.outline_of(tmp_path / INDEX)


@pytest.mark.parametrize("backend", ["lmdeploy", "vllm"])
@pytest.mark.parametrize("capacity", [4096, 1 << 20])
def test_the_memory_is_that_which_the_bucket_stage_asks_for(backend: str, capacity: int) -> None:
    asked = []

    class Counting(Memory):
        def allocate(self, count: int, nbytes: int, run: object) -> list[Slot]:
            asked.append((count, nbytes))
            return [Slot(i, torch.zeros(nbytes, dtype=torch.uint8)) for i in range(count)]

    _, planning = plan.prepare(load([f"backend={backend}"]))
    made = make_run(planning.wire, transport=Counting())
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(64, 64), "b": torch.nn.Linear(64, 64).to(torch.bfloat16)})
    described = source_of(model).describe()
    specs = group_specs([TensorSpec(leaf.name, leaf.dtype, leaf.shape) for leaf in described.leaves], [])
    stage = Bucket(capacity)
    stage.plan(specs, made)
    stage.prepare(made)
    assert asked == [room.ring_of(stage, made)]
    stage.close()


@pytest.mark.parametrize(
    ("nbytes", "text"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (999_700_000, "1000 MB"), (61.06e9, "61.1 GB")]
)
def test_sizes_are_short(nbytes: float, text: str) -> None:
    assert room.size(nbytes) == text


def test_on_the_command_line_nothing_is_written(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", SMALL)
    command = run(
        tmp_path, "task=plan", "trainer=checkpoint", f"trainer.path={folder}", "backend=vllm", "transport=disk"
    )
    assert command.process.returncode == 0, command.err
    assert "3 versions (2 kept, one written)" in command.out
    assert not (tmp_path / "outputs").exists()


def test_a_sweep_of_plans_is_refused_and_a_misspelt_task_too() -> None:
    with pytest.raises(ConfigError, match="task=plan is no sweep"):
        precheck(["task=plan", "backend=vllm,sglang"], sweep=True)
    with pytest.raises(ConfigError, match="did you mean plan?"):
        load(["task=plna"])
