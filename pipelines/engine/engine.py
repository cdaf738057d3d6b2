"""The engine behind the routes: model, ranks, token loop, and what happens when a real one would end."""

from __future__ import annotations

import contextlib
import os
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import torch

from pipelines.engine.generation import Generation
from pipelines.engine.ledger import Ledger
from pipelines.engine.loading import make_loader
from pipelines.engine.loading.base import Loader, Outcome, merge
from pipelines.engine.model import ServedModel
from pipelines.engine.prefix import PrefixCache
from pipelines.engine.ranks import RankLostError, Ranks, device_of
from pipelines.engine.scheduler import Scheduler
from pipelines.engine.settings import Settings
from stages.transport.messages import GroupInit

PREFIX_BLOCKS = 4096
DISCONNECT_POLL_SECONDS = 0.2


class FatalError(Exception):
    """Here the process of the real engine ends. `real_engine` says so in words."""

    def __init__(self, message: str, real_engine: str = "the server process ends") -> None:
        self.real_engine = real_engine
        super().__init__(message)


class UnknownTokenError(ValueError):
    """A prompt holds a token that the model has no embedding for."""


class Engine:
    """One server's engine. `incarnation` changes with every start, so that a restart is noticed."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.incarnation = str(uuid.uuid4())
        self.version: str | None = None
        self.dead: FatalError | None = None
        self.guard: Callable[[], str | None] = lambda: None
        self.on_exit: Callable[[], None] = lambda: None
        self._closing = False
        self.ranks = Ranks(settings.backend, settings.tp)
        try:
            self.model = ServedModel(settings.model, settings.dtype, device_of(settings.device, 0))
            model_type = str(self.model.config.model_type)
            self.loader: Loader = make_loader(settings.backend, 0, self.model.weights, self.model.device, model_type)
            self.ranks.start(self.loader, settings.model, settings.dtype, settings.device, self.model.tied, model_type)
        except BaseException:
            self.ranks.kill()
            raise
        self.ledger = Ledger(frozenset(self.model.weights.tensors))
        reuse = settings.caches_prefixes and self.model.prefixes_reusable
        self.prefixes = PrefixCache(PREFIX_BLOCKS) if reuse else None
        self.scheduler = Scheduler(self.model, self.prefixes, lambda: self.guard(), self._step_died)
        if settings.tp > 1:
            threading.Thread(target=self._watch_ranks, name="rank watch", daemon=True).start()

    def apply(self, method: str, *args: Any) -> Outcome:
        """A call on all ranks that may write weights: no forward pass runs meanwhile. Recorded in the ledger."""
        with self.scheduler.exclusive():
            outcome = merge(self._call(method, *args))
            self.ledger.took(outcome)
        return outcome

    def control(self, method: str, *args: Any) -> list[Any]:
        """A call on all ranks that must not overlap a forward pass but is no update."""
        with self.scheduler.exclusive():
            return self._call(method, *args)

    def join_group(self, body: dict[str, Any]) -> Outcome:
        """Make a process group with the trainer; the engine does nothing else until all ranks have joined."""
        init = GroupInit(**body, timeout=self.settings.group_timeout)
        return merge(self.control("join_group", asdict(init)))

    def generate(self, generation: Generation, gone: threading.Event) -> Generation:
        """Run a request to its end; abort it when its client is gone. Raises FatalError where the engine died under it."""
        self.scheduler.submit(generation)
        while not generation.done.wait(DISCONNECT_POLL_SECONDS):
            if gone.is_set():
                self.scheduler.abort([generation.rid])
        if generation.error is not None:
            raise self.dead or FatalError(generation.error)
        return generation

    def request(
        self, prompt: list[int], limit: int, *, rid: str = "", temperature: float = 0.0, **more: Any
    ) -> Generation:
        """A request for this model. Raises ValueError for tokens or lengths that it cannot take."""
        if not prompt:
            raise ValueError("the prompt is empty")
        if bad := [t for t in prompt if not 0 <= t < self.model.vocabulary]:
            raise UnknownTokenError(f"token ids {bad[:5]} are outside the vocabulary of {self.model.vocabulary}")
        if limit < 1 or len(prompt) + limit > self.model.context:
            raise ValueError(
                f"{len(prompt)} prompt tokens and {limit} new ones do not fit the context length {self.model.context}"
            )
        ends = frozenset() if more.pop("ignore_eos", True) else frozenset(self.model.end_tokens)
        generator = None
        if (seed := more.pop("seed", None)) is not None:
            if type(seed) is not int or not -(1 << 63) <= seed < 1 << 63:
                raise ValueError(f"a {type(seed).__name__} is no seed of 64 bits")
            generator = torch.Generator().manual_seed(seed)
        return Generation(rid or uuid.uuid4().hex, prompt, limit, temperature, ends, generator)

    def digest(self) -> dict[str, Any]:
        """The digest of every rank's weights, and per tensor on rank 0. Raises TimeoutError while they are written."""
        with self.scheduler.exclusive(timeout=10):
            per_rank = self._call("digests")
        totals = [self.model.weights.digest(tensors) for tensors in per_rank]
        return {
            "version": self.version,
            "incarnation": self.incarnation,
            "digest": totals[0],
            "ranks": [{"rank": rank, "digest": total} for rank, total in enumerate(totals)],
            "tensors": per_rank[0],
        }

    def set_version(self, version: str) -> None:
        self.version = self.scheduler.version = version

    def die(self, fatal: FatalError) -> None:
        """End as the real engine would, or stay and answer nothing but that."""
        if self.settings.on_fatal == "exit":
            self.exit_now(1)
        self.dead = self.dead or fatal
        self.scheduler.fail(str(fatal))

    def exit_now(self, code: int) -> None:
        """End this process and all ranks without unwinding: something may be stuck in a collective."""
        self._closing = True
        self.on_exit()
        self.ranks.kill()
        os._exit(code)

    def close(self) -> None:
        self._closing = True
        self.scheduler.stop()
        self.ranks.kill()
        self.loader.close()

    @contextlib.contextmanager
    def rank_errors(self) -> Iterator[None]:
        """A lost rank ends the whole engine."""
        try:
            yield
        except RankLostError as error:
            raise FatalError(str(error), "the other ranks end too") from error

    def _call(self, method: str, *args: Any) -> list[Any]:
        with self.rank_errors():
            return self.ranks.call(method, *args)

    def _step_died(self, reason: str) -> None:
        self.die(FatalError(reason, "the forward pass raises and the server process ends"))

    def _watch_ranks(self) -> None:
        rank = self.ranks.wait_for_loss()
        if not self._closing:
            self.die(FatalError(f"the process of rank {rank} ended", "the whole engine ends with it"))
