"""vLLM's own trainer API and client drive our chain and our receiver inside a real vLLM."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from . import provision
from .checkpoints import CheckpointCache
from .proofs import assert_serves, fill_prefix_cache, learn
from .served import FP32, PLUGIN, Served, serve
from .servers import EngineServer

SCRIPT = Path(__file__).with_name("vllm_client.py")


@pytest.mark.parametrize("transport, kind", [("ipc", "module"), ("nccl", "stream")])
@serve(Served("vllm", FP32, extra=PLUGIN), Served("vllm", FP32, tp=2, extra=PLUGIN))
def test_send_weights_of_vllms_own_api_brings_every_weight(
    server: EngineServer, checkpoints: CheckpointCache, transport: str, kind: str
) -> None:
    first, last = (checkpoints(replace(FP32, seed=seed)) for seed in (1, 2))
    learned = learn(server, last)
    learn(server, first)
    fill_prefix_cache(server)
    command = [provision.python_of("vllm"), SCRIPT, server.url, transport, str(server.tp), kind, first, last]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert_serves(server, last, learned)
