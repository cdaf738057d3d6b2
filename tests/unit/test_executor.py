"""The executor: what fits, who is closed when, whose time is whose."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.chains import make_run

from pipelines.executor import check_chain, run_chain
from stages.barrier import Barrier
from stages.base import Stage
from stages.bucket import Bucket as BucketStage
from stages.errors import CompositionError
from stages.flow import Bucket, Delivery, Group, Shipment
from stages.gather import GatherParams
from stages.notify import NotifyEngines
from stages.prefetch import Prefetch
from stages.run import Run
from stages.transport.disk import Disk
from stages.transport.ipc import Ipc


class Link(Stage):
    """Passes items on and writes down what happens to it."""

    def __init__(self, name: str, log: list[str], on: Callable[[int], None] = lambda item: None) -> None:
        self.name, self.log, self.on = name, log, on

    def __call__(self, items: Iterator[Any], run: Run) -> Iterator[Any]:
        try:
            for item in items if self.name != "first" else range(3):
                self.on(item)
                yield item
                self.log.append(f"{self.name} after {item}")
        finally:
            self.log.append(f"{self.name} closed")

    def abort(self) -> None:
        self.log.append(f"{self.name} aborted")


def chain(log: list[str], **on: Callable[[int], None]) -> list[Stage]:
    return [Link(name, log, on.get(name, lambda item: None)) for name in ("first", "middle", "last")]


def test_a_stage_brackets_its_item() -> None:
    log: list[str] = []
    assert run_chain(chain(log), make_run()) == [0, 1, 2]
    assert [x for x in log if "1" in x] == ["last after 1", "middle after 1", "first after 1"]


def test_nobody_is_aborted_when_all_goes_well() -> None:
    log: list[str] = []
    run_chain(chain(log), make_run())
    assert not [x for x in log if "aborted" in x]
    assert [x for x in log if "closed" in x] == ["first closed", "middle closed", "last closed"]


def raise_at(item: int, error: BaseException) -> Callable[[int], None]:
    def on(seen: int) -> None:
        if seen == item:
            raise error

    return on


@pytest.mark.parametrize("where", ["first", "middle", "last"])
@pytest.mark.parametrize(
    "error", [ValueError("broken"), KeyboardInterrupt(), SystemExit(3)], ids=lambda e: type(e).__name__
)
def test_whatever_stops_a_stage_wakes_and_closes_all(where: str, error: BaseException) -> None:
    log: list[str] = []
    with pytest.raises(type(error)) as caught:
        run_chain(chain(log, **{where: raise_at(1, error)}), make_run())
    assert caught.value is error
    assert {x for x in log if "aborted" in x} == {f"{n} aborted" for n in ("first", "middle", "last")}
    assert {x for x in log if "closed" in x} == {f"{n} closed" for n in ("first", "middle", "last")}


def test_stages_that_still_run_are_closed_last_first_after_all_were_woken() -> None:
    log: list[str] = []
    stages = chain(log, last=raise_at(0, ValueError()))
    with pytest.raises(ValueError):
        run_chain(stages, make_run())
    assert log == ["last closed", "first aborted", "middle aborted", "last aborted", "middle closed", "first closed"]


def test_an_error_while_closing_does_not_keep_the_others_open() -> None:
    log: list[str] = []

    class Clumsy(Link):
        def __call__(self, items: Iterator[Any], run: Run) -> Iterator[Any]:
            try:
                yield from items
            finally:
                raise RuntimeError("cannot close")

    stages = [Link("first", log), Clumsy("middle", log), Link("last", log, raise_at(0, ValueError("cause")))]
    with pytest.raises(RuntimeError, match="cannot close") as caught:
        run_chain(stages, make_run())
    assert "first closed" in log
    assert "ValueError: cause" in "".join(traceback.format_exception(caught.value))


def test_seconds_are_each_stages_own() -> None:
    class Slow(Link):
        phase: Any = None

        def __init__(self, name: str, phase: str | None, seconds: float) -> None:
            super().__init__(name, [], lambda item: time.sleep(seconds))
            self.phase = phase

    run = make_run()
    run_chain([Slow("first", "gather", 0.02), Slow("middle", "pack", 0.0), Slow("last", "wire", 0.01)], run)
    seconds = run.clock.seconds
    assert seconds["gather"] >= 0.06
    assert seconds["wire"] >= 0.03
    assert seconds["pack"] < seconds["wire"] < seconds["gather"]


def test_time_is_counted_for_an_update_that_failed_too() -> None:
    run = make_run()
    first = Link("first", [], raise_at(1, ValueError()))
    first.phase = "gather"  # type: ignore[misc]
    with pytest.raises(ValueError):
        run_chain([first], run)
    assert "gather" in run.clock.seconds


# -- what fits ----------------------------------------------------------------------------------------------------

FULL = (GatherParams, BucketStage, Prefetch, Ipc, Barrier, NotifyEngines)


def test_the_usual_chains_fit() -> None:
    check_chain([stage() for stage in FULL])
    check_chain([GatherParams(), BucketStage(), Disk("/nowhere"), NotifyEngines()])


class Any_(Stage):  # noqa: N801
    """A stage with nothing but what it consumes and produces."""

    def __init__(self, consumes: type | None, produces: type | None) -> None:
        self.consumes, self.produces = consumes, produces  # type: ignore[misc]


MISFITS = {
    "nothing": ([], "empty"),
    "no source": ([BucketStage(), Ipc(), NotifyEngines()], "Bucket needs Group"),
    "skipped": (
        [GatherParams(), Ipc(), NotifyEngines()],
        "GatherParams produces Group, but Ipc after it consumes Bucket",
    ),
    "swapped": (
        [GatherParams(), BucketStage(), Barrier(), Ipc(), NotifyEngines()],
        "Bucket produces Bucket, but Barrier",
    ),
    "prefetch too early": (
        [GatherParams(), Prefetch(), BucketStage(), Ipc(), NotifyEngines()],
        "GatherParams.*Prefetch",
    ),
    "two sources": ([GatherParams(), GatherParams(), BucketStage()], "GatherParams after it consumes nothing"),
    "no end": ([GatherParams(), BucketStage(), Ipc()], "Ipc is the last stage but delivers to no engine"),
    "after the end": ([GatherParams(), BucketStage(), Ipc(), NotifyEngines(), Barrier()], "NotifyEngines.*Barrier"),
    "produces nothing": ([GatherParams(), Any_(Group, None), BucketStage()], "Any_ produces nothing, but Bucket"),
}


@pytest.mark.parametrize("stages, words", MISFITS.values(), ids=list(MISFITS))
def test_a_chain_that_cannot_fit_names_both_stages(stages: list[Stage], words: str) -> None:
    with pytest.raises(CompositionError, match=words):
        check_chain(stages)


def test_a_narrower_kind_fits_a_wider_one() -> None:
    class Special(Shipment):
        pass

    check_chain([GatherParams(), BucketStage(), Any_(Bucket, Special), Any_(Shipment, Delivery)])
