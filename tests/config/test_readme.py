"""README.md: each of its commands runs, each of its programs too; one that is added without a test here is a failure."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from pipelines.config import build, load
from pipelines.launch import EngineLauncher
from pipelines.trainers.base import Trainer
from tests.config.command import ROOT
from tests.config.models import SMALL, write

README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.S | re.M)


def commands() -> list[str]:
    """The command lines, one each, without their comments."""
    lines = [line for block in blocks("bash") for line in block.replace("\\\n", " ").splitlines()]
    return [" ".join(re.sub(r"\s+#.*", "", line).split()) for line in lines if line.strip()]


@dataclass
class How:
    """Words to put in place of others, settings that make it quick, and what is to come of it."""

    change: dict[str, str] = field(default_factory=dict)
    more: str = ""
    code: int = 0
    said: str = "committed"


QUICK = "trainer.layers=1 updates=1"
URLS = "http://host:30000,http://host:30001"
HOW = {
    "python run.py backend=sglang transport=nccl trainer=checkpoint trainer.path=/models/step-200 engines=remote "
    f"'engines.urls=[{URLS}]' updates=1": How(
        {"/models/step-200": "CHECKPOINT", URLS: "ENGINES"}, more="transport.port=0"
    ),
    "python run.py task=plan trainer=checkpoint trainer.path=config.json backend=vllm engines.tp=8": How(
        said="8 of them"
    ),
    "python run.py task=doctor backend=sglang transport=nccl engines=remote 'engines.urls=[http://host:30000]'": How(
        {"http://host:30000": "ENGINE"}, more="transport.port=0", said="0 to mend"
    ),
    "python run.py task=matrix": How(said="lmdeploy"),
    "torchrun --nproc-per-node 2 run.py backend=vllm transport=nccl": How(more=f"{QUICK} transport.port=0"),
    "python run.py -m backend=sglang,vllm updates=5": How({"updates=5": QUICK}, said="results.html"),
    "python run.py backend=vllm report.timeline=timeline.json report.metrics=weightstream.prom": How(more=QUICK),
    "PYTHONPATH=. python run.py 'report.callbacks=[{_target_: my_callbacks.TensorBoard, folder: runs}]'": How(
        {"TensorBoard": "Printed"}, more=QUICK, said="weights/total 1"
    ),
    "PYTHONPATH=. python run.py "
    "'recipe.stages=[gather_params,{_target_: my_stages.TextTower},bucket,transport,barrier,notify_engines]'": How(
        more=QUICK, code=1, said="language_model."
    ),
}
# What installs us and what runs the tests is done by .ci/run, which cannot run itself.
BY_CI = {
    "pip install -e '.[demo]' && python run.py backend=lmdeploy transport=ipc": "python run.py backend=lmdeploy transport=ipc",
    "pip install -e '.[demo,dev]' && pytest -q": "pytest -q",
}
# Writes to a file what SummaryWriter, whose package is no dependency, would be given.
PRINTED = """
import sys, types
fake = types.ModuleType("torch.utils.tensorboard")
class SummaryWriter:
    def __init__(self, folder): pass
    def add_scalar(self, name, value, step): print(name, step)
fake.SummaryWriter = SummaryWriter
sys.modules["torch.utils.tensorboard"] = fake
class Printed(TensorBoard): pass
"""


def test_every_command_is_run_by_a_test() -> None:
    assert set(commands()) == {*HOW, *BY_CI}
    script = (ROOT / ".ci" / "run").read_text()
    for line in BY_CI.values():
        assert f"\nstep {line}" in script
    assert re.search(r"\nstep pip install .*-e '\.\[demo,dev", script)


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Path, list[str]]]:
    """A checkpoint, and two SGLang-speaking engines that serve it."""
    checkpoint = build(load(["trainer.layers=1"])["trainer"], Trainer).reference
    launcher = EngineLauncher()
    try:
        yield checkpoint, launcher.start(checkpoint, "sglang", count=2)
    finally:
        launcher.close()


@pytest.mark.parametrize("command", HOW)
def test_it_does_what_the_readme_says(command: str, tmp_path: Path, served: tuple[Path, list[str]]) -> None:
    how, (checkpoint, urls) = HOW[command], served
    write(tmp_path, SMALL)
    for program in blocks("python"):
        if name := re.match(r"# (my_\w+\.py)\n", program):
            (tmp_path / name[1]).write_text(program + (PRINTED if name[1] == "my_callbacks.py" else ""))
    for old, new in how.change.items():
        assert old in command
        command = command.replace(old, new)
    values = {"CHECKPOINT": str(checkpoint), "ENGINES": ",".join(urls), "ENGINE": urls[0]}
    line = re.sub(r"\b(CHECKPOINT|ENGINES|ENGINE)\b", lambda m: values[m[0]], f"{command} {how.more}")
    line = line.replace("torchrun", "python -m torch.distributed.run --standalone")
    line = re.sub(r"\bpython (.*?)\brun\.py", rf"{sys.executable} \1{ROOT}/run.py", line, count=1)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("WEIGHTSTREAM_")} | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["bash", "-c", line], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == how.code, (done.stdout + done.stderr)[-4000:]
    assert how.said in done.stdout + done.stderr
    if "timeline" in command:
        assert json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
        assert "weightstream_update_committed 1" in (tmp_path / "weightstream.prom").read_text()


def test_the_trainer_of_the_readme_runs(served: tuple[Path, list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint, urls = served
    (program,) = [p for p in blocks("python") if "WeightUpdater.from_config" in p]
    for old, new in {"vllm": "sglang", "http://127.0.0.1:8000": urls[0], "/models/qwen3": str(checkpoint)}.items():
        assert old in program
        program = program.replace(old, new)
    trainer = build(load(["trainer.layers=1"])["trainer"], Trainer)
    exec(program, {"steps": 2, "model": trainer.source, "train_one_step": lambda model: trainer.step()})
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["1", "2"]


def test_every_link_leads_to_a_file() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert links
    for link in links:
        assert link.startswith("https://") or (ROOT / link).exists(), link
