"""WeightUpdater: the one thing a trainer needs. Build it from config, open it once, call `update(model)` every step."""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch

from pipelines import config, preflight
from pipelines.compose import compose_backend, compose_chain, compose_timeouts, transport_of
from pipelines.executor import plan_chain, run_chain
from pipelines.launch import EngineLauncher
from pipelines.lock import EngineLock
from pipelines.outlets import Outlets
from pipelines.ray_launcher import EngineActors
from pipelines.reference import References
from pipelines.report import ABORTED, COMMITTED, REFUSED, TAINTED, EngineReport, Report, UpdateReport
from pipelines.session import Session
from pipelines.urls import normalize
from pipelines.verify import Expectation
from stages.backends import actor
from stages.backends.base import Engine, Keys
from stages.comm import Comm
from stages.errors import ConfigError, EngineError, UpdateFailed, WeightstreamError
from stages.gather.checkpoint import Checkpoint
from stages.run import Clock, Run
from stages.snapshot import Snapshot
from stages.threads import at_once

log = logging.getLogger("weightstream")

Progress = Callable[[int, int], None]  # bytes delivered so far, bytes in all


class WeightUpdater:
    """Pushes a trainer's weights into inference engines, update after update.

    Every trainer rank makes one and calls the same methods in the same order; rank 0 talks to the engines. Use it as a context
    manager, or call `open` and `close`.

        with WeightUpdater.from_config(["backend=sglang", "transport=ipc", "engines=remote",
                                        "engines.urls=[http://127.0.0.1:30000]"]) as updater:
            for step in range(steps):
                train_one_step(model)
                updater.update(model)
    """

    def __init__(
        self, settings: Mapping[str, Any], *, reference: str | Path | None = None, device: Any = "cpu"
    ) -> None:
        """`settings` as `pipelines.config.load` returns them; see `from_config`."""
        self.settings = settings
        self._backend = compose_backend(settings)
        self._stages = compose_chain(settings, self._backend)
        transport = transport_of(self._stages)
        self._backend.check_device(torch.device(device))
        self._served = settings["session"]["reference"] or reference  # what embedded engines are started from
        self._references = References(settings["session"]["reference"], reference)
        self._run = Run(
            comm=Comm(),
            device=torch.device(device),
            backend=self._backend,
            transport=transport,
            wire=self._backend.wire(transport.name),
            timeouts=compose_timeouts(settings),
            integrity=settings["session"]["integrity"] == "full",
        )
        self.report = Report(config=config.redacted(dict(settings)))
        self._launcher = EngineActors(settings) if settings["launcher"]["kind"] == "ray" else EngineLauncher()
        self._outlets = Outlets(settings["report"])
        self._known: list[Engine] = []
        self._locks: dict[str, EngineLock] = {}  # by engine; on rank 0
        self._asked: Sequence[Any] | None = None  # the engines of the current update; None: all
        self._opened = False
        self._released = False  # stages are closed until the next update
        self._checked: dict[str, tuple[str, str]] = {}  # engine -> (plan hash, incarnation) that passed preflight
        self._restarted: set[str] = set()  # engines of which the next report has to say so
        self._background: ThreadPoolExecutor | None = None
        self._updating = threading.Lock()
        self.on_progress: Progress | None = None

    @classmethod
    def from_config(
        cls,
        source: Sequence[str] | Mapping[str, Any] | None = None,
        *,
        reference: str | Path | None = None,
        device: Any = "cpu",
    ) -> Self:
        """From overrides as on the command line (`["backend=vllm", ...]`), or a composed config.

        `reference` is the HF checkpoint folder that the engines were started from: embedded engines serve it, and
        preflight compares with it where an engine does not name a visible one itself (session.reference overrules both).
        Raises ConfigError or CompositionError before anything starts.
        """
        return cls(config.load(source), reference=reference, device=device)

    # -- life ---------------------------------------------------------------------------------------
    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self) -> None:
        """Start embedded engines if asked to, and open every stage. Collective over all trainer ranks."""
        if self._opened:
            return
        run = self._run
        run.comm = Comm.from_torch(run.timeouts.agree)
        run.comm.begin(-1)
        self._opened = True
        try:
            urls: list[str] = []
            with run.comm.together("connect"):
                if run.comm.is_head:
                    urls = self._addresses()
            urls = run.comm.meet("engines", urls)[0]
            tp = self.settings["engines"]["tp"]
            for url, size in zip(urls, tp if isinstance(tp, list) else [tp] * len(urls), strict=True):
                self.add_engines([url], size)
            with run.comm.together("open"):
                for stage in self._stages:
                    stage.open(run)
                last = run.transport.last_version() if run.comm.is_head else 0
            self._numbers_from = run.comm.meet("last version", last)[0]
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Release everything: groups, segments, engines that were started here. Safe to call twice."""
        if not self._opened:
            return
        self._opened = False
        if self._background is not None:
            self._background.shutdown(wait=True)
            self._background = None
        with ExitStack() as closing:  # the last one first, each of them whatever the others do
            if self._run.comm.is_head:
                closing.callback(self._outlets.close)
            closing.callback(self._launcher.close)
            for engine in self._known:
                closing.callback(self._let_go, engine)
            for stage in self._stages:
                closing.callback(stage.close)
            self._known = []

    # -- engines --------------------------------------------------------------------------------------
    @property
    def engines(self) -> tuple[str, ...]:
        """URLs of the engines that updates go to; ray://... for actors."""
        return tuple(e.url for e in self._known)

    @property
    def comm(self) -> Comm:
        """How the trainer ranks agree; see `Comm.together` and `Comm.meet`."""
        return self._run.comm

    @property
    def tainted(self) -> dict[str, str]:
        """Engines that must not serve until a complete update, and why."""
        return {e.url: e.state.tainted for e in self._known if e.state.tainted is not None}

    def outdated(self) -> dict[str, str]:
        """Engines that do not serve the newest version now, and why: for whoever routes requests between updates.

        Asks each of them. Tainted ones, unreachable ones, those that missed the last update, and those that restarted since
        and serve what they started with; the next update brings them up. An LMDeploy engine has no version to read back: that
        it restarted shows only while it is in a process group.
        """
        with self._updating:
            newest = next(
                (u.version for u in reversed(self.report.updates) if COMMITTED in {e.outcome for e in u.engines}), None
            )
            before = {engine.url: engine.state.version for engine in self._known}
            failures = self._look_at(self._known)
            reasons = {e.url: _behind(e, before[e.url], newest, failures.get(e.url)) for e in self._known}
        return {url: reason for url, reason in reasons.items() if reason is not None}

    def add_engines(self, engines: Sequence[Any], tp: int = 1) -> None:
        """From the next update on, also these: URLs, or handles of Ray actors (see stages/backends/actor.py)."""
        for engine in engines:
            normal = _address(engine)
            if normal in self.engines:
                raise ConfigError(f"{normal} is already an engine of this updater")
            self._known.append(self._backend.engine(normal, tp, Keys.from_environment(), self._run.timeouts))

    def remove_engines(self, engines: Sequence[Any]) -> None:
        """From the next update on, no longer these. They keep the version they have."""
        for engine in [self._find(url) for url in engines]:
            self._run.transport.leave(engine)
            self._known.remove(engine)
            self._let_go(engine)

    def _let_go(self, engine: Engine) -> None:
        engine.close()
        if (lock := self._locks.pop(engine.url, None)) is not None:
            lock.release()

    def generate(self, url: Any, input_ids: list[int], max_new_tokens: int) -> tuple[list[int], list[float]]:
        """Greedy tokens of one engine and their log-probabilities (natural logarithm)."""
        return self._find(url).generate(input_ids, max_new_tokens)

    def _find(self, url: Any) -> Engine:
        normal = _address(url)
        engine = next((e for e in self._known if e.url == normal), None)
        if engine is None:
            raise ConfigError(f"{normal} is not an engine of this updater; it has {list(self.engines)}")
        return engine

    @property
    def snapshots(self) -> Snapshot:
        """The versions that the recipe's snapshot stage keeps: `.versions`, and `.tensors(version)` to load or to send again.

        Raises ConfigError where the recipe has none.
        """
        found = next((stage for stage in self._stages if isinstance(stage, Snapshot)), None)
        if found is None:
            raise ConfigError("the recipe keeps no versions; choose recipe=snapshot")
        return found

    # -- updates ----------------------------------------------------------------------------------------
    def update(
        self, model: Any, version: str | int | None = None, engines: Sequence[Any] | None = None
    ) -> UpdateReport:
        """Bring every engine to the weights of `model`: a torch module, an HF checkpoint folder, or HF names and tensors.

        With `engines`, only those of them: a rolling update is one call per part of the fleet, with one `version`.

        `version` defaults to a running number, which goes on from what `transport.path` holds (disk). Collective over all
        trainer ranks. Returns a report whose outcome is committed; raises UpdateFailed (with the report), or ConfigError,
        PreflightError and the like when nothing was touched.
        """
        with self._updating:
            return self._update(model, version, engines)

    def _update(self, model: Any, version: str | int | None, engines: Sequence[Any] | None) -> UpdateReport:
        if not self._opened:
            raise ConfigError("the updater is not open; use it in a with block, or call open() first")
        run = self._run
        run.model = model
        self._asked = engines
        # A failed update may have left its number on some engine: other weights never get it.
        number = self._numbers_from + sum(u.outcome != REFUSED for u in self.report.updates) + 1
        run.version = str(number if version is None else version)
        if not run.version:
            raise ConfigError("version is empty; give a text or a number, or leave it out")
        report = UpdateReport(run.version)
        self.report.updates.append(report)
        started = time.perf_counter()
        try:
            for attempt in range(1 + self.settings["session"]["retries"]):
                report.attempts = attempt + 1
                if self._attempt(report):
                    break
        finally:
            if self.settings["session"]["release_between_updates"]:
                self._release()
            report.seconds["total"] = time.perf_counter() - started
            report.measure()
            if run.comm.is_head:
                self._outlets.take(report)
        if report.outcome != COMMITTED:
            raise UpdateFailed(f"version {run.version}: {report.outcome}: {report.error}", report) from self._cause
        return report

    def _release(self) -> None:
        """Close the stages: groups, segments and buffers are made anew by the next update."""
        self._released = True
        self._run.plan = self._run.planned = None
        with ExitStack() as closing:
            for stage in self._stages:
                closing.callback(stage.close)

    def _reopen(self) -> None:
        try:
            with self._run.comm.together("open"):
                for stage in self._stages:
                    stage.open(self._run)
        except BaseException:
            self._release()
            raise
        self._released = False

    def update_async(self, model: torch.nn.Module, version: str | int | None = None) -> Future[UpdateReport]:
        """Like `update`, over a snapshot taken now, in the background; the trainer may change `model` at once.

        The snapshot costs one copy of the model. One update runs at a time, in order.
        """
        snapshot = copy.deepcopy(model)
        if self._background is None:
            self._background = ThreadPoolExecutor(1, thread_name_prefix="weightstream-update")
        return self._background.submit(self.update, snapshot, version)

    def _attempt(self, report: UpdateReport) -> bool:
        """One whole update. False when it failed in a way that another attempt may cure."""
        run = self._run
        run.update += 1
        run.clock = Clock(self._outlets.trace if run.comm.is_head else None)
        run.folder = None
        run.lost = {}
        run.comm.begin(run.update)
        session: Session | None = None
        earlier = report.outcome
        try:
            expectation = self._make_ready(report)
            if run.comm.is_head:
                session = Session(run)
                for url in self._restarted & session.reports.keys():
                    session.reports[url].restarted = True
                    self._restarted.discard(url)
            self._send(session, expectation, report)
        except BaseException as error:
            self._failed(session, error, report, earlier)
            if not isinstance(error, Exception):
                raise
            return False
        finally:
            report.seconds |= {p: run.clock.seconds.get(p) for p in report.seconds if p != "total"}
            if session is not None:
                report.engines = [*session.reports.values(), *self._absent()]
        report.outcome, report.error = COMMITTED, None
        for engine in run.lost:
            run.transport.leave(engine)
        for stage in self._stages:
            stage.committed(run.version)
        return True

    def _make_ready(self, report: UpdateReport) -> Expectation:
        """Everything that can be done, or refused, before an engine is paused."""
        run = self._run
        report.outcome = REFUSED
        if self._released:
            self._reopen()
        with run.comm.together("probe"):
            if run.comm.is_head:
                self._probe()
        chosen = run.comm.meet("engines", [e.url for e in run.engines])[0]
        run.engines = [e for e in self._known if e.url in chosen]
        with run.comm.together("plan"):
            self._plan()
        plan = run.current_plan
        report.tensors, report.buckets, report.bytes = len(plan.tensors), len(plan.buckets), plan.nbytes
        hashes = run.comm.meet("plan hash", plan.hash)
        if len(set(hashes)) > 1:
            raise WeightstreamError(
                f"trainer ranks planned different updates: {hashes}; their models or configs differ"
            )
        with run.comm.together("preflight"):
            if run.comm.is_head and self.settings["session"]["preflight"]:
                self._preflight()
        expectation = Expectation(self._stages, run)
        if self._minimum == "digest":
            with run.comm.together("digests"):
                expectation.compute()
        with run.comm.together("prepare"):
            for stage in self._stages:
                stage.prepare(run)
        report.outcome = ABORTED
        return expectation

    def _send(self, session: Session | None, expectation: Expectation, report: UpdateReport) -> None:
        run, clock = self._run, self._run.clock

        def pause() -> None:
            with run.comm.together("pause"), clock.time("pause"):
                if session is not None:
                    session.pause()
            with run.comm.together("begin"), clock.time("begin"):
                if session is not None:
                    session.begin()

        run.progress = self._progress(report.bytes)
        with run.comm.together("transfer"):
            run_chain(self._stages, run, ready=pause)
        with run.comm.together("finish"):
            if session is not None:
                run.transport.publish(run)
                session.prepare()
                session.finish(self._minimum, expectation.prove)

    def _failed(self, session: Session | None, error: BaseException, report: UpdateReport, earlier: str) -> None:
        """Leave everything so that the next update can run. Raises what no retry cures: nothing was touched, ever."""
        run, words = self._run, str(error) or type(error).__name__
        first, self._cause = report.attempts == 1, error
        if report.attempts <= self.settings["session"]["retries"] and report.outcome != REFUSED:
            log.warning("update %s, attempt %d failed, once more: %s", run.version, report.attempts, words)
        report.error = words if first else f"{report.error}; attempt {report.attempts}: {words}"
        cleaning: list[Callable[[], None]] = [stage.aborted for stage in self._stages]
        cleaning.append(partial(run.transport.discard, run))
        if session is not None:
            cleaning.append(partial(session.abort, error))
        _each(cleaning, error)
        if session is not None:
            failed = [e for e in run.engines if session.reports[e.url].outcome != COMMITTED]
            _each([partial(run.transport.leave, engine) for engine in failed], error)
            outcomes = {r.outcome for r in session.reports.values()}
            report.outcome = TAINTED if TAINTED in outcomes else ABORTED
        elif report.outcome == REFUSED and first:
            report.engines = [_untouched(e) for e in self._known]
            raise error
        elif report.outcome == REFUSED:
            report.outcome = earlier  # what the attempts before it left behind
        elif not run.comm.is_head:
            report.outcome = TAINTED  # rank 0 knows better

    @property
    def _minimum(self) -> str:
        """The least proof before an engine resumes. A probe needs one that generates: whoever has the tokens makes it later."""
        minimum: str = self.settings["session"]["verify"]["minimum"]
        return "acknowledged" if minimum == "probe" else minimum

    # -- the steps of getting ready ---------------------------------------------------------------------
    def _addresses(self) -> list[str]:
        """URLs of the engines, after starting those that are ours."""
        engines = self.settings["engines"]
        if engines["kind"] == "embedded":
            model = engines["model"] or self._served
            if model is None:
                raise ConfigError("engines=embedded needs a checkpoint to serve: set engines.model, or give reference=")
            return self._launcher.start(
                Path(model), self._backend.name, engines["count"], engines["tp"], engines["device"], engines["on_fatal"]
            )
        return list(engines["actors"] if engines["kind"] == "ray" else engines["urls"])

    def _probe(self) -> None:
        """Choose the engines of this update: those that answer, if they are as many as `engines.required` wants."""
        run = self._run
        wanted = self._known if self._asked is None else [self._find(url) for url in self._asked]
        if not wanted:
            raise ConfigError(
                "there is no engine to update; set engines.urls or engines.actors, or call add_engines first"
            )
        failures = self._look_at(wanted)
        chosen = [engine for engine in wanted if engine.url not in failures]
        required = self.settings["engines"]["required"]
        need = len(wanted) if required == "all" else min(int(required), len(wanted))
        if len(chosen) < need:
            first = next(iter(failures.values()))
            raise first if len(failures) == 1 else WeightstreamError("; ".join(str(e) for e in failures.values()))
        run.engines, run.required = chosen, need
        self._missed = failures

    def _look_at(self, engines: Sequence[Engine]) -> dict[str, EngineError]:
        """Probe them at the same time. What failed, by URL; what was set up with one that failed or restarted is forgotten."""
        before = [(engine.state.incarnation, engine.state.version) for engine in engines]
        failures: dict[str, EngineError] = {}
        probed = at_once(engines, self._reach, "probe")
        for engine, (incarnation, version), probe in zip(engines, before, probed, strict=True):
            try:
                probe.result()
            except EngineError as error:
                failures[engine.url] = error
            restarted = engine.state.incarnation != incarnation
            if restarted:
                log.warning("engine %s restarted after version %s: it serves what it started with", engine.url, version)
                self._restarted.add(engine.url)
            if restarted or engine.url in failures:
                self._run.transport.leave(engine)
        return failures

    def _reach(self, engine: Engine) -> None:
        if engine.url not in self._locks:
            self._locks[engine.url] = EngineLock(engine.identity)
        engine.probe()

    _cause: BaseException | None = None
    _missed: Mapping[str, EngineError] = {}

    def _absent(self) -> list[EngineReport]:
        return [EngineReport(url, REFUSED, error=str(error)) for url, error in self._missed.items()]

    def _plan(self) -> None:
        run = self._run
        checkpoint = self._reference()
        run.expected = checkpoint.specs if checkpoint else None
        run.reference = checkpoint.folder if checkpoint else None
        plan_chain(self._stages, run)

    def _reference(self) -> Checkpoint | None:
        """The checkpoint of the first engine that has one; other ranks follow what rank 0 found."""
        found = None
        if self._run.comm.is_head:
            found = next((c for e in self._run.engines if (c := self._references.of(e)) is not None), None)
        if self._run.comm.world_size == 1:
            return found
        folder = self._run.comm.meet("reference", str(found.folder) if found else "")[0]
        return self._references.open(folder) if folder else None

    def _preflight(self) -> None:
        plan = self._run.current_plan
        for engine in self._run.engines:
            key = (plan.hash, engine.state.incarnation)
            checkpoint = self._references.of(engine)
            if checkpoint is not None and self._checked.get(engine.url) != key:
                expected = preflight.taken_wide(checkpoint.specs, plan, self._run.on_load)
                preflight.check(plan, expected, checkpoint.config, engine.url)
                self._checked[engine.url] = key

    def _progress(self, total: int) -> Callable[[int], None]:
        done = 0

        def advance(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            if self.on_progress is not None:
                self.on_progress(min(done, total), total)

        return advance


def _each(steps: Iterable[Callable[[], None]], cause: BaseException) -> None:
    """Take every step of cleaning up after `cause`, whatever the others do. What they raise becomes a note of it.

    Ctrl-C is raised when all have been taken.
    """
    interrupted: BaseException | None = None
    for step in steps:
        try:
            step()
        except Exception as error:
            log.warning("cleaning up after the failed update did not work: %s", error)
            cause.add_note(f"then, while cleaning up: {type(error).__name__}: {error}")
        except BaseException as error:
            interrupted = error
    if interrupted is not None:
        raise interrupted


def _address(engine: Any) -> str:
    return actor.address_of(engine) if actor.is_handle(engine) else normalize(engine)


def _behind(engine: Engine, before: str | None, newest: str | None, failure: EngineError | None) -> str | None:
    """Why an engine does not serve the newest version; None where it does."""
    state = engine.state
    if failure is not None:
        return str(failure)
    if state.tainted is not None:
        return f"tainted: {state.tainted}"
    if state.version == newest:
        return None
    if state.version is None and before is not None:
        return f"restarted after version {before}: it serves what it started with"
    return f"has version {state.version}, the newest is {newest}" if state.version else "was not updated yet"


def _untouched(engine: Engine) -> EngineReport:
    """The part in an update that was refused."""
    state = engine.state
    return EngineReport(engine.url, TAINTED if state.tainted else REFUSED, state.version, error=state.tainted)
