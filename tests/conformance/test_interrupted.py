"""The trainer fails in the middle of an update while the engine lives on: nothing is served from half-loaded weights, and
the next complete update heals it, whoever makes it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from stages.errors import UpdateFailed

from . import probes
from .checkpoints import CheckpointCache
from .proofs import assert_serves, learn
from .provision import PROJECT
from .served import FP32, PLUGIN, Served, serve
from .servers import EngineServer
from .updates import overrides, updater

ENGINES = (Served("sglang", FP32), Served("vllm", FP32, extra=PLUGIN), Served("lmdeploy", tp=2))
SMALL_BUCKETS = "bucket.capacity=64KiB"
TRAINER = """
import os, sys
from pipelines import WeightUpdater
folder, *overrides = sys.argv[1:]
with WeightUpdater.from_config(overrides) as weights:
    weights.on_progress = lambda done, total: os._exit(9) if done > total / 2 else None
    weights.update(folder)
"""


class TrainerError(Exception):
    pass


def fail_halfway(done: int, total: int) -> None:
    if done > total / 2:
        raise TrainerError("out of memory in the trainer")


@serve(*ENGINES)
@pytest.mark.parametrize("transport", ["ipc", "nccl"])
def test_an_exception_in_the_trainer_leaves_the_engine_paused_until_a_complete_update(
    server: EngineServer, served: Served, transport: str, checkpoints: CheckpointCache, tmp_path: Path
) -> None:
    folder = checkpoints(replace(served.recipe, seed=1))
    learned = learn(server, folder)
    with updater(server, transport, tmp_path, SMALL_BUCKETS) as weights:
        weights.on_progress = fail_halfway
        with pytest.raises(UpdateFailed, match="out of memory in the trainer") as failed:
            weights.update(folder)
        assert failed.value.report.outcome == "tainted"  # type: ignore[attr-defined]
        assert list(weights.tainted) == [server.url]
        assert paused(server)
        weights.on_progress = None
        assert weights.update(folder)
        assert not weights.tainted
    assert_serves(server, folder, learned)


@serve(*ENGINES)
@pytest.mark.parametrize("transport", ["ipc", "nccl"])
def test_a_trainer_that_died_in_an_update_is_followed_by_another(
    server: EngineServer, served: Served, transport: str, checkpoints: CheckpointCache, tmp_path: Path
) -> None:
    folder = checkpoints(replace(served.recipe, seed=2))
    learned = learn(server, folder)
    chosen = [*overrides(server, transport, tmp_path), SMALL_BUCKETS]
    with (tmp_path / "trainer.txt").open("w") as output:
        died = subprocess.run(
            [sys.executable, "-c", TRAINER, str(folder), *chosen],
            cwd=PROJECT,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=120,
        )
    assert died.returncode == 9, (tmp_path / "trainer.txt").read_text()
    assert server.alive()
    with updater(server, transport, tmp_path, SMALL_BUCKETS) as weights:
        assert weights.update(folder)
    assert_serves(server, folder, learned)


def paused(server: EngineServer) -> bool:
    if server.name == "sglang":
        return probes.call(server, "GET", "/ready").status_code == 503
    path, key = ("/is_paused", "is_paused") if server.name == "vllm" else ("/is_sleeping", "is_sleeping")
    return bool(probes.ask(server, "GET", path)[key])
