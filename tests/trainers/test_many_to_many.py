"""Four trainer ranks with one sharded model, two engines of two ranks each: every transport, every engine rank by digest."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from support.processes import Pool, ranks

from pipelines.launch import EngineLauncher

KEPT: dict[str, Any] = {}  # in a rank's process: from one call to the next


@pytest.fixture(scope="module")
def four() -> Iterator[Pool]:
    pool = ranks(4)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def engines(small_checkpoint: Path) -> Iterator[list[str]]:
    launcher = EngineLauncher()
    try:
        yield launcher.start(small_checkpoint, "sglang", count=2, tp=2)
    finally:
        launcher.close()


def train(rank: int) -> str:
    """Make this rank's part of the model."""
    import torch

    from pipelines.trainers.toy import ToyTrainer

    torch.set_num_threads(1)
    KEPT["trainer"] = trainer = ToyTrainer(layers=1, hidden_size=64)
    return str(trainer.source.model.norm.weight.placements)


def push(rank: int, urls: list[str], transport: list[str]) -> list[list[str | None]]:
    from pipelines.updater import WeightUpdater

    trainer = KEPT["trainer"]
    how = [
        "backend=sglang",
        "engines=remote",
        f"engines.urls=[{','.join(urls)}]",
        "engines.tp=2",
        "engines.proof=digest",
    ]
    how += ["gather.batch=16KiB", "bucket.capacity=32KiB"]
    seen = []
    with WeightUpdater.from_config([*how, *transport], reference=trainer.reference) as updater:
        for _ in range(2):
            trainer.step()
            report = updater.update(trainer.source)
            seen += [[e.outcome, e.verified] for e in report.engines]
    return seen


@pytest.mark.parametrize("transport", ["ipc", "nccl", "nccl per engine", "disk"])
def test_four_ranks_to_two_engines_of_two(
    four: Pool, engines: list[str], small_checkpoint: Path, tmp_path: Path, transport: str
) -> None:
    if not KEPT:
        KEPT["sharded"] = [outcome.value for outcome in four.each(train, timeout=120.0)]
    assert all("Shard" in placements for placements in KEPT["sharded"])
    more = {
        "ipc": [],
        "nccl": ["transport.port=0"],
        "nccl per engine": ["transport.port=0", "transport.groups=per_engine"],
        "disk": [f"transport.path={tmp_path}"],
    }[transport]
    before = digests(engines)
    outcomes = four.each(push, engines, [f"transport={transport.split()[0]}", *more], timeout=120.0)
    for outcome in outcomes:
        assert outcome.error is None, outcome.trace
    assert outcomes[0].value == [["committed", "digest"]] * 4
    after = digests(engines)
    assert len(after) == 1, "all four engine ranks hold the same"
    assert after != before


def digests(engines: list[str]) -> set[str]:
    """Of every rank of every engine."""
    answers = [requests.get(f"{url}/weightstream/digest", timeout=30).json() for url in engines]
    assert [len(answer["ranks"]) for answer in answers] == [2, 2]
    return {rank["digest"] for answer in answers for rank in answer["ranks"]}
