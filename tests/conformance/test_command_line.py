"""`python run.py` against engines that run already, as a user types it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from .checkpoints import CheckpointCache
from .proofs import assert_serves, learn
from .served import FP32, PLUGIN, Served, serve
from .servers import EngineServer
from .updates import command_line, overrides

ENGINES = (Served("sglang", FP32, tp=2), Served("vllm", FP32, tp=2, extra=PLUGIN), Served("lmdeploy", tp=2))


@serve(*ENGINES)
def test_an_update_is_made_and_reported(
    server: EngineServer, served: Served, checkpoints: CheckpointCache, tmp_path: Path
) -> None:
    folder = checkpoints(replace(served.recipe, seed=3))
    learned = learn(server, folder)
    learn(server, server.model_dir)
    transport = "nccl" if server.name == "lmdeploy" else "ipc"
    proof = {"vllm": "digest", "sglang": "version", "lmdeploy": "acknowledged"}[server.name]
    chosen = overrides(server, transport, tmp_path, "trainer=checkpoint", f"trainer.path={folder}", "updates=2")
    done = command_line(tmp_path, *chosen, f"engines.proof={proof}")
    assert done.returncode == 0, done.stdout
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["outcome"] == "committed"
    assert [u["engines"][0]["verified"] for u in report["updates"]] == [proof, proof]
    assert_serves(server, folder, learned)
