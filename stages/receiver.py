"""The engine's end of our own wire: what runs inside an engine worker that has weightstream installed.

    init(init_info)                    once per trainer and generation: how the bytes will come
    start()                            a new update: nothing received yet
    receive(update_info, sink) ...     one call per bucket, in order; checked, then handed to `sink` piece by piece
    finish()                           all buckets were here, exactly once
    shutdown()                         drop mappings and groups

Everything is JSON. init_info: `{"transport": "ipc", "timeout": s, "slot_bytes": n, "segments": [name per slot]}` or, on GPU,
`"handles": [per slot: one stages.transport.cuda_ipc handle per exporting GPU]` for the segments; or
`{"transport": "nccl", "timeout": s, "master_address", "master_port", "rank_offset", "world_size", "group_name",
"backend", "slot_bytes"}`. update_info: `{"update": id, "seq": n, "plan_hash": hash, "plan": plan or null,
"slot": index or null, "digest": xxh3-64 as 16 hex digits or null}`; the plan comes along only
when the receiver cannot have it yet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from stages.digest import PIECE, RunningDigest
from stages.errors import PlanMismatch, TransportError
from stages.flow import BucketLayout, Plan, TensorSpec, plan_from_json
from stages.transport.cuda_ipc import open_handle
from stages.transport.group import BroadcastGroup
from stages.transport.messages import GroupInit
from stages.transport.shm import attach

# A bucket of this number is refused, which is how an engine's update session is closed without finishing it.
ABORT_SEQ = -1

# (tensor, byte within the tensor, the bytes: uint8 view valid during the call)
Sink = Callable[[TensorSpec, int, torch.Tensor], None]


@dataclass(frozen=True, slots=True)
class InitInfo:
    """How the bytes of all following updates come. See the module's docstring."""

    transport: str
    timeout: float
    slot_bytes: int
    segments: Sequence[str] = ()
    handles: Sequence[list[dict[str, Any]]] = ()
    master_address: str = ""
    master_port: int = 0
    rank_offset: int = 0
    world_size: int = 0
    group_name: str = ""
    backend: str = "gloo"


@dataclass(frozen=True, slots=True)
class UpdateInfo:
    """One bucket. See the module's docstring."""

    update: int
    seq: int
    plan_hash: str
    plan: dict[str, Any] | None = None
    slot: int | None = None
    digest: str | None = None


class _Pieces:
    """A bucket cut into what goes to the sink: entries, and those in pieces where they are hashed while in the cache."""

    def __init__(self, layout: BucketLayout, hashed: bool) -> None:
        self.sinks: list[tuple[TensorSpec, int]] = []  # tensor, byte within it
        self.spans: list[tuple[int, int]] = []  # bytes of the bucket
        self._cuts: list[int] = []  # sizes of pieces, each followed by that of the gap after it
        for e in layout.entries:
            size = PIECE if hashed else max(e.nbytes, 1)
            for start in range(0, max(e.nbytes, 1), size):
                first = e.offset + start
                self.sinks.append((e.spec, e.start + start))
                self.spans.append((first, first + min(size, e.nbytes - start)))
        for (first, last), (following, _) in zip(self.spans, [*self.spans[1:], (layout.nbytes, 0)], strict=True):
            self._cuts += [last - first, following - last]

    def of(self, memory: torch.Tensor) -> Sequence[torch.Tensor]:
        """The pieces of a bucket's bytes, all made in one call."""
        first = self.spans[0][0] if self.spans else 0
        pieces: Sequence[torch.Tensor] = memory[first:].split(self._cuts)
        return pieces[::2]


_LONGEST_WAIT = 1e6  # seconds
_KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("transport", "master_address", "group_name", "backend", "plan_hash"), (str,)),
    **dict.fromkeys(("slot_bytes", "master_port", "rank_offset", "world_size"), (int,)),
    **dict.fromkeys(("segments", "handles"), (list, tuple)),
    "timeout": (int, float),
    "plan": (dict, type(None)),
    "digest": (str, type(None)),
}


def _parse(cls: type, info: dict[str, Any]) -> Any:
    """`info` as a `cls`, each value of the right kind. Raises TransportError for whatever else a stranger sent."""
    if not isinstance(info, dict):
        raise TransportError(f"{cls.__name__}: a {type(info).__name__} where an object belongs")
    known = {f.name for f in fields(cls)}
    if unknown := sorted(map(str, set(info) - known)):
        raise TransportError(f"{cls.__name__}: unknown keys {unknown[:5]}, known are {sorted(known)}")
    for name, value in info.items():
        if not isinstance(value, _KINDS.get(name, object)) or isinstance(value, bool):
            raise TransportError(f"{cls.__name__}: {name} is a {type(value).__name__}")
    if not 0 < info.get("timeout", 1) <= _LONGEST_WAIT:
        raise TransportError(f"{cls.__name__}: timeout {info['timeout']} s is not within 0 to {_LONGEST_WAIT:.0f}")
    try:
        return cls(**info)
    except TypeError as error:
        raise TransportError(f"{cls.__name__}: {error}") from error


class Receiver:
    """One engine rank's receiving end. `rank` is the rank within the engine (0..world of this engine - 1)."""

    def __init__(self, rank: int, device: torch.device | str = "cpu") -> None:
        self.rank = rank
        self.device = torch.device(device)
        self._source: _Slots | _Broadcast | None = None
        self._plan: Plan | None = None
        self._update: int | None = None
        self._next = 0
        self._cut: dict[tuple[int, bool], _Pieces] = {}  # of the plan's buckets

    def init(self, info: dict[str, Any]) -> None:
        """Map the sender's segments or join its group; replaces what an earlier init made. Raises TransportError."""
        parsed: InitInfo = _parse(InitInfo, info)
        self.shutdown()
        if parsed.transport == "ipc":
            self._source = _Slots(parsed, self.device)
        elif parsed.transport == "nccl":
            self._source = _Broadcast(parsed, self.rank, self.device)
        else:
            raise TransportError(f"init_info: transport {parsed.transport!r} is not one of ipc, nccl")

    def start(self) -> None:
        """Expect bucket 0 of a new update. Raises TransportError before init."""
        if self._source is None:
            raise TransportError("no init_info yet: the trainer must initialise the transfer first")
        self._update, self._next = None, 0

    def receive(self, info: dict[str, Any], sink: Sink) -> None:
        """Take the bucket that `info` describes and hand its entries to `sink`, in order.

        Raises PlanMismatch (unknown plan, wrong order) before the bytes move, TransportError when they do not arrive or their
        digest differs: that is known only once `sink` has had them, so the update has failed and must not be served.
        """
        if self._source is None:
            raise TransportError("no init_info yet: the trainer must initialise the transfer first")
        parsed: UpdateInfo = _parse(UpdateInfo, info)
        layout = self._expect(parsed)
        memory = self._source.fetch(layout, parsed.slot)
        hashed = parsed.digest is not None and memory.device.type == "cpu"
        pieces = self._pieces(layout, hashed)
        digest = RunningDigest() if hashed else None
        if digest is None:
            for (spec, start), piece in zip(pieces.sinks, pieces.of(memory), strict=True):
                sink(spec, start, piece)
        else:
            view = memory.numpy().data
            for (spec, start), (first, last), piece in zip(pieces.sinks, pieces.spans, pieces.of(memory), strict=True):
                sink(spec, start, piece)
                digest.update(view[first:last])  # after it was read for the sink, while it is in the cache
        if digest is not None and f"{digest.value():016x}" != parsed.digest:
            raise TransportError(
                f"bucket {parsed.seq} arrived changed: its digest is {digest.value():016x}, the sender's {parsed.digest}"
            )
        self._next += 1

    def finish(self) -> None:
        """Check that every bucket of the update was received. Raises PlanMismatch otherwise."""
        total = len(self._plan.buckets) if self._plan else 0
        if self._update is None or self._next != total:
            raise PlanMismatch(f"update incomplete: {self._next} of {total} buckets received")
        self._update, self._next = None, 0

    def shutdown(self) -> None:
        """Drop mappings and connections. Safe to call twice."""
        source, self._source = self._source, None
        self._plan, self._cut = None, {}
        if source is not None:
            source.close()

    def _pieces(self, layout: BucketLayout, hashed: bool) -> _Pieces:
        known = self._cut.get((layout.seq, hashed))
        if known is None:
            known = self._cut[layout.seq, hashed] = _Pieces(layout, hashed)
        return known

    def _expect(self, info: UpdateInfo) -> BucketLayout:
        if type(info.seq) is not int or type(info.update) is not int:
            raise PlanMismatch(f"bucket {info.seq!r} of update {info.update!r}: both are whole numbers")
        if info.seq == ABORT_SEQ:
            self._update, self._next = None, 0
            raise PlanMismatch("the trainer gave this update up")
        if info.plan is not None:
            self._plan = plan_from_json(info.plan)
            self._cut = {}
        if self._plan is None or self._plan.hash != info.plan_hash:
            known = self._plan.hash if self._plan else "none"
            raise PlanMismatch(f"unknown plan {info.plan_hash} (known: {known}); send the plan along with bucket 0")
        if info.seq == 0 and self._next == 0:
            self._update = info.update
        if info.update != self._update or info.seq != self._next or info.seq >= len(self._plan.buckets):
            raise PlanMismatch(
                f"bucket {info.seq} of update {info.update} arrived where bucket {self._next} of update {self._update} "
                f"was due ({len(self._plan.buckets)} in all)"
            )
        return self._plan.buckets[info.seq]


class _Slots:
    """Bytes lie in the slots of the sender's ring, mapped once: shared-memory segments, or memory of our own GPU."""

    def __init__(self, info: InitInfo, device: torch.device) -> None:
        self._slots = [attach(name, info.slot_bytes) for name in info.segments]
        self._slots += [open_handle(handles, device) for handles in info.handles]

    def fetch(self, layout: BucketLayout, slot: int | None) -> torch.Tensor:
        if type(slot) is not int or not 0 <= slot < len(self._slots):
            raise TransportError(f"bucket {layout.seq}: slot {slot} is not one of the {len(self._slots)} mapped")
        if layout.nbytes > self._slots[slot].numel():
            raise TransportError(f"bucket {layout.seq} of {layout.nbytes} bytes exceeds its slot")
        return self._slots[slot][: layout.nbytes]

    def close(self) -> None:
        self._slots.clear()


class _Broadcast:
    """Bytes are broadcast from the trainer into one reused buffer."""

    def __init__(self, info: InitInfo, rank: int, device: torch.device) -> None:
        init = GroupInit(
            info.master_address,
            info.master_port,
            info.rank_offset,
            info.world_size,
            info.group_name,
            info.backend,
            info.timeout,
        )
        self._group = BroadcastGroup.join(init, info.rank_offset + rank, device)
        try:
            self._buffer = torch.zeros(info.slot_bytes, dtype=torch.uint8, device=device)
        except (RuntimeError, OverflowError, MemoryError) as error:
            self._group.destroy()
            raise TransportError(f"init_info: no buffer of {info.slot_bytes} bytes: {error}") from error

    def fetch(self, layout: BucketLayout, slot: int | None) -> torch.Tensor:
        if layout.nbytes > self._buffer.numel():
            raise TransportError(f"bucket {layout.seq} of {layout.nbytes} bytes exceeds {self._buffer.numel()}")
        memory = self._buffer[: layout.nbytes]
        self._group.broadcast(memory)
        return memory

    def close(self) -> None:
        self._group.destroy()
