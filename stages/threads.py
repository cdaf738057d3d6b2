"""Work in a daemon thread: one that is stuck in an engine or a rendezvous must not keep the trainer from ending."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import TypeVar

S = TypeVar("S")
T = TypeVar("T")


def start(action: Callable[[], T], name: str) -> Future[T]:
    """Run `action` in a thread of its own."""
    future: Future[T] = Future()

    def body() -> None:
        try:
            future.set_result(action())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=body, daemon=True, name=f"weightstream-{name}").start()
    return future


def at_once(items: Sequence[S], action: Callable[[S], T], name: str) -> list[Future[T]]:
    """Run `action` on all items at the same time and wait until each has ended, one way or the other."""
    if len(items) == 1:
        alone: Future[T] = Future()
        try:
            alone.set_result(action(items[0]))
        except Exception as error:
            alone.set_exception(error)
        return [alone]
    futures = [start(partial(action, item), name) for item in items]
    wait(futures)
    return futures
