"""How trainer ranks agree: through a key-value store with a timeout, never through a collective that could hang.

A failing rank says so at the next meeting, and every rank then raises the same root cause; a rank that died is named
by the others when their wait runs out.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

from stages.errors import RemoteRankError, WaitTimeout


class Store(Protocol):
    """The part of torch.distributed's Store that is used here."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def add(self, key: str, amount: int) -> int: ...
    def wait(self, keys: list[str], timeout: timedelta) -> None: ...
    def delete_key(self, key: str) -> bool: ...


class Comm:
    """The trainer ranks that update together. With one rank every call is free and local."""

    def __init__(self, rank: int = 0, world_size: int = 1, store: Store | None = None, timeout: float = 120.0) -> None:
        if world_size > 1 and store is None:
            raise ValueError("more than one rank needs a store")
        self.rank = rank
        self.world_size = world_size
        self.timeout = timeout
        self._store = store
        self._epoch = 0
        self._meetings = 0
        self._previous: str | None = None

    @classmethod
    def from_torch(cls, timeout: float = 120.0) -> Comm:
        """The ranks of torch.distributed's default group, or this process alone where there is none."""
        import torch.distributed

        dist: Any = torch.distributed
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return cls(timeout=timeout)
        store = dist.PrefixStore("weightstream", dist.distributed_c10d._get_default_store())
        return cls(dist.get_rank(), dist.get_world_size(), store, timeout)

    @property
    def is_head(self) -> bool:
        """Rank 0 talks to the engines."""
        return self.rank == 0

    def begin(self, epoch: int) -> None:
        """Start counting meetings anew for update `epoch`, so that ranks that failed apart meet again."""
        self._epoch, self._meetings = epoch, 0

    def meet(self, what: str, value: Any = None, error: BaseException | None = None) -> list[Any]:
        """Wait until every rank is here; returns each rank's JSON-able `value`, by rank, if rank 0.. all gave one.

        If a rank came with an `error`, it re-raises that, and all others raise RemoteRankError with its words; with
        several, the lowest rank's counts. Raises WaitTimeout naming the ranks that did not come.
        """
        if self.world_size == 1:
            if error is not None:
                raise error
            return [value]
        assert self._store is not None
        self._meetings += 1
        key = f"{self._epoch}/{self._meetings}"  # not `what`: ranks that parted ways must still hear of errors
        if value is not None:
            self._store.set(f"{key}/value/{self.rank}", json.dumps(value))
        if error is not None:
            self._store.set(f"{key}/error/{self.rank}", _describe(error))
            self._store.add(f"{key}/errors", 1)
        self._store.set(f"{key}/here/{self.rank}", "1")
        if self._store.add(f"{key}/count", 1) == self.world_size:
            self._store.set(f"{key}/all", "1")
        self._await(what, key, error)
        if self._store.add(f"{key}/errors", 0):
            self._raise_lowest(key, error)
        values = [value] * self.world_size
        if value is not None:
            values = [json.loads(self._store.get(f"{key}/value/{r}")) for r in range(self.world_size)]
        self._forget_previous(key)
        return values

    def attempt(self, what: str, action: Callable[[], Any]) -> Any:
        """Run `action` on every rank and meet: returns rank 0's JSON-able result, or raises on all ranks alike."""
        value, error = None, None
        try:
            value = action()
        except Exception as caught:
            error = caught
        return self.meet(what, value, error)[0]

    @contextmanager
    def together(self, what: str) -> Any:
        """Run the block on every rank and meet at its end; an error of one rank is an error of all."""
        error: BaseException | None = None
        try:
            yield
        except Exception as caught:
            error = caught
        self.meet(what, error=error)

    def _await(self, what: str, key: str, error: BaseException | None) -> None:
        assert self._store is not None
        try:
            self._store.wait([f"{key}/all"], timedelta(seconds=self.timeout))
        except Exception as timed_out:
            if error is not None:
                raise error from None
            absent = [r for r in range(self.world_size) if not self._has(f"{key}/here/{r}")]
            raise WaitTimeout(
                f"trainer ranks {absent} did not reach {what!r} within {self.timeout} s (session.timeouts.agree): "
                f"they died, hang, or did not call update()"
            ) from timed_out

    def _has(self, key: str) -> bool:
        assert self._store is not None
        try:
            self._store.wait([key], timedelta(milliseconds=10))
            return True
        except Exception:
            return False

    def _raise_lowest(self, key: str, error: BaseException | None) -> None:
        assert self._store is not None
        failed = next((r for r in range(self.world_size) if self._has(f"{key}/error/{r}")), self.rank)
        if error is not None and failed == self.rank:
            raise error
        raise RemoteRankError(failed, self._store.get(f"{key}/error/{failed}").decode())

    def _forget_previous(self, key: str) -> None:
        """Whoever is at this meeting has left the previous one: its keys can go."""
        assert self._store is not None
        if self._previous is not None:
            for name in ("here", "value"):
                self._store.delete_key(f"{self._previous}/{name}/{self.rank}")
            if self.rank == 0:
                for name in ("count", "errors", "all"):
                    self._store.delete_key(f"{self._previous}/{name}")
        self._previous = key


def _describe(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(error)).strip()
