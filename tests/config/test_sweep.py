"""A sweep: each job in a process of its own, failed jobs shown as failed, the others unaffected, one table at the end."""

import csv
import json
import signal
import time
from pathlib import Path

import pytest

from tests.config.command import Command, run

TRAINER = """
import os
from pipelines.trainers.toy import ToyTrainer
from stages.errors import WeightstreamError

class Moody(ToyTrainer):
    def __init__(self, **settings):
        print("process", os.getpid())
        if settings["seed"] == 1:
            raise ZeroDivisionError("what nobody expected")
        if settings["seed"] == 2:
            os.abort()
        if settings["seed"] == 3:
            raise WeightstreamError("what somebody expected\\n  do something about it")
        super().__init__(**settings)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "moody.py").write_text(TRAINER)
    return tmp_path


@pytest.mark.parametrize("jobs", [1, 2])
def test_every_failure_is_listed_and_no_job_disturbs_another(folder: Path, jobs: int) -> None:
    command = run(
        folder,
        "-m",
        "trainer._target_=moody.Moody",
        "trainer.seed=1,2,0,3",
        "trainer.layers=1",
        "updates=1",
        f"hydra.launcher.n_jobs={jobs}",
        "hydra.sweep.dir=sweep",
    )
    assert command.process.returncode == 1, command.err
    statuses = [json.loads((folder / "sweep" / str(n) / "status.json").read_text()) for n in range(4)]
    assert [s["status"] for s in statuses] == ["failed", "failed", "completed", "failed"]
    assert [s["exit_code"] for s in statuses] == [1, 134, 0, 1]
    assert all(f"trainer.seed={seed}" in s["overrides"] for s, seed in zip(statuses, (1, 2, 0, 3), strict=True))
    assert "ZeroDivisionError: what nobody expected" in statuses[0]["traceback"]
    assert "SIGABRT" in statuses[1]["error"]
    assert "what somebody expected" in statuses[3]["error"]

    log = (folder / "sweep" / "0" / "weightstream.log").read_text()
    assert "ZeroDivisionError: what nobody expected" in log, "a failed job's own log says why"
    pids = {line.split()[-1] for n in range(4) for line in output(folder, n) if line.startswith("process")}
    assert len(pids) == 4

    summary = command.out[command.out.rindex("3 of 4 jobs failed") :]
    for seed in (1, 2, 3):
        assert f"trainer.seed={seed}" in summary
    assert "trainer.seed=0" not in summary
    assert "ZeroDivisionError: what nobody expected" in command.out

    rows = list(csv.DictReader((folder / "sweep" / "results.csv").open()))
    assert [row["trainer.seed"] for row in rows] == ["1", "2", "0", "3"]
    assert [row["outcome"] for row in rows] == ["failed", "failed", "committed", "failed"]
    assert float(rows[2]["gb_per_s"]) > 0
    assert command.left_behind() == []


def output(folder: Path, number: int) -> list[str]:
    return (folder / "sweep" / str(number) / "output.log").read_text().splitlines()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_when_the_sweep_ends_its_jobs_end(folder: Path, number: int) -> None:
    command = Command(
        folder,
        "-m",
        "trainer.seed=0,4",
        "trainer.layers=1",
        "updates=100000",
        "hydra.launcher.n_jobs=2",
        "hydra.sweep.dir=sweep",
    )
    deadline = time.monotonic() + 180
    while len(command.descendants()) < 4 and time.monotonic() < deadline:  # two jobs, two engines
        time.sleep(0.1)
    assert len(command.descendants()) >= 4
    command.interrupt(number)
    code = command.wait(60)
    assert code == (130 if number == signal.SIGINT else -signal.SIGKILL)
    assert "Traceback" not in command.err
    assert [left for left in command.left_behind(40) if left.startswith("process")] == []


def test_a_job_that_cannot_be_composed_is_refused_before_any_job_starts(folder: Path) -> None:
    command = run(folder, "-m", "backend=vllm,sglang", "backend.pause=keep,abort", "hydra.sweep.dir=sweep")
    assert command.process.returncode == 2
    assert "job 2 (backend=sglang backend.pause=keep)" in command.err
    assert not (folder / "sweep" / "0").exists()
