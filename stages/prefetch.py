"""prefetch: run everything upstream in a thread of its own, so that the next bucket is packed while this one travels."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any

from stages.base import Stage
from stages.errors import ConfigError, WaitTimeout
from stages.flow import Bucket
from stages.run import Run


class Prefetch(Stage):
    """Keeps up to `depth` buckets ready. Stands behind bucket, whose slots are leased and thus safe to hand to another thread."""

    consumes = Bucket
    produces = Bucket

    def __init__(self, depth: int = 1) -> None:
        if depth < 1:
            raise ConfigError(
                f"prefetch.depth: {depth} must be at least 1; leave prefetch out of recipe.stages instead"
            )
        self.depth = depth

    def __call__(self, items: Iterator[Bucket], run: Run) -> Iterator[Bucket]:
        ready: queue.Queue[tuple[str, Any]] = queue.Queue(maxsize=self.depth)
        stop = threading.Event()
        thread = threading.Thread(target=_pump, args=(items, ready, stop), name="weightstream-prefetch", daemon=True)
        thread.start()
        try:
            while True:
                kind, value = _take(ready, thread)
                if kind == "error":
                    raise value
                if kind == "end":
                    return
                yield value
        finally:
            stop.set()
            _drain(ready)
            # The thread is past any wait for a slot: the executor aborts the ring before it closes the chain.
            thread.join(timeout=run.timeouts.put)
            if thread.is_alive():
                raise WaitTimeout(f"the stages before prefetch did not stop within {run.timeouts.put} s")
            _drain(ready)


def _pump(items: Iterator[Bucket], ready: queue.Queue[tuple[str, Any]], stop: threading.Event) -> None:
    try:
        for item in items:
            if not _put(ready, ("item", item), stop):
                item.release()
                return
        _put(ready, ("end", None), stop)
    except BaseException as error:  # handed to the consumer, whose thread raises it
        _put(ready, ("error", error), stop)
    finally:
        close = getattr(items, "close", None)
        if close is not None:
            close()  # in this thread, which is the one that ran them


def _put(ready: queue.Queue[tuple[str, Any]], entry: tuple[str, Any], stop: threading.Event) -> bool:
    while not stop.is_set():
        try:
            ready.put(entry, timeout=0.05)
            return True
        except queue.Full:
            continue
    return False


def _take(ready: queue.Queue[tuple[str, Any]], thread: threading.Thread) -> tuple[str, Any]:
    while True:
        try:
            return ready.get(timeout=1.0)
        except queue.Empty:
            if not thread.is_alive() and ready.empty():
                return "error", RuntimeError("the prefetch thread ended without a word")


def _drain(ready: queue.Queue[tuple[str, Any]]) -> None:
    while True:
        try:
            kind, value = ready.get_nowait()
        except queue.Empty:
            return
        if kind == "item":
            value.release()
