"""A trainer of several ranks: whatever fails on one, all raise the same root cause in bounded time, and the next update works.

Real gloo processes with a whole WeightUpdater each; rank 0 has the engine.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.chains import SHORT
from support.fakes import FakeEngine, Toy, engines_of, updater_for
from support.processes import Outcome, Pool, ranks

from pipelines.updater import WeightUpdater
from stages.base import GroupMapper
from stages.errors import UpdateFailed
from stages.flow import Group, GroupSpec
from stages.run import Run

CAUSE = "the root cause"
CHAINS = {
    "minimal": ["bucket", "transport", "barrier", "notify_engines"],
    "prefetch": ["bucket", "prefetch", "transport", "barrier", "notify_engines"],
    "no barrier": ["bucket", "transport", "notify_engines"],
}


class Saboteur(GroupMapper):
    """A stage that fails where it is told to, once."""

    def __init__(self) -> None:
        super().__init__()
        self.where: str | None = None
        self.act: Callable[[], Any] = lambda: None

    def _maybe(self, where: str) -> None:
        if where == self.where:
            self.where = None
            self.act()

    def plan(self, specs: Iterable[GroupSpec], run: Run) -> Iterable[GroupSpec]:
        self._maybe("plan")
        return super().plan(specs, run)

    def prepare(self, run: Run) -> None:
        self._maybe("prepare")

    def __call__(self, items: Iterator[Group], run: Run) -> Iterator[Group]:
        self._maybe("start of the stream")
        for index, group in enumerate(super().__call__(items, run)):
            if index == 2:
                self._maybe("middle of the stream")
            yield group
        self._maybe("end of the stream")

    def committed(self, version: str) -> None:
        self._maybe("committed")


class Uneven(GroupMapper):
    """A stage that once yields other groups than were planned."""

    how: str | None = None

    def __call__(self, items: Iterator[Group], run: Run) -> Iterator[Group]:
        groups = list(
            super().__call__(items, run)
        )  # whatever it does, this rank takes part in the collectives of gather
        how, self.how = self.how, None
        if how == "none at all":
            groups = []
        elif how == "one less":
            groups = groups[:-1]
        elif how == "one more":
            groups = [*groups, groups[-1]]
        yield from groups


def blame() -> None:
    raise LookupError(CAUSE)


def make(chain: str, agree: float = 30.0, **settings: Any) -> WeightUpdater:
    stages = ["gather_params", {"_target_": f"{__name__}.Saboteur"}, *CHAINS[chain]]
    return updater_for(stages=stages, timeouts=replace(SHORT, agree=agree), **settings)


def saboteur(updater: WeightUpdater) -> Saboteur:
    return next(s for s in updater._stages if isinstance(s, Saboteur))


def attempt(updater: WeightUpdater, model: torch.nn.Module) -> dict[str, Any]:
    """One update: what it raised, with all causes."""
    try:
        report = updater.update(model)
        error = ""
    except Exception as caught:
        report = updater.report.updates[-1]
        parts, chain = [], caught
        while chain is not None:
            parts.append(f"{type(chain).__name__}: {chain}")
            chain = chain.__cause__  # type: ignore[assignment]
        error = " <- ".join(parts)
    return {
        "error": error,
        "failed": error.startswith(UpdateFailed.__name__),
        "outcome": report.outcome,
    }


def sabotaged(rank: int, chain: str, where: str, failing: int) -> list[dict[str, Any]]:
    """An update that works, one that is sabotaged, one that works; and what the engine holds after each."""
    model = Toy()
    results = []
    with make(chain) as updater:
        for value in (1.0, 2.0, 3.0):
            if value == 2.0 and rank == failing:
                arm(updater, where)
            if value == 2.0 and where == "plan":
                model.register_parameter("extra", torch.nn.Parameter(torch.zeros(3)))  # makes every rank plan anew
            result = attempt(updater, model.fill(value))
            if rank == 0:
                (engine,) = engines_of(updater)
                held = {v for v in (1.0, 2.0, 3.0) if engine.weights == model.fill(v).bytes()}
                model.fill(value)
                result |= {"held": held, "serving": engine.serving, "tainted": engine.state.tainted}
            results.append(result)
    return results


def arm(updater: WeightUpdater, where: str) -> None:
    if where in ("probe", "pause", "begin", "put", "prepare engine", "commit", "verify", "resume"):
        engine: FakeEngine = engines_of(updater)[0]
        engine.script(where.removesuffix(" engine"), engine.refuse(where, CAUSE))
    elif where == "progress":

        def progress(done: int, total: int) -> None:
            updater.on_progress = None
            blame()

        updater.on_progress = progress
    else:
        saboteur(updater).where, saboteur(updater).act = where, blame


def check_all(outcomes: list[Outcome], failing: int, touched: bool) -> None:
    for rank, outcome in enumerate(outcomes):
        assert outcome.error is None, outcome.trace
        first, second, third = outcome.value
        assert first["error"] == third["error"] == "", (first, third)
        assert CAUSE in second["error"], f"rank {rank} raised {second['error']}"
        assert ("RemoteRankError: trainer rank" in second["error"]) == (rank != failing)
        assert second["failed"] == touched
    engine = outcomes[0].value
    assert engine[0]["serving"]
    assert engine[2]["serving"]
    assert engine[2]["tainted"] is None
    assert engine[2]["held"] == {3.0}


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("where", ["plan", "prepare"])
def test_a_failure_before_the_pause_touches_no_engine(pair: Pool, where: str, failing: int) -> None:
    outcomes = pair.each(sabotaged, "minimal", where, failing)
    check_all(outcomes, failing, touched=False)
    second = outcomes[0].value[1]
    assert second["outcome"] == "refused"
    assert second["serving"]
    assert second["tainted"] is None


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("where", ["start of the stream", "middle of the stream", "end of the stream"])
@pytest.mark.parametrize("chain", ["minimal", "prefetch"])
def test_a_failure_in_the_stream_is_raised_by_all_ranks(pair: Pool, chain: str, where: str, failing: int) -> None:
    outcomes = pair.each(sabotaged, chain, where, failing)
    check_all(outcomes, failing, touched=True)
    second = outcomes[0].value[1]
    assert second["outcome"] == "tainted"
    assert not second["serving"]
    assert CAUSE in second["tainted"]


@pytest.mark.parametrize("failing", [0, 1])
def test_a_recipe_without_a_barrier_fails_on_all_ranks_too(pair: Pool, failing: int) -> None:
    check_all(pair.each(sabotaged, "no barrier", "middle of the stream", failing), failing, touched=True)


@pytest.mark.parametrize(
    "where", ["probe", "pause", "begin", "put", "prepare engine", "commit", "verify", "resume", "progress"]
)
def test_what_fails_at_the_engine_is_heard_by_every_rank(pair: Pool, where: str) -> None:
    outcomes = pair.each(sabotaged, "prefetch", where, 0)
    check_all(outcomes, 0, touched=where != "probe")
    second = outcomes[0].value[1]
    untouched = where in ("probe", "pause")
    assert second["serving"] == untouched
    assert (second["tainted"] is None) == untouched


def interrupted(rank: int) -> list[str]:
    model = Toy()
    seen = []
    with make("prefetch") as updater:
        for value in (1.0, 2.0, 3.0):
            if value == 2.0 and rank == 1:
                saboteur(updater).where, saboteur(updater).act = "middle of the stream", interrupt
            try:
                updater.update(model.fill(value))
                seen.append("committed")
            except KeyboardInterrupt:
                seen.append("interrupted")
            except UpdateFailed as error:
                seen.append(str(error.__cause__))
    return seen


def interrupt() -> None:
    raise KeyboardInterrupt


def test_an_interrupt_of_one_rank_ends_the_update_of_all(pair: Pool) -> None:
    zero, one = pair.each(interrupted)
    assert one.value == ["committed", "interrupted", "committed"]
    assert zero.value == ["committed", "trainer rank 1 failed: KeyboardInterrupt", "committed"]


def differently_planned(rank: int) -> str:
    with make("minimal", capacity=64 + 64 * rank) as updater:
        result = attempt(updater, Toy())
        if rank == 0:
            assert engines_of(updater)[0].log == ["probe"]
        return str(result["error"])


def test_ranks_whose_settings_differ_are_refused(pair: Pool) -> None:
    for outcome in pair.each(differently_planned):
        assert outcome.error is None, outcome.trace
        assert "trainer ranks planned different updates" in outcome.value


def part_of_the_fleet(rank: int) -> list[Any]:
    urls = ["http://one:1", "http://two:1"]
    with make("minimal", urls=urls) as updater:
        outcomes = [updater.update(Toy(1.0), version="7", engines=[url]).outcome for url in urls]
        words = attempt_part(updater)
        updater.remove_engines(urls[:1])
        updater.add_engines(["http://four:1"])
        updater.update(Toy(2.0))
        return [*outcomes, words, [e.url for e in updater._run.engines]]


def attempt_part(updater: WeightUpdater) -> str:
    try:
        updater.update(Toy(1.0), engines=["http://three:1"])
    except Exception as error:
        return str(error)
    return ""


def test_a_rolling_update_is_collective(pair: Pool) -> None:
    for outcome in pair.each(part_of_the_fleet):
        assert outcome.error is None, outcome.trace
        assert outcome.value[:2] == ["committed", "committed"]
        assert "http://three:1 is not an engine" in outcome.value[2]
        assert outcome.value[3] == ["http://two:1", "http://four:1"]  # every rank knows who takes part


def unevenly(rank: int, chain: str, how: str, failing: int) -> list[dict[str, Any]]:
    stages = ["gather_params", {"_target_": f"{__name__}.Uneven"}, *CHAINS[chain]]
    with updater_for(stages=stages, timeouts=replace(SHORT, agree=20.0)) as updater:
        results = []
        for value in (1.0, 2.0, 3.0):
            if value == 2.0 and rank == failing:
                next(s for s in updater._stages if isinstance(s, Uneven)).how = how
            results.append(attempt(updater, Toy(value)))
            if rank == 0:
                (engine,) = engines_of(updater)
                results[-1] |= {"serving": engine.serving, "new": engine.weights == Toy(value).bytes()}
        return results


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("how", ["none at all", "one less", "one more"])
@pytest.mark.parametrize("chain", ["minimal", "prefetch"])
def test_ranks_with_different_numbers_of_buckets_do_not_wait_for_each_other(
    pair: Pool, chain: str, how: str, failing: int
) -> None:
    outcomes = pair.each(unevenly, chain, how, failing)
    causes = set()
    for outcome in outcomes:
        assert outcome.error is None, outcome.trace
        first, second, third = outcome.value
        assert first["error"] == third["error"] == "", (first, third)
        assert second["failed"]
        causes.add(second["error"].rpartition("PlanMismatch: ")[2].partition(" <- ")[0])
    assert len(causes) == 1, causes
    zero = outcomes[0].value
    assert not zero[1]["serving"]
    assert (zero[2]["serving"], zero[2]["new"]) == (True, True)


# -- a rank that dies -----------------------------------------------------------------------------------------------


KEPT: list[WeightUpdater] = []  # in a rank's process: from one call to the next


def rank_two_dies(rank: int) -> dict[str, Any]:
    updater = make("minimal", agree=3.0)  # with prefetch its stream may end before the pause, which then never comes
    updater.open()
    updater.update(Toy(1.0))
    if rank == 2:
        saboteur(updater).where, saboteur(updater).act = "middle of the stream", lambda: os._exit(9)
    KEPT.append(updater)
    result = attempt(updater, Toy(2.0))
    if rank == 0:
        (engine,) = engines_of(updater)
        result |= {"serving": engine.serving, "tainted": engine.state.tainted}
    return result


def one_more() -> str:
    return str(attempt(KEPT[0], Toy(3.0))["error"])


def test_a_rank_that_dies_is_named_in_bounded_time() -> None:
    pool = ranks(3)
    try:
        zero, one, two = pool.each(rank_two_dies)
        assert two.error == "EOFError"
        for outcome in (zero, one):
            assert outcome.error is None, outcome.trace
            assert "WaitTimeout: trainer ranks [2] did not reach" in outcome.value["error"]
        assert not zero.value["serving"]
        assert "trainer ranks [2] did not reach" in zero.value["tainted"]
        pool.kill(0)  # which holds the store
        words = pool.call(one_more, index=1)
        assert words.startswith("WaitTimeout")
        assert "usually rank 0, does not answer" in words
    finally:
        pool.close()
