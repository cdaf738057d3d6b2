"""Every engine, transport and number of ranks through weightstream's API; feeds the support table in README.md."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from . import probes
from .checkpoints import CheckpointCache, Recipe
from .proofs import assert_serves, fill_prefix_cache, learn
from .served import FP32, PLUGIN, Served
from .servers import EngineServer
from .updates import segments, updater

HAS_AMX = "amx_tile" in Path("/proc/cpuinfo").read_text()  # vLLM's fp8 kernels for CPU are AMX

SGLANG = (
    Served("sglang", FP32),
    Served("sglang", FP32, tp=2),
    Served("sglang", Recipe("qwen3_moe")),
    Served("sglang", Recipe(fp8=True)),
)
VLLM = (  # MoE: reloading the very weights that it serves changes what vLLM 0.32.0 says on CPU
    Served("vllm", FP32, extra=PLUGIN),
    Served("vllm", FP32, tp=2, extra=PLUGIN),
    Served("vllm", replace(FP32, arch="llama", tied=True), extra=PLUGIN),
    Served("vllm", Recipe(fp8=True), extra=PLUGIN),
)
LMDEPLOY = (
    Served("lmdeploy"),
    Served("lmdeploy", tp=2),
    Served("lmdeploy", Recipe("qwen3_moe")),
    Served("lmdeploy", Recipe("qwen3_moe"), tp=2),
    Served("lmdeploy", Recipe("llama", tied=True)),
    Served("lmdeploy", Recipe(fp8=True), tp=2),
)


def cells() -> Iterator[object]:
    for served in (*SGLANG, *VLLM, *LMDEPLOY):
        for transport in ("ipc", "nccl", "disk"):
            if served.name == "lmdeploy" and (transport == "disk" or (transport == "nccl" and served.recipe.fp8)):
                continue  # refused; see test_traps.py
            needs_amx = served.name == "vllm" and served.recipe.fp8
            marks = [pytest.mark.skipif(needs_amx and not HAS_AMX, reason="vLLM's fp8 on CPU needs AMX")]
            yield pytest.param(served, transport, marks=marks, id=f"{transport}-{served}")


def exercise(
    server: EngineServer, served: Recipe, transport: str, checkpoints: CheckpointCache, workspace: Path, *more: str
) -> None:
    """Two updates by one updater, each proved; nothing left behind."""
    ours = segments()
    folders = [checkpoints(replace(served, seed=seed)) for seed in (1, 0)]
    learned = {folder: learn(server, folder) for folder in folders}
    with updater(server, transport, workspace, "bucket.capacity=256KiB", *more) as weights:
        for number, folder in enumerate(folders):
            fill_prefix_cache(server)
            report = weights.update(folder, version=f"{transport}-{number}")
            assert report.buckets > 3
            assert [engine.outcome for engine in report.engines] == ["committed"]
            assert_serves(server, folder, learned[folder])
            if server.name != "lmdeploy":
                assert probes.version_of(server) == f"{transport}-{number}"
    assert server.ready()
    assert segments() <= ours


@pytest.mark.support
@pytest.mark.parametrize(("server", "transport"), list(cells()), indirect=["server"])
def test_update(
    server: EngineServer, transport: str, served: Served, checkpoints: CheckpointCache, tmp_path: Path
) -> None:
    exercise(server, served.recipe, transport, checkpoints, tmp_path)
