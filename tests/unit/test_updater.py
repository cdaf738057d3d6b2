"""WeightUpdater as a trainer sees it: planned once, opened and closed once, one update at a time, interrupted cleanly."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.fakes import FakeEngine, Toy, engines_of, updater_for

from pipelines.reference import References
from pipelines.updater import WeightUpdater
from stages.backends.base import EngineState
from stages.base import GroupMapper, Stage
from stages.errors import CompositionError, ConfigError, PlanMismatch, PreflightError, UpdateFailed
from stages.flow import Bucket, Group, GroupSpec, Shipment
from stages.run import Run
from stages.transport.shm import SHM_DIR

FULL = ["gather_params", "bucket", "prefetch", "transport", "barrier", "notify_engines"]
IPC = {"_target_": "stages.transport.ipc.Ipc"}


class Probe(GroupMapper):
    """A stage that counts, and does what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.plans = self.opened = self.closed = 0
        self.log: list[str] = []
        self.on: dict[str, Callable[[], Any]] = {}

    def _do(self, what: str) -> None:
        self.log.append(what)
        self.on.get(what, lambda: None)()

    def open(self, run: Run) -> None:
        self._do("open")

    def close(self) -> None:
        self._do("close")

    def plan(self, specs: Iterable[GroupSpec], run: Run) -> Iterable[GroupSpec]:
        self._do("plan")
        return super().plan(specs, run)

    def prepare(self, run: Run) -> None:
        self._do("prepare")

    def __call__(self, items: Iterator[Group], run: Run) -> Iterator[Group]:
        try:
            for index, group in enumerate(super().__call__(items, run)):
                if index == 2:
                    self._do("middle")
                yield group
        finally:
            self.log.append("closed generator")

    def committed(self, version: str) -> None:
        self._do(f"committed {version}")

    def aborted(self) -> None:
        self._do("aborted")


def probed(*urls: str, **settings: Any) -> WeightUpdater:
    stages = [FULL[0], {"_target_": f"{__name__}.Probe"}, *FULL[1:]]
    return updater_for(urls or ("http://a:1",), stages=stages, **settings)


def probe_of(updater: WeightUpdater) -> Probe:
    return next(s for s in updater._stages if isinstance(s, Probe))


# -- planned once -------------------------------------------------------------------------------------------------


def test_a_plan_is_made_once_and_reused_until_something_changes() -> None:
    with probed() as updater:
        model = Toy()
        plans = []
        for value in (1.0, 2.0, 3.0):
            updater.update(model.fill(value))
            plans.append(updater._run.plan)
        assert plans[0] is plans[1] is plans[2]
        assert probe_of(updater).log.count("plan") == 1
        updater.update(Toy(4.0))  # other objects of the same names, dtypes and shapes
        assert updater._run.plan is plans[0]
        assert engines_of(updater)[0].weights == Toy(4.0).bytes()


CHANGES: dict[str, Callable[[Toy], Any]] = {
    "a tensor more": lambda m: m.register_parameter("extra", torch.nn.Parameter(torch.zeros(2))),
    "a tensor less": lambda m: delattr(m.norm, "weight"),
    "another shape": lambda m: setattr(m.norm, "weight", torch.nn.Parameter(torch.zeros(6))),
    "another dtype": lambda m: setattr(m.norm, "weight", torch.nn.Parameter(torch.zeros(5).bfloat16())),
    "tied": lambda m: setattr(m.down, "weight", m.norm.weight),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=list(CHANGES))
def test_any_change_of_the_metadata_is_planned_anew(change: Callable[[Toy], Any]) -> None:
    with probed() as updater:
        updater.update(Toy(1.0))
        before = updater._run.current_plan
        model = Toy(2.0)
        change(model)
        updater.update(model)
        assert updater._run.current_plan.hash != before.hash
        assert engines_of(updater)[0].weights == model.bytes()
        updater.update(Toy(3.0))
        assert updater._run.current_plan.hash == before.hash
        assert probe_of(updater).log.count("plan") == 3


def test_a_plan_that_failed_is_not_taken_for_a_plan() -> None:
    with probed() as updater:
        updater.update(Toy(1.0))
        model = Toy(2.0)
        model.register_parameter("extra", torch.nn.Parameter(torch.zeros(2)))
        probe_of(updater).on["plan"] = lambda: (_ for _ in ()).throw(PlanMismatch("cannot"))
        with pytest.raises(PlanMismatch, match="cannot"):
            updater.update(model)
        del probe_of(updater).on["plan"]
        updater.update(model)
        assert engines_of(updater)[0].weights == model.bytes()


# -- life ---------------------------------------------------------------------------------------------------------


def test_stages_live_from_open_to_close_and_are_told_of_outcomes() -> None:
    with probed() as updater:
        updater.update(Toy(1.0), "one")
        (engine,) = engines_of(updater)
        engine.script("commit", engine.refuse("commit"))
        with pytest.raises(UpdateFailed):
            updater.update(Toy(2.0))
        log = probe_of(updater).log
    assert log == [
        "open",
        *("plan", "prepare", "middle", "closed generator", "committed one"),
        *("prepare", "middle", "closed generator", "aborted"),
        "close",
    ]


def test_opening_and_closing_twice_is_once() -> None:
    updater = probed()
    for _ in range(2):
        updater.open()
    for _ in range(2):
        updater.close()
    assert probe_of(updater).log == ["open", "close"]


def test_it_can_be_opened_again() -> None:
    updater = probed(transport=IPC, wire="split")
    for value in (1.0, 2.0):
        with updater:
            updater.update(Toy(value))
            assert engines_of(updater)[0].weights == Toy(value).bytes()


def test_an_update_before_opening_is_refused() -> None:
    with pytest.raises(ConfigError, match="not open"):
        probed().update(Toy())


def test_a_stage_that_cannot_open_closes_all() -> None:
    updater = probed()
    probe_of(updater).on["open"] = lambda: (_ for _ in ()).throw(OSError("no"))
    with pytest.raises(OSError, match="no"):
        updater.open()
    assert probe_of(updater).log == ["open", "close"]
    with pytest.raises(ConfigError, match="not open"):
        updater.update(Toy())


def test_a_stage_that_cannot_close_does_not_keep_the_others_open() -> None:
    updater = probed(transport=IPC, wire="split")
    updater.open()
    updater.update(Toy())
    segments = {s.name for s in updater._run.transport._segments}  # type: ignore[attr-defined]
    assert segments <= set(os.listdir(SHM_DIR))
    for stage in updater._stages[1:3]:
        stage.close = lambda: (_ for _ in ()).throw(RuntimeError("cannot close"))  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="cannot close"):
        updater.close()
    assert not segments & set(os.listdir(SHM_DIR))
    assert updater.engines == ()


def test_the_first_update_may_be_any_step() -> None:
    """A resumed run never initialised the sync, which was keyed to step 1 (allenai/open-instruct#1627)."""
    with probed() as updater:
        assert updater.update(Toy(1.0), version="57").version == "57"
        assert engines_of(updater)[0].version == "57"


# -- engines --------------------------------------------------------------------------------------------------------


def test_engines_come_and_go_between_updates() -> None:
    with probed("http://a:1") as updater:
        left: list[str] = []
        updater._run.transport.leave = lambda e: left.append(e.url)  # type: ignore[method-assign]
        updater.update(Toy(1.0))
        updater.add_engines(["http://b:1", "c:1"])
        assert updater.engines == ("http://a:1", "http://b:1", "http://c:1")
        updater.update(Toy(2.0))
        a, b, c = engines_of(updater)
        assert all(e.weights == Toy(2.0).bytes() for e in (a, b, c))
        updater.remove_engines(["http://a:1/"])
        assert left == ["http://a:1"]
        updater.update(Toy(3.0))
        assert a.weights == Toy(2.0).bytes()
        assert all(e.weights == Toy(3.0).bytes() for e in (b, c))


def test_engines_that_cannot_be_added_or_removed_are_named() -> None:
    with probed("http://a:1") as updater:
        with pytest.raises(ConfigError, match="http://a:1 is already an engine"):
            updater.add_engines(["a:1"])
        with pytest.raises(ConfigError, match=r"http://x:1 is not an engine of this updater; it has \['http://a:1'\]"):
            updater.remove_engines(["x:1"])
        updater.remove_engines(["a:1"])
        with pytest.raises(ConfigError, match="there is no engine to update"):
            updater.update(Toy())


def test_fewer_engines_than_required_is_said_so() -> None:
    updater = probed("http://a:1", "http://b:1")
    updater.settings["engines"]["required"] = 2  # type: ignore[index]
    with updater:
        updater.remove_engines(["http://b:1"])
        assert updater.update(Toy(1.0)).outcome == "committed"


def test_a_part_of_the_fleet_at_a_time() -> None:
    with probed("http://a:1", "http://b:1") as updater:
        a, b = engines_of(updater)
        updater.update(Toy(1.0), "1", engines=["http://a:1"])
        assert (a.version, b.version) == ("1", "initial")
        assert b.log == []
        updater.update(Toy(1.0), "1", engines=["b:1"])
        assert (a.version, b.version) == ("1", "1")


# -- in the background ------------------------------------------------------------------------------------------------


def test_a_background_update_sends_what_the_weights_were_when_it_was_asked_for() -> None:
    with probed() as updater:
        (engine,) = engines_of(updater)
        go = threading.Event()
        engine.script("pause", lambda: go.wait(10.0))
        model = Toy(1.0)
        futures = [updater.update_async(model, "one")]
        futures.append(updater.update_async(model.fill(2.0), "two"))
        model.fill(3.0)
        go.set()
        assert [f.result(30.0).version for f in futures] == ["one", "two"]
        assert engine.weights == Toy(2.0).bytes()


def test_one_update_runs_at_a_time() -> None:
    with probed() as updater:
        (engine,) = engines_of(updater)
        go = threading.Event()
        engine.script("pause", lambda: go.wait(10.0))
        background = updater.update_async(Toy(1.0), "one")
        while "pause" not in engine.log:
            time.sleep(0.01)
        threading.Timer(0.2, go.set).start()
        assert updater.update(Toy(2.0), "two").outcome == "committed"
        assert background.result(30.0).outcome == "committed"
        assert engine.weights == Toy(2.0).bytes()
        assert [u.version for u in updater.report.updates] == ["one", "two"]
        assert [step for step in engine.log if step in ("pause", "resume")] == ["pause", "resume"] * 2


def test_a_background_failure_comes_out_of_its_future() -> None:
    with probed() as updater:
        (engine,) = engines_of(updater)
        engine.script("put", engine.refuse("put", "no room"))
        with pytest.raises(UpdateFailed, match="no room"):
            updater.update_async(Toy(1.0)).result(30.0)
        assert updater.update_async(Toy(2.0)).result(30.0).outcome == "committed"


def test_closing_waits_for_the_update_that_runs() -> None:
    updater = probed()
    updater.open()
    (engine,) = engines_of(updater)
    engine.script("commit", lambda: time.sleep(0.2))
    future = updater.update_async(Toy(1.0))
    while "begin" not in engine.log:
        time.sleep(0.01)
    updater.close()
    assert future.result(0).outcome == "committed"
    assert engine.serving


# -- interrupted ------------------------------------------------------------------------------------------------------


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("where", ["stage", "put", "commit"])
def test_ctrl_c_closes_everything_and_leaves_no_engine_half_loaded_in_service(where: str) -> None:
    def threads() -> set[threading.Thread]:
        return {t for t in threading.enumerate() if t.name.startswith("weightstream") and "group" not in t.name}

    earlier = threads()
    with probed("http://a:1", "http://b:1", transport=IPC, wire="split", capacity=128) as updater:
        updater.update(Toy(1.0))
        a, b = engines_of(updater)
        if where == "stage":
            probe_of(updater).on["middle"] = interrupt
        else:
            b.script(where, KeyboardInterrupt())
        segments = {s.name for s in updater._run.transport._segments}  # type: ignore[attr-defined]
        with pytest.raises(KeyboardInterrupt):
            updater.update(Toy(2.0))
        assert probe_of(updater).log.count("closed generator") == 2
        assert not threads() - earlier
        report = updater.report.updates[-1]
        assert report.outcome == "tainted"
        assert not b.serving
        assert b.url in updater.tainted
        assert not a.in_session
        probe_of(updater).on.clear()
        updater.update(Toy(3.0))
        assert all(e.serving and e.weights == Toy(3.0).bytes() for e in (a, b))
    assert not segments & set(os.listdir(SHM_DIR))


def test_ctrl_c_before_anything_was_sent_leaves_the_old_version_in_service() -> None:
    with probed() as updater:
        updater.update(Toy(1.0))
        (engine,) = engines_of(updater)
        probe_of(updater).on["prepare"] = interrupt
        with pytest.raises(KeyboardInterrupt):
            updater.update(Toy(2.0))
        assert engine.serving
        assert updater.report.updates[-1].outcome == "refused"
        assert "KeyboardInterrupt" in str(updater.report.updates[-1].error)


@pytest.mark.parametrize("second", [RuntimeError("no disk"), KeyboardInterrupt()], ids=repr)
def test_what_fails_while_cleaning_up_hides_nothing_and_skips_nothing(
    second: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise second

    with probed() as updater:
        updater.update(Toy(1.0))
        (engine,) = engines_of(updater)
        engine.script("put", engine.refuse("put", "the cause"))
        left: list[object] = []
        transport = updater._run.transport
        monkeypatch.setattr(transport, "discard", fail)
        monkeypatch.setattr(transport, "leave", left.append)
        probe_of(updater).on["aborted"] = fail
        with pytest.raises(UpdateFailed if isinstance(second, Exception) else KeyboardInterrupt) as caught:
            updater.update(Toy(2.0))
        assert engine.url in updater.tainted
        assert not engine.in_session
        if isinstance(second, Exception):
            cause = caught.value.__cause__
            assert "the cause" in str(cause) and "no disk" not in str(cause)
            assert cause.__notes__ == ["then, while cleaning up: RuntimeError: no disk"] * 2
            assert left == [engine]
        monkeypatch.undo()
        probe_of(updater).on.clear()
        updater.update(Toy(3.0))
        assert engine.weights == Toy(3.0).bytes()


# -- progress -----------------------------------------------------------------------------------------------------------


def test_progress_ends_at_all_bytes() -> None:
    with probed() as updater:
        seen: list[tuple[int, int]] = []
        updater.on_progress = lambda done, total: seen.append((done, total))
        report = updater.update(Toy(1.0))
        assert seen[-1] == (report.bytes, report.bytes)
        assert [d for d, _ in seen] == sorted(d for d, _ in seen)


# -- preflight through the updater ----------------------------------------------------------------------------------------


def reference(folder: Path, model: torch.nn.Module) -> Path:
    folder.mkdir()
    save_file({n: p.detach() for n, p in model.named_parameters()}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return folder


def test_a_mismatch_is_refused_before_any_engine_is_paused(tmp_path: Path) -> None:
    expected = Toy()
    expected.norm.weight = torch.nn.Parameter(torch.zeros(9))
    settings = {"reference": str(reference(tmp_path / "ref", expected)), "preflight": True}
    with probed(**settings) as updater:
        (engine,) = engines_of(updater)
        with pytest.raises(PreflightError, match=r"norm\.weight is \[5\], the engine has \[9\]"):
            updater.update(Toy(1.0))
        assert engine.log == ["probe"]
        assert updater.report.updates[-1].outcome == "refused"
        model = Toy(1.0)
        model.norm.weight = expected.norm.weight
        assert updater.update(model).outcome == "committed"


def test_preflight_can_be_switched_off(tmp_path: Path) -> None:
    settings = {"reference": str(reference(tmp_path / "ref", torch.nn.Linear(2, 2))), "preflight": False}
    with probed(**settings) as updater:
        assert updater.update(Toy(1.0)).outcome == "committed"


def test_an_engine_that_restarted_is_checked_again(tmp_path: Path) -> None:
    with probed(preflight=True) as updater:
        (engine,) = engines_of(updater)
        engine.path = str(reference(tmp_path / "one", Toy()))
        updater.update(Toy(1.0))
        engine.restart()
        other = Toy()
        other.norm.weight = torch.nn.Parameter(torch.zeros(9))
        engine.path = str(reference(tmp_path / "two", other))
        with pytest.raises(PreflightError, match=r"norm\.weight"):
            updater.update(Toy(2.0))


def test_a_reference_that_does_not_exist_is_refused_whatever_engines_say(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere does not exist"):
        WeightUpdater.from_config(["engines=remote", "engines.urls=[http://a:1]"], reference=tmp_path / "nowhere")


def test_a_reference_that_the_engine_contradicts_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = SimpleNamespace(
        url="http://a:1", state=EngineState(), model_path=lambda: str(reference(tmp_path / "served", Toy()))
    )
    other = reference(tmp_path / "other", torch.nn.Linear(2, 2))
    caplog.set_level("INFO", "weightstream")
    found = References(None, other).of(engine)  # type: ignore[arg-type]
    assert found is not None
    assert found.folder == tmp_path / "served"
    assert (
        f"http://a:1 serves {tmp_path / 'served'}, whose tensors differ from those of reference={other}" in caplog.text
    )


# -- composition ------------------------------------------------------------------------------------------------------------


class Straight(Stage):
    """From buckets to shipments without a transport."""

    consumes = Bucket
    produces = Shipment


@pytest.mark.parametrize("transports, found", [(1, None), (0, "found none"), (2, r"found \['Memory', 'Memory'\]")])
def test_a_chain_needs_one_transport(transports: int, found: str | None) -> None:
    straight, twice = {"_target_": f"{__name__}.Straight"}, {"_target_": f"{__name__}.Twice"}
    middle: list[Any] = {0: [straight], 1: ["transport"], 2: ["transport", twice, "transport"]}[transports]
    stages = ["gather_params", "bucket", *middle, "notify_engines"]
    if found is None:
        updater_for(stages=stages)
        return
    with pytest.raises(CompositionError, match=f"one transport, {found}"):
        updater_for(stages=stages)


class Twice(Stage):
    consumes = Shipment
    produces = Bucket


def test_fakes_refuse_what_a_strict_engine_would() -> None:
    engine = FakeEngine()
    engine.in_session = engine.is_paused = True
    with pytest.raises(Exception, match="update already active"):
        engine.begin(None)  # type: ignore[arg-type]
