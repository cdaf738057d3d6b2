"""Engines without servers: they apply what they are sent, keep to the session's rules, and fail when told to."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

import torch

from pipelines import config
from pipelines.updater import WeightUpdater
from stages.backends.base import Backend, Engine, Keys
from stages.errors import EngineUnreachable
from stages.flow import Bucket, Shipment
from stages.run import Run, Timeouts, Wire
from stages.transport.messages import GroupInit, SharedSlots
from support.chains import SHORT, WIRES, raw

Action = BaseException | Callable[[], Any]


class FakeBackend(Backend):
    """A backend of fake engines, for any transport. `wire` is one of support.chains.WIRES."""

    name = "fake"
    transports = ("memory", "ipc", "nccl", "disk")

    def __init__(self, wire: str = "mixed") -> None:
        self._wire = WIRES[wire]

    def wire(self, transport: str) -> Wire:
        return self._wire

    def engine(self, url: str, tp: int, keys: Keys, timeouts: Timeouts) -> FakeEngine:
        return FakeEngine(url, tp, keys, timeouts)


class FakeEngine(Engine):
    """One engine in this process.

    `log` lists what was asked, `script(phase, ...)` says what goes wrong at the next calls of a phase. It refuses what a strict
    engine would: a second begin, buckets outside of a session, generation while it is paused.
    """

    def __init__(self, url: str = "http://one:1", tp: int = 1, keys: Keys | None = None, timeouts: Timeouts = SHORT):
        super().__init__(url, tp, keys or Keys(), timeouts)
        self.log: list[str] = []
        self.weights: dict[str, bytes] = {}
        self.version: str | None = "initial"
        self.proof = "version"
        self.path: str | None = None
        self.dead = False
        self.is_paused = self.in_session = False
        self.groups: list[GroupInit] = []
        self.left: list[GroupInit] = []
        self._loading: dict[str, bytearray] = {}
        self._scripts: dict[str, list[Action]] = {}
        self._lock = threading.Lock()

    # -- what tests tell it --------------------------------------------------------------------------
    def script(self, phase: str, *actions: Action | None) -> None:
        """What the next calls of `phase` do: raise this, run this, or (None) succeed."""
        self._scripts.setdefault(phase, []).extend(a if a is not None else (lambda: None) for a in actions)

    def refuse(self, phase: str, words: str = "no", **details: Any) -> Exception:
        return self.fail(phase, words, **details)

    def restart(self) -> None:
        """A new process at the old address, with the weights that are on disk."""
        self.weights, self._loading = {}, {}
        self.version = "initial"
        self.dead = self.is_paused = self.in_session = False

    @property
    def serving(self) -> bool:
        return not self.dead and not self.is_paused and not self.in_session

    # -- what weightstream asks -----------------------------------------------------------------------
    def probe(self) -> None:
        self._do("probe")
        if self.state.version is not None and self.version != self.state.version:
            self.restarted()

    def model_path(self) -> str | None:
        return self.path

    def join_group(self, init: GroupInit) -> None:
        self._do("join")
        self.groups.append(init)

    def leave_group(self, init: GroupInit) -> None:
        self._do("leave")
        self.left.append(init)

    def attach(self, slots: SharedSlots) -> None:
        self._do("attach")

    def pause(self, run: Run) -> None:
        self.state.paused = True
        self._do("pause")
        self.is_paused = True

    def begin(self, run: Run) -> None:
        self.state.begun = True
        self._do("begin")
        if self.in_session:
            raise self.refuse("begin", "update already active")
        assert self.is_paused, "an update begins while it generates"
        self.in_session = True
        self._loading = {}

    def put(self, shipment: Shipment, run: Run) -> None:
        self._do("put")
        if not self.in_session:
            raise self.refuse("put", "no session")
        self.take(shipment.bucket)

    def take(self, bucket: Bucket) -> None:
        for e in bucket.layout.entries:
            target = self._loading.setdefault(e.spec.name, bytearray(e.spec.nbytes))
            target[e.start : e.start + e.nbytes] = raw(bucket.memory[e.offset : e.offset + e.nbytes])

    def prepare(self, run: Run) -> None:
        self._do("prepare")

    def commit(self, run: Run) -> None:
        self._do("commit")
        self.weights = {name: bytes(data) for name, data in self._loading.items()}
        self.in_session, self.version = False, run.version

    def abort(self, run: Run) -> None:
        self._do("abort")
        self.in_session = False

    def resume(self, run: Run) -> None:
        self._do("resume")
        self.is_paused = False

    def verify(self, run: Run) -> str:
        self._do("verify")
        if self.version != run.version:
            raise self.refuse("verify", f"version is {self.version!r}, {run.version!r} was committed")
        return self.proof

    def encode_ipc(self, bucket: Bucket, run: Run) -> str:
        return ""

    def _do(self, phase: str) -> None:
        with self._lock:
            self.log.append(phase)
            script = self._scripts.get(phase)
            action = script.pop(0) if script else None
        if self.dead:
            raise EngineUnreachable(self.url, phase, "connection refused")
        if isinstance(action, BaseException):
            raise action
        if action is not None:
            action()


@cache
def _composed() -> dict[str, Any]:
    return config.load(["recipe=minimal", "backend=sglang", "engines=remote", "engines.urls=[http://one:1]"])


def settings_for(
    urls: Iterable[str] = ("http://one:1",),
    *,
    transport: Mapping[str, Any] | None = None,
    wire: str = "mixed",
    capacity: int | str = 64,
    stages: list[Any] | None = None,
    timeouts: Timeouts = SHORT,
    **session: Any,
) -> dict[str, Any]:
    """A composed config with fake engines in it, and short timeouts. `session` overrides settings of the session."""
    settings = copy.deepcopy(_composed())
    settings["backend"] = {"_target_": "support.fakes.FakeBackend", "wire": wire}
    settings["transport"] = dict(transport or {"_target_": "support.chains.Memory"})
    settings["engines"] |= {"urls": list(urls)}
    settings["bucket"] |= {"capacity": capacity}
    if stages is not None:
        settings["recipe"] = {"stages": stages}
    settings["session"] |= {"preflight": False, **session}
    settings["session"]["timeouts"] = {n: getattr(timeouts, n) for n in Timeouts.__dataclass_fields__}
    return settings


def updater_for(*args: Any, **kwargs: Any) -> WeightUpdater:
    """A WeightUpdater over fake engines; see settings_for. Not open yet."""
    return WeightUpdater(settings_for(*args, **kwargs))


def engines_of(updater: WeightUpdater) -> list[FakeEngine]:
    """Its engines, in order of their URLs in the config."""
    return updater._known  # type: ignore[return-value]


class Toy(torch.nn.Module):
    """Five tensors in four groups, 176 bytes: three buckets of 64."""

    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        for name, shape in (("embed", (4, 4)), ("q_proj", (2, 4)), ("k_proj", (1, 4)), ("down", (3,)), ("norm", (5,))):
            self.register_module(name, torch.nn.Module())
            getattr(self, name).weight = torch.nn.Parameter(torch.full(shape, value))

    def fill(self, value: float) -> Toy:
        for p in self.parameters():
            p.data.fill_(value)
        return self

    def bytes(self) -> dict[str, bytes]:
        return {name: raw(p) for name, p in self.named_parameters()}
