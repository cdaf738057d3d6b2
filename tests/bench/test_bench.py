"""Speed as ratios of one run, with bounds that hold on a busy machine; `python -m tests.bench` has the strict ones."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.bench import costs
from tests.bench.__main__ import QUICK, Row, run, table
from tests.bench.limits import Handles, MemcpyRing
from tests.bench.models import MODELS, Weights
from tests.bench.ours import Ours
from tests.bench.peer import Peer, sample, zero


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def by_way(rows: list[Row]) -> dict[str, float]:
    return {row.way: row.of_limit or 0.0 for row in rows}


def test_ipc_beats_pickled_handles_through_every_wire() -> None:
    rows = run(["ipc"], QUICK)
    shares = by_way(rows)
    handles = next(share for way, share in shares.items() if way.startswith("pickled"))
    ours = {way: share for way, share in shares.items() if way.startswith("ours")}
    assert len(ours) == 4
    assert all(share > handles for share in ours.values()), shares
    assert table(rows).row_count == len(rows)


@pytest.mark.parametrize("section", ["nccl", "disk"])
def test_other_sections_run(section: str) -> None:
    shares = by_way(run([section], QUICK))
    assert all(share > 0.05 for way, share in shares.items() if way.startswith("ours")), shares


def test_limits_and_baselines_bring_the_right_bytes() -> None:
    model, other = Weights(MODELS["quick"](), 3), Peer("quick")
    wanted = [float(p.view(-1)[0]) for p in model.parameters()]
    try:
        for way in (MemcpyRing(model, other, 4 << 20), Handles(model, other)):
            other.call(zero)
            way.once()
            assert other.call(sample) == wanted
    finally:
        other.close()


def test_python_per_tensor_and_per_plan() -> None:
    """Describing a module anew costs 100 us per tensor; a steady update must be far from that."""
    assert costs.sending_us_per_tensor(3000) < 15
    assert costs.planning_seconds(20_000) < 1.0


def test_many_engines_cost_little_more_than_one_and_a_slow_one_its_own_time() -> None:
    seconds = costs.fleet_seconds(count=16, delay=0.03)
    assert seconds["all"] < 3 * seconds["one"]
    assert seconds["slow"] - seconds["all"] < 1.5 * seconds["own"]


def test_nothing_is_sent_or_allocated_again() -> None:
    way = Ours("", Weights(MODELS["quick"](), 0), "quick", ["backend=vllm", "transport=ipc", "bucket.capacity=4MiB"])
    try:
        with costs.requests_counted() as first:
            way.once()
        with costs.requests_counted() as again:
            way.once()
        buckets = way.last.buckets
        assert again["/update_weights"] < 300 * buckets
        assert again["/update_weights"] < first["/update_weights"] - 1000  # the plan
        assert "/init_weight_transfer_engine" not in again
        assert costs.memory_growth(way, 20) < 4 << 20
    finally:
        way.close()
