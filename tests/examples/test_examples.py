"""Scripts as a user would write them, run as a user would run them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3 with an odd vocabulary and tied embeddings."""
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3Config(
        vocab_size=515,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=True,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("checkpoint")
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def torchrun(script: str, *arguments: str, ranks: int = 2) -> str:
    """What the script printed. Fails the test with its last words when it does not end well."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(HERE / script), *arguments], env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return done.stdout


@pytest.mark.parametrize("how", [("backend=lmdeploy", "transport=ipc"), ("backend=vllm", "transport=nccl")])
def test_grpo_over_fsdp2_pushes_every_step(checkpoint: Path, how: tuple[str, ...]) -> None:
    said = torchrun("grpo_fsdp2.py", str(checkpoint), *how, "gather.batch=64KB", "bucket.capacity=64KB")
    steps = [line for line in said.splitlines() if line.startswith("step ")]
    assert len(steps) == 3
    assert all(line.endswith("committed, verified by ['digest']") for line in steps), said


@pytest.mark.parametrize(
    "how", [("backend=sglang", "transport=ipc"), ("backend=vllm", "transport=nccl", "transport.port=0")]
)
def test_grpo_over_ray_pushes_every_step(checkpoint: Path, ray_cluster: str, how: tuple[str, ...]) -> None:
    command = [sys.executable, str(HERE / "grpo_ray.py"), str(checkpoint), *how, "bucket.capacity=64KB"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "RAY_ADDRESS": ray_cluster}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    steps = [line for line in done.stdout.splitlines() if line.startswith("step ")]
    assert len(steps) == 3
    assert all(line.endswith("committed, verified by ['digest', 'digest']") for line in steps), done.stdout


def test_optuna_finds_a_setting(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    command = [sys.executable, str(HERE / "optuna_sweep.py"), "--trials", "3", "trainer.layers=1"]
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert done.stdout.count("GB/s  bucket.capacity=") == 3
