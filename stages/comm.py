"""How trainer ranks agree: through a key-value store with a timeout, never through a collective that could hang.

A failing rank says so at the next meeting, and every rank then raises the same root cause; a rank that died is named
by the others when their wait runs out. Whoever waits for other ranks in another way, in a collective of its own, looks at
`check` now and then.
"""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from stages.errors import RemoteRankError, WaitTimeout

_LONGEST_NAP = 0.01  # seconds between two looks at the store


class Store(Protocol):
    """The part of torch.distributed's Store that is used here."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def add(self, key: str, amount: int) -> int: ...
    def check(self, keys: list[str]) -> bool: ...
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
        self._agreed: BaseException | None = None

    @classmethod
    def from_torch(cls, timeout: float = 120.0) -> Comm:
        """The ranks of torch.distributed's default group, or this process alone where there is none.

        Ranks make their Comms in the same order: the first of one rank meets the first of another.
        """
        import torch.distributed as dist

        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return cls(timeout=timeout)
        rank, shared = dist.get_rank(), dist.distributed_c10d._get_default_store()
        mine = shared.add(f"weightstream/comms/{rank}", 1)
        store = dist.distributed_c10d.PrefixStore(f"weightstream/{mine}", shared)
        return cls(rank, dist.get_world_size(), store, timeout)

    @property
    def is_head(self) -> bool:
        """Rank 0 talks to the engines."""
        return self.rank == 0

    def begin(self, epoch: int) -> None:
        """Start counting meetings anew for update `epoch`, so that ranks that failed apart meet again."""
        self._epoch, self._meetings, self._agreed = epoch, 0, None

    @property
    def meetings(self) -> tuple[int, int]:
        """The current update and how often this rank has met the others in it: while it grows, things go on."""
        return self._epoch, self._meetings

    def check(self) -> None:
        """Raise RemoteRankError if any rank has come to a meeting of this update with an error. From any thread."""
        key = f"{self._epoch}/alarm"
        if self._store is not None and self._store.check([key]):
            raise RemoteRankError(*json.loads(self._get(key)))

    def meet(self, what: str, value: Any = None, error: BaseException | None = None) -> list[Any]:
        """Wait until every rank is here; returns each rank's JSON-able `value`, by rank, if all gave one.

        If a rank came with an `error`, it re-raises that, and all others raise RemoteRankError with its words; with
        several, the lowest rank's counts, but one that only heard of another's failure stands back. Raises WaitTimeout
        naming the ranks that did not come. An interrupt is told to the others without waiting for them.
        """
        if self.world_size == 1:
            if error is not None:
                raise error
            return [value]
        self._meetings += 1
        key = f"{self._epoch}/{self._meetings}"  # not `what`: ranks that parted ways must still hear of errors
        values = [value] * self.world_size
        try:
            self._arrive(key, value, error)
            failure = self._failure(what, key, error)
            if failure is None:
                if value is not None:
                    values = [json.loads(self._get(f"{key}/here/{r}")) for r in range(self.world_size)]
                self._forget_previous(key)
        except RuntimeError as lost:  # what torch raises when the process that holds the store is gone
            failure = error or WaitTimeout(
                f"trainer ranks could not meet for {what!r}: the process that holds torch.distributed's store, usually rank "
                f"0, does not answer: {lost}"
            )
        if failure is not None:
            self._agreed = failure
            raise failure
        return values

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Run the block on every rank and meet at its end; an error of one rank is an error of all."""
        error: BaseException | None = None
        try:
            yield
        except BaseException as caught:
            error = caught
        if error is not None and error is self._agreed:
            raise error  # every rank has heard of it
        self.meet(what, error=error)

    def _arrive(self, key: str, value: Any, error: BaseException | None) -> None:
        assert self._store is not None
        if error is not None:
            root = json.dumps(_root(self.rank, error))
            self._store.set(f"{key}/error/{self.rank}", root)
            self._store.add(f"{key}/errors", 1)
            if not isinstance(error, RemoteRankError):
                self._store.set(f"{self._epoch}/alarm", root)
        self._store.set(f"{key}/here/{self.rank}", json.dumps(value))
        if self._store.add(f"{key}/count", 1) == self.world_size:
            self._store.set(f"{key}/all", "1")

    def _failure(self, what: str, key: str, error: BaseException | None) -> BaseException | None:
        """Wait for all, then: why the meeting failed, from this rank's point of view."""
        assert self._store is not None
        if error is not None and not isinstance(error, Exception):
            return error
        deadline, nap = time.monotonic() + self.timeout, 0.0001
        while not self._store.check([f"{key}/all"]):
            if time.monotonic() > deadline:
                absent = [r for r in range(self.world_size) if not self._store.check([f"{key}/here/{r}"])]
                return error or WaitTimeout(
                    f"trainer ranks {absent} did not reach {what!r} within {self.timeout} s (session.timeouts.agree): "
                    f"they died, hang, or did not call update()"
                )
            time.sleep(nap)
            nap = min(nap * 1.5, _LONGEST_NAP)
        if not self._store.add(f"{key}/errors", 0):
            return None
        told = [f"{key}/error/{r}" for r in range(self.world_size)]
        roots = {r: json.loads(self._get(name)) for r, name in enumerate(told) if self._store.check([name])}
        root = next((root for r, root in roots.items() if root[0] == r), next(iter(roots.values())))
        return error if error is not None and _root(self.rank, error) == root else RemoteRankError(*root)

    def _get(self, key: str) -> str:
        assert self._store is not None
        return self._store.get(key).decode()

    def _forget_previous(self, key: str) -> None:
        """Whoever is at this meeting has left the previous one: its keys can go."""
        assert self._store is not None
        if self._previous is not None:
            self._store.delete_key(f"{self._previous}/here/{self.rank}")
            if self.rank == 0:
                for name in ("count", "errors", "all"):
                    self._store.delete_key(f"{self._previous}/{name}")
        self._previous = key


def _root(rank: int, error: BaseException) -> list[Any]:
    """`[rank, words]` of what went wrong first."""
    return [error.rank, error.cause] if isinstance(error, RemoteRankError) else [rank, _describe(error)]


def _describe(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(error)).strip()
