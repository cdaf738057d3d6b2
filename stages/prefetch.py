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
        """Starts at once, not at the first bucket that is asked for: the ring fills while the engines are being paused."""
        return _Ahead(items, self.depth, run.timeouts.put)


class _Ahead:
    """What the thread has ready, in order."""

    def __init__(self, items: Iterator[Bucket], depth: int, patience: float) -> None:
        self._ready: queue.Queue[tuple[str, Any]] = queue.Queue(maxsize=depth)
        self._stop = threading.Event()
        self._patience = patience
        self._thread = threading.Thread(
            target=_pump, args=(items, self._ready, self._stop), name="weightstream-prefetch", daemon=True
        )
        self._thread.start()

    def __iter__(self) -> _Ahead:
        return self

    def __next__(self) -> Bucket:
        if self._stop.is_set():
            raise StopIteration
        kind, value = _take(self._ready, self._thread)
        if kind == "item":
            bucket: Bucket = value
            return bucket
        self._stop.set()
        if kind == "error":
            raise value
        raise StopIteration

    def close(self) -> None:
        """End the thread and release what it had ready."""
        self._stop.set()
        _drain(self._ready)
        # The thread is past any wait for a slot: the executor aborts the ring before it closes the chain.
        self._thread.join(timeout=self._patience)
        if self._thread.is_alive():
            raise WaitTimeout(f"the stages before prefetch did not stop within {self._patience} s")
        _drain(self._ready)


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
