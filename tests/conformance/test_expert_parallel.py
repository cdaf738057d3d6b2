"""LMDeploy with expert parallelism is one server for each rank: all of them are engines of one session."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pipelines import WeightUpdater

from .checkpoints import CheckpointCache, Recipe
from .probes import assert_lmdeploy_holds
from .served import Served, serve
from .servers import EngineServer

MOE = Recipe("qwen3_moe")


def place(rank: int) -> tuple[str, ...]:
    return ("--ep", "2", "--ep-rank", str(rank))


@pytest.mark.parametrize("transport", ["ipc", "nccl"])
@serve(Served("lmdeploy", MOE, extra=place(0)))
def test_every_server_keeps_its_own_experts_of_all_that_is_sent(
    server: EngineServer, checkpoints: CheckpointCache, tmp_path: Path, transport: str
) -> None:
    second = EngineServer("lmdeploy", checkpoints(MOE), tp=1, extra=place(1), log=tmp_path / "second.log")
    folder = checkpoints(replace(MOE, seed=1))
    with second:
        urls = f"engines.urls=[{server.url},{second.url}]"
        port = ["transport.port=0"] if transport == "nccl" else []
        settings = ["backend=lmdeploy", f"transport={transport}", *port, "engines=remote", urls]
        with WeightUpdater.from_config(settings) as updater:
            assert updater.update(folder).outcome == "committed"
        for rank, each in enumerate((server, second)):
            assert_lmdeploy_holds(each, folder, ep=2, ep_rank=rank)
