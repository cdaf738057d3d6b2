"""The adapter contract: turns the session's steps and a transport's messages into requests of one engine."""

from __future__ import annotations

import os
import re
import uuid
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from stages.backends.actor import SCHEME, Actor
from stages.backends.http import Http
from stages.errors import CompositionError, ConfigError, EngineError
from stages.flow import Bucket, Shipment, TensorSpec
from stages.run import Run, Timeouts, Wire
from stages.transport.messages import GroupInit, SharedSlots

# Proofs from weakest to strongest; see Engine.verify.
PROOFS = ("acknowledged", "version", "checksum", "probe", "digest")


@dataclass(frozen=True, slots=True)
class Keys:
    """Bearer tokens: `api` for generation and read-back, `admin` for control routes (SGLang has two)."""

    api: str | None = field(default=None, repr=False)
    admin: str | None = field(default=None, repr=False)

    @classmethod
    def from_environment(cls) -> Keys:
        """WEIGHTSTREAM_API_KEY and WEIGHTSTREAM_ADMIN_KEY; the second defaults to the first."""
        api = _key("WEIGHTSTREAM_API_KEY")
        return cls(api, _key("WEIGHTSTREAM_ADMIN_KEY") or api)


def _key(variable: str) -> str | None:
    key = os.environ.get(variable) or None
    if key is not None and not re.fullmatch(r"[!-~]+", key):
        raise ConfigError(f"{variable} holds a space, a line break or another character that no HTTP header can carry")
    return key


@dataclass(slots=True)
class EngineState:
    """What the trainer's side remembers of an engine between updates."""

    version: str | None = None  # last committed by us
    incarnation: str = ""  # changes when the engine was found to be a new process
    tainted: str | None = None  # why it must not serve, until a complete update
    needs_restart: bool = False  # no update can repair it
    paused: bool = False  # by us
    begun: bool = False  # the current update may have changed its weights
    known_plan: str | None = None  # plan hash that our own receiver there has


class Backend(ABC):
    """Settings and capabilities of one kind of engine; makes an Engine per URL."""

    name: ClassVar[str]
    transports: ClassVar[tuple[str, ...]]
    refusals: ClassVar[dict[str, str]] = {}  # transport -> why not, in one sentence
    seen: ClassVar[str] = "0"  # the version that the adapter was tried with
    quantizes_on_load: ClassVar[tuple[str, ...]] = ()  # formats of which it takes the wide weights instead

    @abstractmethod
    def wire(self, transport: str) -> Wire:
        """The layout rules of buckets on this transport."""

    def check_device(self, device: torch.device) -> None:
        """Raise CompositionError when these settings cannot work on this kind of device."""

    @abstractmethod
    def engine(self, url: str, tp: int, keys: Keys, timeouts: Timeouts) -> Engine:
        """The adapter of one running engine of `tp` ranks."""

    def check(self, transport: str) -> None:
        """Raise CompositionError when this engine cannot be fed by this transport."""
        if transport not in self.transports:
            reason = self.refusals.get(transport, "not supported by this engine as shipped")
            raise CompositionError(
                f"backend={self.name} with transport={transport}: {reason}. "
                f"backend={self.name} works with transport={' | '.join(self.transports)}"
            )


class Engine(ABC):
    """One running engine, as the session drives it. Methods block; any of them may raise EngineError."""

    def __init__(self, url: str, tp: int, keys: Keys, timeouts: Timeouts) -> None:
        self.url = url
        self.tp = tp
        self.timeouts = timeouts
        self.state = EngineState()
        self.admin: Http | Actor
        self.api: Http | Actor
        if url.startswith(SCHEME):
            self.admin = self.api = Actor(url)
        else:
            self.admin = Http(url, keys.admin, timeouts.connect, (keys.api,))
            self.api = Http(url, keys.api, timeouts.connect, (keys.admin,))

    @property
    def identity(self) -> str:
        """An address that no other engine on this host has."""
        return self.admin.identity if isinstance(self.admin, Actor) else self.url

    def close(self) -> None:
        self.admin.close()
        self.api.close()

    @abstractmethod
    def probe(self) -> None:
        """Check that it is up and shaped as configured; call `restarted` when it is no longer the process we knew."""

    def restarted(self) -> None:
        """It is a new process at the old address: forget what the old one knew."""
        self.state = EngineState(incarnation=uuid.uuid4().hex)

    def expected(self) -> dict[str, TensorSpec] | None:
        """What it would accept: HF name -> dtype and shape, or None where it does not say."""
        return None

    def model_path(self) -> str | None:
        """The folder it loaded its checkpoint from, where it says."""
        return None

    def software(self) -> str | None:
        """Its version, where it says."""
        return None

    # -- once per generation -------------------------------------------------------------------
    @abstractmethod
    def join_group(self, init: GroupInit) -> None:
        """Have all its ranks join. Blocks until the group is complete."""

    @abstractmethod
    def leave_group(self, init: GroupInit) -> None:
        """Have it destroy the group; unknown groups are no error."""

    def attach(self, slots: SharedSlots) -> None:
        """The slots of an ipc ring were (re)made. For receivers that map them once."""

    def detach(self) -> None:
        """The slots of an ipc ring are gone: drop what was made for them, here and there."""

    # -- the session ---------------------------------------------------------------------------
    @abstractmethod
    def pause(self, run: Run) -> None:
        """Stop generating; from here on nothing reads the weights."""

    @abstractmethod
    def begin(self, run: Run) -> None:
        """Open the update."""

    @abstractmethod
    def put(self, shipment: Shipment, run: Run) -> None:
        """Announce one bucket; returns once the engine has applied it."""

    def prepare(self, run: Run) -> None:
        """Every bucket was acknowledged; last check before anything is made final."""

    @abstractmethod
    def commit(self, run: Run) -> None:
        """Finish the update, flush caches, record the version."""

    @abstractmethod
    def abort(self, run: Run) -> None:
        """Close a failed update so that the next one can begin. It stays paused."""

    @abstractmethod
    def resume(self, run: Run) -> None:
        """Serve again."""

    @abstractmethod
    def verify(self, run: Run) -> str:
        """Read back what can be read back: one of PROOFS. Raises EngineError when it contradicts what was sent."""

    # -- what transports need ---------------------------------------------------------------------
    def encode_ipc(self, bucket: Bucket, run: Run) -> str:
        """This rank's payload for one engine rank, for IpcMessage."""
        raise NotImplementedError

    def generate(self, input_ids: list[int], max_new_tokens: int) -> tuple[list[int], list[float]]:
        """Greedy tokens and their log-probabilities (natural logarithm)."""
        raise NotImplementedError

    def fail(self, phase: str, message: str, **details: Any) -> EngineError:
        """An error of this engine, to be raised."""
        details["body"] = self.api.clean(details.get("body", ""))
        return EngineError(self.url, phase, self.api.clean(message), **details)
