"""What a stage is given besides its items: everything about this run that is not its own setting."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from stages.comm import Comm
from stages.flow import GroupSpec, Plan, TensorSpec
from stages.trace import Trace

if TYPE_CHECKING:
    from stages.backends.base import Backend, Engine
    from stages.transport.base import Transport


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds for each kind of wait; all must be positive."""

    connect: float = 5.0  # until an engine's port answers
    control: float = 60.0  # pause, begin, commit, flush, resume, version
    put: float = 120.0  # one bucket, and waiting for a free slot
    group: float = 60.0  # forming a process group, one broadcast
    agree: float = 120.0  # trainer ranks waiting for one another


@dataclass(frozen=True, slots=True)
class Wire:
    """How buckets must be laid out for whoever decodes them.

    `mixed`: may a bucket hold several dtypes. `split`: may a tensor be cut across buckets. `align`: entries start at
    multiples of this many bytes; 1 means no padding at all, entries then go widest item first so that none is misaligned.
    `aliases`: send tied names as tensors of their own ("duplicate") or not at all ("omit"). `digest`: the receiver checks one.
    `bootstrap`: how process groups find each other, by a "store" or by an NCCL "unique_id". `per_tensor`: each tensor of a
    bucket is a broadcast, or a handle, of its own.
    """

    mixed: bool = True
    split: bool = False
    align: int = 1
    aliases: str = "omit"
    digest: bool = False
    bootstrap: str = "store"
    per_tensor: bool = False


class Clock:
    """Self-time per phase in seconds, summed over the update; with a trace, what is timed is a span of it, too."""

    def __init__(self, trace: Trace | None = None) -> None:
        self.seconds: dict[str, float] = {}
        self.trace = trace

    def add(self, phase: str, seconds: float) -> None:
        self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds

    def time(self, phase: str) -> _Timer:
        """`with clock.time("pause"): ...`"""
        return _Timer(self, phase)


class _Timer:
    def __init__(self, clock: Clock, phase: str) -> None:
        self._clock, self._phase = clock, phase

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        end = time.perf_counter()
        self._clock.add(self._phase, end - self._start)
        if self._clock.trace is not None:
            self._clock.trace.span("session", self._phase, self._start, end)


@dataclass
class Run:
    """One trainer rank's view of the current update. Made once per updater; the update's own fields change."""

    comm: Comm
    device: torch.device
    backend: Backend
    transport: Transport
    wire: Wire
    timeouts: Timeouts
    integrity: bool = True
    engines: list[Engine] = field(default_factory=list)  # those that take part in this update
    required: int | None = None  # how many of them must be left at the end; None: all
    lost: dict[Engine, Exception] = field(default_factory=dict)  # those that failed in it; on rank 0
    model: Any = None  # what gather reads: a module or a checkpoint folder
    expected: dict[str, TensorSpec] | None = None  # what the engines' checkpoint holds, where known
    on_load: frozenset[str] = frozenset()  # weights that come wide, for the engines to quantize
    gathered: tuple[GroupSpec, ...] = ()  # what the first stage yields, in order
    plan: Plan | None = None
    planned: tuple[object, ...] | None = None  # what `plan` was made from
    folder: str | None = None  # where a disk transport published this version, as engines see it
    reference: Path | None = None  # HF checkpoint folder that describes the model
    update: int = 0  # counts every attempt of this updater
    version: str = ""
    clock: Clock = field(default_factory=Clock)
    progress: Callable[[int], None] = lambda nbytes: None  # called with the bytes of every delivered bucket

    @property
    def alive(self) -> list[Engine]:
        """The engines that did not fail in this update."""
        return [e for e in self.engines if e not in self.lost]

    def lose(self, failures: Mapping[Engine, Exception]) -> None:
        """Go on without these engines. Raises the first failure where too few would be left."""
        required = len(self.engines) if self.required is None else self.required
        if len(self.alive) - len(failures) < required:
            raise next(iter(failures.values()))
        self.lost |= failures

    @property
    def current_plan(self) -> Plan:
        """The plan of this update. Raises RuntimeError before planning."""
        if self.plan is None:
            raise RuntimeError("no plan yet: Stage.plan runs before anything streams")
        return self.plan
