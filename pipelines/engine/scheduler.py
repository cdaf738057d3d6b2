"""The token loop: one thread, one forward pass at a time, requests taking turns.

waiting -> running -> done           a step is one forward pass of one running request
freeze / thaw                        no step at all; KV is kept
close / open admission               running requests go on, waiting ones stay
retract                              running requests go back to waiting without their KV
exclusive                            the holder touches weights or KV; no step runs meanwhile
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from pipelines.engine.generation import Generation
from pipelines.engine.model import ServedModel
from pipelines.engine.prefix import PrefixCache


class Scheduler:
    """Runs requests on a model. `version` labels the tokens; `prefixes` is None where prefix caching is off.

    `guard` is asked before every step and returns why a real engine's process would end there, or None; the scheduler
    then calls `on_fatal` with it and fails every request.
    """

    def __init__(
        self,
        model: ServedModel,
        prefixes: PrefixCache | None,
        guard: Callable[[], str | None],
        on_fatal: Callable[[str], None],
    ) -> None:
        self.model = model
        self.prefixes = prefixes
        self.version: str | None = None
        self.running: deque[Generation] = deque()
        self.waiting: deque[Generation] = deque()
        self.frozen = False
        self.admitting = True
        self.failure: str | None = None
        self._guard = guard
        self._on_fatal = on_fatal
        self._changed = threading.Condition()
        self._stepping = False
        self._held = False
        self._interrupts = 0
        self._stop = False
        self._thread = threading.Thread(target=self._loop, name="scheduler", daemon=True)
        self._thread.start()

    def submit(self, generation: Generation) -> None:
        with self._changed:
            if self.failure is not None:
                _fail(generation, self.failure)
                return
            self.waiting.append(generation)
            self._changed.notify_all()

    def abort(self, rids: list[str] | None = None) -> int:
        """Finish these requests, or all, with what they have; returns how many there were."""
        with self._still():
            chosen = [g for g in (*self.running, *self.waiting) if rids is None or g.rid in rids]
            for generation in chosen:
                self._leave(generation, "abort")
            return len(chosen)

    def freeze(self) -> None:
        with self._still():
            self.frozen = True

    def thaw(self) -> None:
        """Undo `freeze` and closed admission."""
        with self._changed:
            self.frozen, self.admitting = False, True
            self._changed.notify_all()

    def drain(self) -> None:
        """Close admission and wait until the running requests have finished."""
        with self._changed:
            self.frozen, self.admitting = False, False
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self.running or self.failure is not None)

    def wait_idle(self, timeout: float) -> bool:
        """Wait until nothing runs or waits."""
        with self._changed:
            return self._changed.wait_for(lambda: not self.running and not self.waiting, timeout)

    def retract(self) -> None:
        """Send running requests back to the head of the queue; they will recompute their KV."""
        with self._still():
            for generation in self.running:
                generation.kv = None
                generation.retractions += 1
            self.waiting.extendleft(reversed(self.running))
            self.running.clear()

    def flush(self) -> None:
        """Empty the prefix cache."""
        with self._still():
            if self.prefixes is not None:
                self.prefixes.clear()

    @contextmanager
    def exclusive(self, timeout: float | None = None) -> Iterator[None]:
        """No forward pass starts while this is held. Raises TimeoutError where it is held by somebody else too long."""
        with self._changed:
            if not self._interrupt(lambda: not self._stepping and not self._held, timeout):
                raise TimeoutError("the weights are being written")
            self._held = True
        try:
            yield
        finally:
            with self._changed:
                self._held = False
                self._changed.notify_all()

    def fail(self, reason: str) -> None:
        """The engine is dead: fail every request, now and later."""
        with self._changed:
            self.failure = self.failure or reason
            for generation in (*self.running, *self.waiting):
                _fail(generation, reason)
            self.running.clear()
            self.waiting.clear()
            self._changed.notify_all()

    def stop(self) -> None:
        with self._changed:
            self._stop = True
            self._changed.notify_all()

    @contextmanager
    def _still(self) -> Iterator[None]:
        """Hold the lock between two steps."""
        with self._changed:
            self._interrupt(lambda: not self._stepping)
            yield
            self._changed.notify_all()

    def _interrupt(self, ready: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait, with the lock held, until `ready`; the loop starts no step while somebody waits here."""
        self._interrupts += 1
        try:
            return self._changed.wait_for(ready, timeout)
        finally:
            self._interrupts -= 1
            self._changed.notify_all()

    def _may_step(self) -> bool:
        work = bool(self.running) or (self.admitting and bool(self.waiting))
        return work and not self.frozen and not self._held and not self._interrupts

    def _loop(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stop or self._may_step())
                if self._stop:
                    return
                if self.admitting:
                    self.running.extend(self.waiting)
                    self.waiting.clear()
                generation = self.running[0]
                self._stepping = True
            fatal = self._guard() or self._step(generation)
            with self._changed:
                self._stepping = False
                if generation.finish is not None:
                    self._leave(generation, generation.finish)
                elif self.running:
                    self.running.rotate(-1)
                self._changed.notify_all()
            if fatal is not None:
                self.fail(fatal)
                self._on_fatal(fatal)

    def _step(self, generation: Generation) -> str | None:
        try:
            if generation.kv is None:
                self._prefill(generation)
            else:
                logits = self.model.forward(generation.output[-1:], generation.kv)
                generation.pick(logits, self.version)
            if generation.finish is not None:
                self._remember(generation)
        except Exception as error:  # a forward pass that fails ends a real engine's process, whatever the reason
            return f"the forward pass failed: {type(error).__name__}: {error}"
        return None

    def _prefill(self, generation: Generation) -> None:
        tokens = generation.tokens
        cache = self.model.new_cache()
        blocks = self.prefixes.match(tokens, len(tokens) - 1) if self.prefixes is not None else []
        for index, layer in enumerate(zip(*blocks, strict=True)):
            cache.update(torch.cat([k for k, _ in layer], 2), torch.cat([v for _, v in layer], 2), index)
        known = cache.get_seq_length()
        if not generation.output:
            generation.cached_tokens = known
        logits = self.model.forward(tokens[known:], cache)
        generation.kv = cache
        generation.pick(logits, self.version)
        self._remember(generation)

    def _remember(self, generation: Generation) -> None:
        if self.prefixes is not None:
            layers = [(layer.keys, layer.values) for layer in generation.kv.layers]
            self.prefixes.insert(generation.tokens[: generation.kv.get_seq_length()], layers)

    def _leave(self, generation: Generation, reason: str) -> None:
        generation.finish = reason
        generation.kv = None
        for queue in (self.running, self.waiting):
            if generation in queue:
                queue.remove(generation)
        generation.done.set()


def _fail(generation: Generation, reason: str) -> None:
    generation.error = reason
    generation.kv = None
    generation.done.set()
