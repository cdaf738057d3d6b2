"""The update session: drives every engine through pause, begin, puts, prepare, commit and resume.

    pause -> begin -> put(bucket) ... -> prepare -> commit -> verify -> resume
                            any failure -> abort, stay paused, tainted

Resume happens after commit and nowhere else; or on the old version, when nothing destructive was sent yet. An engine that
fails is left behind, and the others go on, where `engines.required` allows it and no collective binds them together.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from pipelines.report import COMMITTED, TAINTED, EngineReport
from stages.backends.base import PROOFS, Engine
from stages.errors import EngineUnreachable
from stages.run import Run

log = logging.getLogger("weightstream")


class Session:
    """One attempt at one update, on the rank that talks to the engines."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._engines = list(run.engines)
        self.reports = {e.url: EngineReport(e.url, version=e.state.version) for e in self._engines}

    def pause(self) -> None:
        self._all("pause", lambda e: e.pause(self._run))

    def begin(self) -> None:
        self._all("begin", lambda e: e.begin(self._run))

    def prepare(self) -> None:
        self._all("prepare", lambda e: e.prepare(self._run))

    def finish(self, minimum: str, proof: Callable[[Engine], str | None]) -> None:
        """Commit, read back, resume; each step on all engines before the next.

        An engine that fails a step is tainted and not resumed; the others have the new weights whole and go on. `proof` may
        add a stronger proof than the engine's own; one that proves less than `minimum` failed. Raises the first failure
        where fewer engines are left than are required.
        """
        for engine, error in self._run.lost.items():
            self._give_up(engine, str(error))
        clock = self._run.clock
        with clock.time("commit"):
            committed, failures = self._gather("commit", lambda e: e.commit(self._run), self._run.alive)
        with clock.time("verify"):
            proved, unproved = self._gather("verify", lambda e: self._verify(e, minimum, proof), committed)
        with clock.time("resume"):
            _, stuck = self._gather("resume", self._resume, proved)
        failures |= unproved | stuck
        for engine, error in failures.items():
            self._taint(engine, str(error))
        if failures:
            self._run.lose(failures)
            for engine, error in failures.items():
                self._give_up(engine, str(error))

    def abort(self, cause: BaseException) -> None:
        """After a failure: close what is open, taint what may be half loaded, resume what was not touched."""
        for engine in self._engines:
            if self.reports[engine.url].outcome != COMMITTED:
                self._give_up(engine, str(cause) or type(cause).__name__)

    def _give_up(self, engine: Engine, cause: str) -> None:
        report = self.reports[engine.url]
        report.error = report.error or cause
        if engine.state.needs_restart:
            report.error += "; it may be stuck in the broadcast: restart it"
        if engine.state.begun:
            self._taint(engine, report.error)
            self._best_effort(engine, "abort", lambda: engine.abort(self._run))
        elif engine.state.paused and engine.state.tainted is None:
            self._best_effort(engine, "resume", lambda: self._resume(engine))

    def _taint(self, engine: Engine, reason: str) -> None:
        report = self.reports[engine.url]
        report.outcome, report.error, report.version = TAINTED, reason, None
        engine.state.tainted, engine.state.version = reason, None

    def _verify(self, engine: Engine, minimum: str, proof: Callable[[Engine], str | None]) -> None:
        level = max(engine.verify(self._run), proof(engine) or PROOFS[0], key=PROOFS.index)
        report = self.reports[engine.url]
        report.verified = level
        if PROOFS.index(level) < PROOFS.index(minimum):
            raise engine.fail("verify", f"proved only {level!r}, session.verify.minimum is {minimum!r}")
        report.outcome, report.version = COMMITTED, self._run.version
        state = engine.state
        state.version, state.tainted, state.begun, state.needs_restart = self._run.version, None, False, False

    def _resume(self, engine: Engine) -> None:
        engine.resume(self._run)
        engine.state.paused = False

    def _best_effort(self, engine: Engine, what: str, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            log.warning("engine %s: %s after the failure did not work: %s", engine.url, what, error)
            report = self.reports[engine.url]
            report.error = f"{report.error}; then {what}: {error}" if report.error else str(error)
            if isinstance(error, EngineUnreachable):
                engine.state.needs_restart = True

    def _all(self, phase: str, action: Callable[[Engine], None]) -> None:
        """Run on all engines at once; a failure counts, or is raised, after every engine has ended the phase."""
        _, failures = self._gather(phase, action, self._run.alive)
        for engine, error in failures.items():
            self.reports[engine.url].error = str(error)
        if failures:
            self._run.lose(failures)

    def _gather(
        self, phase: str, action: Callable[[Engine], None], engines: list[Engine]
    ) -> tuple[list[Engine], dict[Engine, Exception]]:
        """`(engines that did it, failures of the others)`."""
        if not engines:
            return [], {}
        with ThreadPoolExecutor(len(engines), thread_name_prefix=f"weightstream-{phase}") as pool:
            futures = [pool.submit(action, e) for e in engines]
        done: list[Engine] = []
        failures: dict[Engine, Exception] = {}
        for engine, future in zip(engines, futures, strict=True):
            error = future.exception()
            if error is None:
                done.append(engine)
            elif isinstance(error, Exception):
                failures[engine] = error
            else:
                raise error
        return done, failures
