"""Trainer ranks of the command line: started by us or by torchrun, one report, nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.config.command import ROOT, Command, run

SMALL = ("trainer.layers=1", "trainer.hidden_size=64", "updates=2", "gather.batch=16KiB", "bucket.capacity=64KiB")


def reports(folder: Path) -> list[Path]:
    return sorted(folder.rglob("report.json"))


def check(folder: Path, proof: str = "digest") -> None:
    (path,) = reports(folder)
    report = json.loads(path.read_text())
    assert report["outcome"] == "committed"
    assert [engine["verified"] for update in report["updates"] for engine in update["engines"]] == [proof] * 2


def torchrun(folder: Path, ranks: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return subprocess.run(
        [*command, str(ROOT / "run.py"), *arguments],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_ranks_that_the_run_starts_train_one_sharded_model(tmp_path: Path) -> None:
    command = run(tmp_path, "backend=sglang", "launcher.ranks=3", *SMALL)
    assert command.process.returncode == 0, command.err
    check(tmp_path)
    assert command.out.count("report: ") == 1
    assert not command.left_behind()


def test_under_torchrun_its_ranks_are_taken_and_rank_0_speaks(tmp_path: Path) -> None:
    done = torchrun(tmp_path, 4, "backend=vllm", "transport=nccl", "transport.port=0", *SMALL)
    assert done.returncode == 0, done.stderr
    check(tmp_path)
    assert done.stdout.count("report: ") == 1
    assert len(list((tmp_path / "outputs").glob("*/*"))) == 1, "ranks above 0 write no folder of their own"


def test_a_checkpoint_goes_out_from_torchruns_ranks(tmp_path: Path, small_checkpoint: Path) -> None:
    where = ("trainer=checkpoint", f"trainer.path={small_checkpoint}", "updates=2")
    done = torchrun(tmp_path, 2, "backend=lmdeploy", *where)
    assert done.returncode == 0, done.stderr
    check(tmp_path)


def test_torchrun_and_ranks_of_our_own_or_a_sweep_do_not_go_together(tmp_path: Path) -> None:
    done = torchrun(tmp_path, 2, "launcher.ranks=2", *SMALL)
    assert done.returncode != 0
    assert "launcher.ranks=2, but torchrun has started 2 ranks" in done.stderr
    done = torchrun(tmp_path, 2, "-m", "backend=vllm,sglang", *SMALL)
    assert done.returncode != 0
    assert "start it without torchrun" in done.stderr
    assert not reports(tmp_path)


def test_ranks_that_disagree_with_torchruns_variables_are_refused(tmp_path: Path) -> None:
    world = {"RANK": "0", "WORLD_SIZE": "many", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    command = run(tmp_path, *SMALL, **world)
    assert command.process.returncode == 2
    assert "WORLD_SIZE='many'" in command.err


def rank_process(command: Command, rank: int, seconds: float = 60.0) -> int:
    """The pid of a rank that the run has started."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for process in command.descendants():
            words = process.cmdline()
            if "pipelines.cli.rank" in words and words[words.index("pipelines.cli.rank") + 1] == str(rank):
                return process.pid
        time.sleep(0.05)
    raise AssertionError("the rank did not appear")


@pytest.mark.parametrize("when", ["at the start", "while it runs"])
def test_a_rank_that_is_killed_ends_the_run_with_its_name(tmp_path: Path, when: str) -> None:
    command = Command(tmp_path, "launcher.ranks=2", *SMALL, "updates=100000", "session.timeouts.agree=30")
    pid = rank_process(command, 1)
    if when == "while it runs":
        log = wait_for_updates(tmp_path, command)
        assert "update 2: version 2 committed" in log
    os.kill(pid, signal.SIGKILL)
    assert command.wait(120.0) == 1
    assert "trainer rank 1 ended with exit code -9" in command.err
    assert not command.left_behind()


def wait_for_updates(folder: Path, command: Command, seconds: float = 90.0) -> str:
    """What the log says once two updates are through."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        text = "".join(path.read_text() for path in folder.rglob("weightstream.log"))
        if "update 2:" in text:
            return text
        assert command.process.poll() is None, command.process.communicate()
        time.sleep(0.05)
    raise AssertionError("no second update")


def test_ctrl_c_ends_all_ranks(tmp_path: Path) -> None:
    command = Command(tmp_path, "launcher.ranks=2", *SMALL, "updates=100000")
    wait_for_updates(tmp_path, command)
    command.interrupt()
    assert command.wait(60.0) == 130
    assert len(reports(tmp_path)) == 1
    assert not command.left_behind()
