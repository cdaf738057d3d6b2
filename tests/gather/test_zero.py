"""DeepSpeed ZeRO-3 on gloo: what is gathered is what DeepSpeed itself gathers."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from gather.streams import collect, differences, rank_run
from gather.toy import Toy, hf_tensors
from gather.world import World
from stages.gather import GatherParams

if importlib.util.find_spec("deepspeed") is None:
    pytest.skip("needs the deepspeed extra", allow_module_level=True)


@contextlib.contextmanager
def deepspeed_on_cpu() -> Iterator[Any]:
    """DeepSpeed without its kernel for shared memory, which takes a minute to compile."""
    with mock.patch.dict(os.environ, DS_ACCELERATOR="cpu"):
        import deepspeed

        backend = importlib.import_module("deepspeed.comm.torch")  # as an attribute it is torch itself
        with mock.patch.object(backend, "build_shm_op", lambda: None):
            deepspeed.init_distributed(dist_backend="gloo")
            yield deepspeed


def check(rank: int) -> dict[str, list[str]]:
    found = {}
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 100},
    }
    with deepspeed_on_cpu() as deepspeed:
        for name, options in {"tied": {"tied": True}, "experts": {"experts": 5}}.items():
            engine, *_ = deepspeed.initialize(model=Toy(**options), config=settings)
            stage, run = GatherParams(batch=40_000), rank_run((0,))
            for step in range(2):
                engine.backward(engine(torch.arange(4) + rank).sum())
                engine.step()
                with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
                    want = hf_tensors(engine.module)
                wrong = differences(collect(stage, engine, run), want if rank == 0 else {})
                if wrong:
                    found[f"{name} after step {step}"] = wrong
            stage.close()
            engine.destroy()
    return found


def test_gives_what_deepspeed_gathers() -> None:
    world = World()  # DeepSpeed leaves things behind in a process
    try:
        assert world.run(2, check) == [{}, {}]
    finally:
        world.close()
