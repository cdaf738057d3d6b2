"""notify_engines: tell every engine about a bucket while its bytes move, and collect what they answer."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import partial

from stages.backends.base import Engine
from stages.base import Stage
from stages.errors import EngineError, WaitTimeout
from stages.flow import Delivery, Shipment
from stages.run import Run
from stages.threads import start


class NotifyEngines(Stage):
    """Announces each bucket to all engines at once; where a collective moves the bytes, takes part in it at the same time.

    Records failures on the shipment instead of raising them, so that barrier can tell every rank. A refusal is noticed while
    the broadcast is still waiting for the engine that will not come.
    """

    consumes = Shipment
    produces = Delivery

    def __call__(self, items: Iterator[Shipment], run: Run) -> Iterator[Delivery]:
        for shipment in items:
            if run.comm.is_head:
                try:
                    self._deliver(shipment, run)
                except Exception as error:
                    shipment.failure = shipment.failure or error
            yield from shipment.deliveries
            shipment.bucket.release()

    def _deliver(self, shipment: Shipment, run: Run) -> None:
        if len(run.alive) == 1 and shipment.send is None:
            self._ask(run.alive[0], shipment, run)
            return
        began = time.perf_counter()
        asked = {start(partial(_put, engine, shipment, run), "put"): engine for engine in run.alive}
        sent = start(partial(_timed_send, shipment), "send") if shipment.send is not None else None
        failure = _watch(set(asked), sent, run)
        for future, engine in asked.items():
            error, seconds = (future.exception(), 0.0) if future.done() else (None, 0.0)
            if error is None:
                seconds = future.result() if future.done() else time.perf_counter() - began
            if error is None and not future.done():
                engine.state.needs_restart = True
                error = WaitTimeout(f"{engine.url}: put: still waiting for a broadcast that was given up; restart it")
            shipment.deliveries.append(Delivery(engine.url, shipment.bucket.layout.seq, seconds, error))
        shipment.failure = failure if sent is not None else _without_the_failed(asked, failure, run)
        elapsed = time.perf_counter() - began
        wire = sent.result() if sent is not None and sent.done() and sent.exception() is None else 0.0
        run.clock.add("wire", wire)
        run.clock.add("apply", elapsed - wire)
        if failure is None:
            run.progress(shipment.bucket.layout.nbytes)

    def _ask(self, engine: Engine, shipment: Shipment, run: Run) -> None:
        """One engine and no collective: nothing to wait for but its answer, which the adapter bounds in time."""
        began, error = time.perf_counter(), None
        try:
            engine.put(shipment, run)
        except Exception as refused:
            error = refused
        seconds = time.perf_counter() - began
        shipment.deliveries.append(Delivery(engine.url, shipment.bucket.layout.seq, seconds, error))
        shipment.failure = error
        run.clock.add("apply", seconds)
        if error is None:
            run.progress(shipment.bucket.layout.nbytes)


def _without_the_failed(
    asked: Mapping[Future[float], Engine], failure: BaseException | None, run: Run
) -> BaseException | None:
    """None where the update can go on without the engines that failed: they are part of no collective that others are in."""
    errors = {engine: future.exception() for future, engine in asked.items() if future.done()}
    failed = {engine: error for engine, error in errors.items() if isinstance(error, EngineError)}
    if len(errors) < len(asked) or any(e is not None and not isinstance(e, EngineError) for e in errors.values()):
        return failure
    try:
        if failed:
            run.lose(failed)
    except EngineError:
        return failure
    return None


def _put(engine: Engine, shipment: Shipment, run: Run) -> float:
    start = time.perf_counter()
    engine.put(shipment, run)
    return time.perf_counter() - start


def _timed_send(shipment: Shipment) -> float:
    assert shipment.send is not None
    start = time.perf_counter()
    shipment.send()
    return time.perf_counter() - start


def _watch(asked: set[Future[float]], sent: Future[float] | None, run: Run) -> BaseException | None:
    """Wait for all answers and the sending; give up at the first refusal. Returns the root cause, or None."""
    pending: set[Future[float]] = asked | ({sent} if sent is not None else set())
    deadline = time.monotonic() + run.timeouts.put + run.timeouts.connect
    failure: BaseException | None = None
    while pending:
        done, pending = wait(pending, timeout=max(0.0, deadline - time.monotonic()), return_when=FIRST_COMPLETED)
        if not done:
            return failure or WaitTimeout(
                f"a bucket was not delivered within {run.timeouts.put} s (session.timeouts.put)"
            )
        failure = _cause(failure, done)
        if failure is not None and sent is not None:
            # Whoever waits in the collective now waits in vain; answers that are on their way may still come.
            done, _ = wait(pending - {sent}, timeout=1.0)
            return _cause(failure, done)
    return failure


def _cause(known: BaseException | None, done: set[Future[float]]) -> BaseException | None:
    """The failure to report: the first one, but an engine's own words before what they caused."""
    for future in done:
        error = future.exception()
        says_more = known is None or (isinstance(error, EngineError) and not isinstance(known, EngineError))
        if error is not None and says_more:
            known = error
    return known
