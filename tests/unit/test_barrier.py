"""barrier on one rank: it passes shipments on and turns a recorded failure into a raised one. More ranks: test_comm."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from support.chains import MIXED, group_of, make_run, pack, tensor_of

from stages.barrier import Barrier
from stages.flow import Bucket, Shipment


def shipments(count: int = 3) -> list[Shipment]:
    plan = pack([group_of({f"t{i}": tensor_of(torch.uint8, (64,), i)}) for i in range(count)], MIXED, 64).plan
    return [Shipment(Bucket(b, plan, 1, None, None, False), None) for b in plan.buckets]


def test_shipments_pass_unchanged() -> None:
    sent = shipments()
    assert list(Barrier()(iter(sent), make_run())) == sent


def test_a_recorded_failure_is_raised_before_the_next_bucket() -> None:
    sent = shipments()
    passed = []
    with pytest.raises(LookupError, match="the engine's words"):
        for shipment in Barrier()(iter(sent), make_run()):
            passed.append(shipment)
            if len(passed) == 2:
                shipment.failure = LookupError("the engine's words")
    assert passed == sent[:2]


def test_an_error_upstream_is_the_one_that_is_raised() -> None:
    error = LookupError("upstream")

    def broken() -> Iterator[Shipment]:
        yield from shipments(1)
        raise error

    with pytest.raises(LookupError) as caught:
        list(Barrier()(broken(), make_run()))
    assert caught.value is error


def test_an_empty_stream_is_no_error() -> None:
    assert list(Barrier()(iter(()), make_run())) == []
