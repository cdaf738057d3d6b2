"""The executor: check that a chain fits, run it, close it in reverse."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import pairwise
from typing import Any

from stages.base import Stage
from stages.errors import CompositionError
from stages.flow import Delivery, GroupSpec
from stages.run import Clock, Run
from stages.trace import TracedLink

log = logging.getLogger("weightstream")

_TINY = 64  # buckets of which nobody minds that they are small


def check_chain(stages: Sequence[Stage]) -> None:
    """Raise CompositionError, naming both stages, where one does not produce what the next consumes."""
    if not stages:
        raise CompositionError("recipe.stages is empty; see conf/recipe/full.yaml")
    first, last = stages[0], stages[-1]
    if first.consumes is not None:
        raise CompositionError(
            f"{_name(first)} needs {first.consumes.__name__} items, but nothing comes before it; start with gather_params"
        )
    for before, after in pairwise(stages):
        made, needed = before.produces, after.consumes
        if needed is None or made is None or not issubclass(made, needed):
            raise CompositionError(
                f"{_name(before)} produces {_kind(made)}, but {_name(after)} after it consumes {_kind(needed)}; "
                f"see recipe.stages"
            )
    if last.produces is not Delivery:
        raise CompositionError(f"{_name(last)} is the last stage but delivers to no engine; end with notify_engines")


def plan_chain(stages: Sequence[Stage], run: Run) -> None:
    """Set `run.plan` from what the first stage says, anew where that or the wire's rules changed; else it serves on."""
    specs: tuple[GroupSpec, ...] = tuple(stages[0].plan((), run))
    key = (specs, run.wire)
    if key == run.planned and run.plan is not None:
        return
    run.planned = None
    run.gathered = specs
    for stage in stages[1:]:
        specs = tuple(stage.plan(specs, run))
    run.planned = key
    _warn_of_tiny_buckets(run)


def _warn_of_tiny_buckets(run: Run) -> None:
    plan = run.plan
    if plan is not None and len(plan.buckets) > max(_TINY, len(plan.tensors)):
        log.warning(
            "%d buckets for %d tensors: nearly every tensor is cut, each piece a request to every engine\n"
            "  raise bucket.capacity (%d bytes in the largest bucket now)",
            len(plan.buckets),
            len(plan.tensors),
            plan.largest_bucket,
        )


def run_chain(stages: Sequence[Stage], run: Run, ready: Callable[[], None] = lambda: None) -> list[Delivery]:
    """Stream one update through the chain; returns every delivery.

    `ready` is called before the first delivery is asked for; what runs ahead in a thread of its own does so meanwhile.
    Whatever stops it, stages are closed in reverse and whoever waits inside one is woken first.
    """
    deliveries: list[Delivery] = []
    with ExitStack() as closing:
        links: list[_Timed | TracedLink] = []
        trace = run.clock.trace
        items: Iterator[Any] = iter(())
        for stage in stages:
            generator = stage(items, run)
            closing.callback(_close, generator)
            if trace is None:
                items = _Timed(generator)
            else:
                before = links[-1] if links else None
                items = TracedLink(generator, _name(stage), trace, before if isinstance(before, TracedLink) else None)
            links.append(items)
        try:
            ready()
            try:
                with run.clock.time("transfer"):
                    deliveries.extend(items)
            finally:
                _count_self_time(stages, links, run.clock)
        except BaseException:
            for stage in stages:
                stage.abort()
            raise
    return deliveries


class _Timed:
    """An iterator that measures how long its consumer waits for it."""

    def __init__(self, items: Iterator[Any]) -> None:
        self._items = items
        self.seconds = 0.0

    def __iter__(self) -> _Timed:
        return self

    def __next__(self) -> Any:
        start = time.perf_counter()
        try:
            return next(self._items)
        finally:
            self.seconds += time.perf_counter() - start

    def close(self) -> None:
        _close(self._items)


def _count_self_time(stages: Sequence[Stage], links: Sequence[_Timed | TracedLink], clock: Clock) -> None:
    upstream = 0.0
    for stage, link in zip(stages, links, strict=True):
        if stage.phase is not None:
            clock.add(stage.phase, max(0.0, link.seconds - upstream))
        upstream = link.seconds


def _close(items: object) -> None:
    close = getattr(items, "close", None)
    if close is not None:
        close()


def _name(stage: Stage) -> str:
    return type(stage).__name__


def _kind(kind: type | None) -> str:
    return "nothing" if kind is None else kind.__name__
