"""The update session: pause, begin, put, prepare, commit, verify, resume; and what is left when a step fails."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from support.fakes import FakeEngine, Toy, engines_of, updater_for

from pipelines.updater import WeightUpdater
from stages.errors import EngineError, EngineUnreachable, UpdateFailed

URLS = ["http://a:1", "http://b:1"]
STEPS = ["pause", "begin", "put", "prepare", "commit", "verify", "resume"]


@pytest.fixture
def updater() -> Iterator[WeightUpdater]:
    with updater_for(URLS) as made:
        yield made


def fleet(updater: WeightUpdater) -> tuple[FakeEngine, FakeEngine]:
    a, b = engines_of(updater)
    return a, b


def fail(updater: WeightUpdater, model: Any, words: str = "version") -> Any:
    """An update that must fail; its report."""
    with pytest.raises(UpdateFailed, match=words) as caught:
        updater.update(model)
    assert caught.value.report is updater.report.updates[-1]
    return caught.value.report


def part(report: Any, engine: FakeEngine) -> Any:
    return next(e for e in report.engines if e.url == engine.url)


# -- when all goes well -------------------------------------------------------------------------------------------


def test_the_steps_come_in_order_on_every_engine(updater: WeightUpdater) -> None:
    report = updater.update(Toy(1.0))
    assert report
    for engine in fleet(updater):
        assert engine.log == ["probe", "pause", "begin", "put", "put", "put", "prepare", "commit", "verify", "resume"]
        assert engine.weights == Toy(1.0).bytes()
        assert engine.serving
        assert (part(report, engine).outcome, part(report, engine).version) == ("committed", "1")
        assert part(report, engine).verified == "version"


@pytest.mark.parametrize(
    "before, after", [("put", "prepare"), ("prepare", "commit"), ("commit", "verify"), ("verify", "resume")]
)
def test_all_engines_end_a_step_before_the_first_begins_the_next(
    updater: WeightUpdater, before: str, after: str
) -> None:
    """All commit before the first resumes, all prepare before the first commits."""
    a, b = fleet(updater)
    slow = threading.Event()

    def wait() -> None:
        assert not slow.wait(0.1)
        order.append(f"b {before}")

    order: list[str] = []
    for _ in range(2 if before == "put" else 0):
        b.script("put", None)
    b.script(before, wait)
    a.script(after, lambda: order.append(f"a {after}"))
    updater.update(Toy(1.0))
    assert order == [f"b {before}", f"a {after}"]


def test_the_version_moves_only_when_every_engine_has_it(updater: WeightUpdater) -> None:
    """A version taken from an earlier chunk labels half-loaded weights (lightseekorg/tokenspeed#672)."""
    a, b = fleet(updater)
    seen: list[str | None] = []
    for engine in (a, b):
        for phase in ("put", "prepare", "commit"):
            engine.script(phase, lambda: seen.append(updater.report.version))
    updater.update(Toy(1.0))
    assert set(seen) == {None}
    assert updater.report.version == "1"
    b.script("put", None, b.refuse("put"))
    fail(updater, Toy(2.0))
    assert updater.report.version == "1"
    assert (a.version, b.version) == ("1", "1")


# -- a step fails -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", range(3))
def test_a_bucket_that_fails_taints_every_engine_and_resumes_none(updater: WeightUpdater, at: int) -> None:
    """Resume in a finally puts an engine back into service half updated (sgl-project/sglang-omni#784)."""
    updater.update(Toy(1.0))
    a, b = fleet(updater)
    b.script("put", *[None] * at, b.refuse("put", "out of memory", status=500))
    report = fail(updater, Toy(2.0), "http://b:1: put: out of memory")
    assert report.outcome == "tainted"
    for engine in (a, b):
        assert engine.log.count("resume") == 1
        assert not engine.serving
        assert "commit" not in engine.log[engine.log.index("resume") :]
        assert engine.weights == Toy(1.0).bytes()
        assert (part(report, engine).outcome, part(report, engine).version) == ("tainted", None)
        assert "out of memory" in part(report, engine).error
    assert set(updater.tainted) == set(URLS)


@pytest.mark.parametrize("step", STEPS)
def test_the_next_update_works_whatever_step_failed(updater: WeightUpdater, step: str) -> None:
    """A session that was never ended blocks every retry (huggingface/trl#5937): it is closed, and the engine told so."""
    updater.update(Toy(1.0))
    a, b = fleet(updater)
    b.script(step, b.refuse(step, "just once"))
    fail(updater, Toy(2.0), f"http://b:1: {step}: just once")
    report = updater.update(Toy(3.0))
    assert report.outcome == "committed"
    assert updater.tainted == {}
    for engine in (a, b):
        assert engine.weights == Toy(3.0).bytes()
        assert engine.serving
        assert not engine.in_session


@pytest.mark.parametrize("step", ["begin", "put", "prepare", "commit"])
def test_an_open_session_is_closed_after_a_failure(updater: WeightUpdater, step: str) -> None:
    a, b = fleet(updater)
    b.script(step, b.refuse(step))
    fail(updater, Toy(1.0))
    assert not a.in_session
    assert not b.in_session
    assert b.log[-1] == "abort"


def test_what_was_not_touched_resumes_on_its_old_version(updater: WeightUpdater) -> None:
    updater.update(Toy(1.0))
    a, b = fleet(updater)
    b.script("pause", b.refuse("pause", "busy"))
    report = fail(updater, Toy(2.0), "busy")
    assert report.outcome == "aborted"
    assert updater.tainted == {}
    for engine in (a, b):
        assert engine.log[-1] == "resume"
        assert engine.serving
        assert engine.weights == Toy(1.0).bytes()
        assert (part(report, engine).outcome, part(report, engine).version) == ("aborted", "1")


def test_an_engine_whose_resume_fails_too_says_both(updater: WeightUpdater) -> None:
    a, b = fleet(updater)
    b.script("pause", b.refuse("pause", "busy"))
    b.script("resume", EngineUnreachable(b.url, "resume", "gone"))
    report = fail(updater, Toy(1.0), "busy")
    assert "busy" in part(report, b).error
    assert "then resume" in part(report, b).error
    assert "gone" in part(report, b).error
    assert a.serving


@pytest.mark.parametrize(
    "error", [KeyError("bug"), TypeError("bug"), AssertionError("bug")], ids=lambda e: type(e).__name__
)
def test_an_unforeseen_error_while_closing_does_not_hide_the_cause_or_skip_the_rest(
    updater: WeightUpdater, error: Exception
) -> None:
    a, b = fleet(updater)
    b.script("put", b.refuse("put", "the cause"))
    a.script("abort", error)
    report = fail(updater, Toy(1.0), "the cause")
    assert "abort" in b.log
    assert "then abort" in part(report, a).error
    assert set(updater.tainted) == set(URLS)


# -- commit is not atomic over engines ------------------------------------------------------------------------------


def test_a_commit_that_fails_on_one_of_two_taints_that_one_only(updater: WeightUpdater) -> None:
    updater.update(Toy(1.0))
    a, b = fleet(updater)
    b.script("commit", b.refuse("commit", "flush refused: 7 requests run"))
    report = fail(updater, Toy(2.0), "flush refused")
    assert report.outcome == "tainted"
    assert (part(report, a).outcome, part(report, a).version) == ("committed", "2")
    assert (part(report, b).outcome, part(report, b).version) == ("tainted", None)
    assert a.serving
    assert a.weights == Toy(2.0).bytes()
    assert not b.serving
    assert list(updater.tainted) == [b.url]


def test_a_label_that_one_engine_serves_is_not_given_to_other_weights(updater: WeightUpdater) -> None:
    a, b = fleet(updater)
    b.script("commit", b.refuse("commit"))
    fail(updater, Toy(1.0))
    assert a.version == "1"
    assert updater.update(Toy(2.0)).version == "2"
    assert a.version == b.version == "2"


def test_a_version_that_is_not_read_back_is_a_failure(updater: WeightUpdater) -> None:
    """A missing version is unknown, never another field (vllm-project/vime#45)."""
    _, b = fleet(updater)
    b.script("verify", lambda: setattr(b, "version", None))
    report = fail(updater, Toy(1.0), "version is None, '1' was committed")
    assert part(report, b).outcome == "tainted"
    assert not b.serving


def test_a_resume_that_fails_after_commit_taints(updater: WeightUpdater) -> None:
    a, b = fleet(updater)
    b.script("resume", b.refuse("resume", "still paused"))
    report = fail(updater, Toy(1.0), "still paused")
    assert [part(report, e).outcome for e in (a, b)] == ["committed", "tainted"]
    assert a.serving


# -- tainted ----------------------------------------------------------------------------------------------------------


def test_only_a_complete_update_clears_a_tainted_engine(updater: WeightUpdater) -> None:
    updater.update(Toy(1.0))
    a, b = fleet(updater)
    b.script("put", b.refuse("put", "first"))
    fail(updater, Toy(2.0))
    a.script("pause", a.refuse("pause", "second"))  # nothing destructive this time, but it is half loaded from before
    report = fail(updater, Toy(3.0), "second")
    assert report.outcome == "tainted"
    assert set(updater.tainted) == set(URLS)
    assert not a.serving
    assert not b.serving
    updater.update(Toy(4.0))
    assert updater.tainted == {}
    assert all(e.serving and e.weights == Toy(4.0).bytes() for e in (a, b))


def test_engines_that_restart_after_a_failure_are_updated_again(updater: WeightUpdater) -> None:
    """One failed publish ended all engines, and the same error looped until a full restart (reef#62)."""
    updater.update(Toy(1.0))
    a, b = fleet(updater)
    b.script("put", b.refuse("put", "died"))
    fail(updater, Toy(2.0), "died")
    for engine in (a, b):
        engine.restart()
    assert updater.update(Toy(3.0)).outcome == "committed"
    assert all(e.serving and e.weights == Toy(3.0).bytes() for e in (a, b))


# -- retries ------------------------------------------------------------------------------------------------------------


def test_a_retry_repeats_the_whole_update() -> None:
    with updater_for(URLS, retries=2) as updater:
        a, b = fleet(updater)
        b.script("put", None, b.refuse("put"), None, None, b.refuse("put"))
        report = updater.update(Toy(1.0))
        assert (report.outcome, report.attempts, report.version) == ("committed", 3, "1")
        assert report.error is None
        for engine in (a, b):
            assert engine.log.count("begin") == 3
            assert engine.weights == Toy(1.0).bytes()
        assert updater.tainted == {}


def test_retries_end() -> None:
    with updater_for(URLS, retries=1) as updater:
        _, b = fleet(updater)
        b.script("put", b.refuse("put", "one"), b.refuse("put", "two"))
        report = fail(updater, Toy(1.0), "one.*attempt 2: .*two")
        assert report.attempts == 2


def test_a_refusal_after_a_failed_attempt_does_not_hide_what_that_left_behind() -> None:
    with updater_for(URLS, retries=1) as updater:
        a, b = fleet(updater)

        def die() -> None:
            b.dead = True
            raise EngineUnreachable(b.url, "put", "dropped")

        b.script("put", die)
        report = fail(updater, Toy(1.0), "dropped.*attempt 2: .*connection refused")
        assert report.outcome == "tainted"
        assert part(report, a).outcome == "tainted"
        assert set(updater.tainted) == set(URLS)


# -- who takes part -----------------------------------------------------------------------------------------------------


def required(count: Any) -> WeightUpdater:
    made = updater_for(URLS)
    made.settings["engines"]["required"] = count  # type: ignore[index]
    return made


def test_a_dead_engine_refuses_the_update_before_anything_is_touched(updater: WeightUpdater) -> None:
    a, b = fleet(updater)
    b.dead = True
    with pytest.raises(EngineUnreachable, match="http://b:1"):
        updater.update(Toy(1.0))
    assert a.log == ["probe"]
    report = updater.report.updates[-1]
    assert report.outcome == "refused"
    assert [e.outcome for e in report.engines] == ["refused", "refused"]


def test_one_of_two_is_enough_where_one_is_required() -> None:
    """Engines that are not there are no targets (InternLM/xtuner#2027)."""
    with required(1) as updater:
        a, b = fleet(updater)
        b.dead = True
        report = updater.update(Toy(1.0))
        assert report.outcome == "committed"
        assert (part(report, a).outcome, part(report, b).outcome) == ("committed", "refused")
        assert "connection refused" in part(report, b).error
        assert b.log == ["probe"]
        b.restart()
        report = updater.update(Toy(2.0))
        assert [e.outcome for e in report.engines] == ["committed", "committed"]
        assert b.weights == Toy(2.0).bytes()


@pytest.mark.parametrize("phase", ["pause", "begin", "put", "prepare", "commit", "verify", "resume"])
def test_one_that_fails_on_the_way_is_left_behind_where_the_others_are_enough(phase: str) -> None:
    with required(1) as updater:
        a, b = fleet(updater)
        updater.update(Toy(1.0))
        b.script(phase, b.refuse(phase, "no more"))
        report = updater.update(Toy(2.0))
        assert (report.outcome, report.error) == ("committed", None)
        assert part(report, a).outcome == "committed"
        assert a.serving and a.weights == Toy(2.0).bytes()
        assert "no more" in part(report, b).error
        if phase == "pause":  # it never was touched, and serves the old version on
            assert part(report, b).outcome == "aborted"
            assert b.serving and b.weights == Toy(1.0).bytes()
        else:
            assert part(report, b).outcome == "tainted"
            assert not b.serving
            assert b.url in updater.tainted
        assert list(updater.outdated()) == [b.url]
        report = updater.update(Toy(3.0))
        assert [e.outcome for e in report.engines] == ["committed", "committed"]
        assert all(e.serving and e.weights == Toy(3.0).bytes() for e in (a, b))
        assert updater.outdated() == updater.tainted == {}


def test_one_after_the_other_is_one_too_many() -> None:
    with required(1) as updater:
        a, b = fleet(updater)
        a.script("put", a.refuse("put", "first"))
        b.script("put", None, b.refuse("put", "second"))
        fail(updater, Toy(1.0))
        report = updater.report.updates[-1]
        assert report.outcome == "tainted"
        assert {e.outcome for e in report.engines} == {"tainted"}
        assert not a.serving and not b.serving
        updater.update(Toy(2.0))
        assert all(e.serving and e.weights == Toy(2.0).bytes() for e in (a, b))


def test_none_of_two_is_never_enough() -> None:
    with required(1) as updater:
        for engine in fleet(updater):
            engine.dead = True
        with pytest.raises(Exception, match=r"http://a:1.*http://b:1"):
            updater.update(Toy(1.0))


def test_an_engine_that_restarted_is_noticed_and_set_up_anew(updater: WeightUpdater) -> None:
    """Without an identity of its incarnation, weights stream to a dead peer (NVIDIA-NeMo/RL#3944)."""
    left: list[str] = []
    updater._run.transport.leave = lambda engine: left.append(engine.url)  # type: ignore[method-assign]
    updater.update(Toy(1.0))
    a, b = fleet(updater)
    before = b.state.incarnation
    updater.update(Toy(2.0))
    assert left == []
    b.restart()
    updater.update(Toy(3.0))
    assert left == [b.url]
    assert b.state.incarnation != before
    assert b.weights == Toy(3.0).bytes()
    b.script("put", b.refuse("put"))
    left.clear()
    fail(updater, Toy(4.0))
    assert left == [a.url, b.url]


def test_whoever_routes_requests_learns_which_engines_are_behind(
    updater: WeightUpdater, caplog: pytest.LogCaptureFixture
) -> None:
    """One that restarted between updates serves what is on its disk, and looks as healthy as before."""
    a, b = fleet(updater)
    assert set(updater.outdated()) == set()  # nothing was committed yet
    updater.update(Toy(1.0))
    assert updater.outdated() == {}
    b.restart()
    assert "restarted after version 1" in updater.outdated()[b.url]
    assert "restarted" in caplog.text
    assert "not updated yet" in updater.outdated()[b.url]  # asking again does not make it current
    report = updater.update(Toy(2.0))
    assert (part(report, a).restarted, part(report, b).restarted) == (False, True)
    assert updater.outdated() == {}
    b.dead = True
    assert list(updater.outdated()) == [b.url]
    b.dead = False
    assert updater.outdated() == {}  # the same process, with the same weights
    b.script("commit", b.refuse("commit"))
    fail(updater, Toy(3.0))
    assert "tainted" in updater.outdated()[b.url]
    assert a.url not in updater.outdated()  # it has version 3 whole, and serves it
    report = updater.update(Toy(4.0))
    assert not part(report, b).restarted
    assert updater.outdated() == {}


def test_an_engine_that_missed_an_update_is_behind_until_it_is_caught_up() -> None:
    with required(1) as updater:
        a, b = fleet(updater)
        updater.update(Toy(1.0))
        b.dead = True
        report = updater.update(Toy(2.0))
        assert part(report, b).outcome == "refused"
        b.dead = False  # a network that was away: the same process, still serving
        assert updater.outdated() == {b.url: "has version 1, the newest is 2"}
        report = updater.update(Toy(3.0), engines=[b.url])
        assert (part(report, b).outcome, b.weights) == ("committed", Toy(3.0).bytes())
        assert updater.outdated() == {a.url: "has version 2, the newest is 3"}
        updater.add_engines(["http://c:1"])
        assert updater.outdated()["http://c:1"] == "was not updated yet"
        updater.remove_engines([a.url, "http://c:1"])
        assert updater.outdated() == {}


# -- verified how -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "proof, minimum, works",
    [
        ("acknowledged", "acknowledged", True),
        ("version", "acknowledged", True),
        ("version", "version", True),
        ("digest", "checksum", True),
        ("acknowledged", "version", False),
        ("version", "checksum", False),
        ("acknowledged", "probe", True),  # comparing tokens is for whoever can generate: the command line
    ],
)
def test_a_proof_weaker_than_the_minimum_is_a_failure(proof: str, minimum: str, works: bool) -> None:
    with updater_for(verify={"minimum": minimum, "probe": False}) as updater:
        (engine,) = engines_of(updater)
        engine.proof = proof
        if works:
            assert updater.update(Toy(1.0)).engines[0].verified == proof
            return
        report = fail(updater, Toy(1.0), f"proved only '{proof}', session.verify.minimum is '{minimum}'")
        assert report.engines[0].outcome == "tainted"
        assert not engine.serving


# -- what the caller gets -------------------------------------------------------------------------------------------------


def test_the_error_carries_the_report_and_the_chain_of_causes(updater: WeightUpdater) -> None:
    _, b = fleet(updater)
    root = ConnectionResetError("peer reset")
    error = EngineError(b.url, "put", "dropped", status=500, body="the engine's own words")
    error.__cause__ = root
    b.script("put", error)
    with pytest.raises(UpdateFailed) as caught:
        updater.update(Toy(1.0))
    assert caught.value.__cause__ is error
    assert caught.value.__cause__.__cause__ is root
    assert "http://b:1: put: dropped" in str(caught.value)
    report: Any = caught.value.report
    assert report.outcome == "tainted"
    assert report.seconds["transfer"] is not None
    assert report.seconds["commit"] is None
    assert not report


def test_seconds_are_null_where_a_phase_did_not_happen(updater: WeightUpdater) -> None:
    _, b = fleet(updater)
    b.script("pause", b.refuse("pause"))
    seconds = fail(updater, Toy(1.0)).seconds
    assert seconds["pause"] is not None
    assert seconds["total"] is not None
    assert all(seconds[p] is None for p in ("begin", "wire", "apply", "commit", "resume", "transfer"))
