"""Work in a daemon thread: one that is stuck in an engine or a rendezvous must not keep the trainer from ending."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

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
