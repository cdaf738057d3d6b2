"""The other ways in that engines have: buckets as lists of tensors, and wide weights that the engine quantizes itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from . import probes
from .checkpoints import CheckpointCache, Recipe
from .proofs import assert_serves, fill_prefix_cache, learn
from .served import FP32, PLUGIN, Served, serve
from .servers import EngineServer
from .test_matrix import HAS_AMX, exercise
from .updates import updater

FP8 = Recipe(fp8=True)
LISTS = [
    *[(Served("sglang", FP32, tp=tp), transport) for tp in (1, 2) for transport in ("ipc", "nccl")],
    (Served("sglang", FP8), "ipc"),
    (Served("lmdeploy"), "nccl"),
    (Served("lmdeploy", tp=2), "ipc"),
    (Served("lmdeploy", Recipe("qwen3_moe")), "ipc"),
    (Served("lmdeploy", FP8, tp=2), "ipc"),
]


@pytest.mark.parametrize(
    ("server", "transport"), LISTS, indirect=["server"], ids=[f"{transport}-{served}" for served, transport in LISTS]
)
def test_buckets_as_lists_of_tensors(
    server: EngineServer, served: Served, transport: str, checkpoints: CheckpointCache, tmp_path: Path
) -> None:
    exercise(server, served.recipe, transport, checkpoints, tmp_path, "backend.load_format=per_tensor")


@serve(Served("lmdeploy", FP8), Served("lmdeploy", FP8, tp=2))
@pytest.mark.parametrize("transport", ["ipc", "nccl"])
def test_lmdeploy_quantizes_what_comes_wide(
    server: EngineServer, transport: str, checkpoints: CheckpointCache, tmp_path: Path
) -> None:
    """Every rank holds what it would hold of the quantized twin; over gloo too, which cannot broadcast fp8."""
    settings = ("quantize=engine", f"session.reference={server.model_dir}", "bucket.capacity=256KiB")
    with updater(server, transport, tmp_path, *settings) as weights:
        for seed in (1, 0):
            weights.update(checkpoints(Recipe(seed=seed)))
            probes.assert_lmdeploy_holds(server, checkpoints(replace(FP8, seed=seed)))


@pytest.mark.support
@pytest.mark.skipif(not HAS_AMX, reason="vLLM's fp8 on CPU needs AMX")
@serve(Served("vllm", Recipe(), extra=(*PLUGIN, "--quantization", "fp8_per_block")))
@pytest.mark.parametrize("transport", ["ipc", "nccl", "disk"])
def test_vllm_quantizes_online(
    server: EngineServer, transport: str, checkpoints: CheckpointCache, tmp_path: Path
) -> None:
    """It holds the wide checkpoint as its model, and quantizes anew at every update."""
    folders = [checkpoints(Recipe(seed=seed)) for seed in (1, 0)]
    learned = {folder: learn(server, folder) for folder in folders}
    assert learned[folders[0]] != learned[folders[1]]
    with updater(server, transport, tmp_path, "bucket.capacity=256KiB") as weights:
        for folder in folders:
            fill_prefix_cache(server)
            weights.update(folder)
            assert_serves(server, folder, learned[folder])
