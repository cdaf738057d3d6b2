"""nccl: buckets are broadcast from trainer rank 0 to all engine ranks, by NCCL on GPU and by gloo on CPU.

Sender: `prepare` forms the groups (every engine is asked to join while the trainer joins as rank 0); a shipment's `send` is
the broadcast. Receiver: SGLang's and LMDeploy's distributed routes, or `stages.receiver` in our plug-in. One port, bound once
and kept; every group name has a generation number, so a dead group is never met again.
"""

from __future__ import annotations

import uuid
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from stages.backends.base import Engine
from stages.errors import ConfigError, TransportError
from stages.flow import Bucket, Shipment, dtype_name
from stages.run import Run
from stages.threads import start
from stages.transport.base import Transport
from stages.transport.group import BroadcastGroup, GroupStore, NcclIdGroup
from stages.transport.messages import GroupInit, GroupMessage

Group = BroadcastGroup | NcclIdGroup
_LEAVE_SECONDS = 10.0
_GLOO_DTYPES = (  # seen in torch 2.13
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
    torch.bool,
)


@dataclass(slots=True)
class _Live:
    """A formed group and who is in it."""

    group: Group
    engines: tuple[Engine, ...]
    inits: dict[str, GroupInit]  # by engine URL

    def fits(self, run: Run) -> bool:
        """Whether the receivers' buffers, made when they joined, hold the largest bucket of this plan."""
        return all(i.bucket_bytes >= run.current_plan.largest_bucket for i in self.inits.values())


def rank_offsets(sizes: list[int]) -> list[int]:
    """First rank of each engine in a group where the trainer is rank 0: `[1, 2] -> [1, 2]`, `[2, 1, 4] -> [1, 3, 4]`."""
    if any(s < 1 for s in sizes):
        raise ConfigError(f"engines.tp: every engine needs at least one rank, got {sizes}")
    offsets, first = [], 1
    for size in sizes:
        offsets.append(first)
        first += size
    return offsets


class Nccl(Transport):
    """One group over all engines (`groups="one"`), or one per engine (`"per_engine"`: no engine waits for another's)."""

    name = "nccl"

    def __init__(self, address: str = "127.0.0.1", port: int = 29650, groups: str = "one") -> None:
        if groups not in ("one", "per_engine"):
            raise ConfigError(f"transport.groups: {groups!r} is not one of one, per_engine")
        if not 0 <= port < 65536:
            raise ConfigError(f"transport.port: {port} is not a port (0 lets the system choose)")
        self.address, self.port, self.groups = address, port, groups
        self._store: GroupStore | None = None
        self._live: list[_Live] = []
        self._generation = 0
        self._job = uuid.uuid4().hex[:8]

    def open(self, run: Run) -> None:
        if run.comm.is_head:
            self._store = GroupStore(self.address, self.port, run.timeouts.group)

    def close(self) -> None:
        for live in self._live:
            self._dissolve(live)
        self._live = []
        self._store = None

    def prepare(self, run: Run) -> None:
        if not run.comm.is_head:
            return
        self.check(run)
        wanted = [tuple(run.engines)] if self.groups == "one" else [(e,) for e in run.engines]
        for live in [x for x in self._live if x.engines not in wanted or not x.fits(run)]:
            self._live.remove(live)
            self._dissolve(live)
        for engines in wanted:
            if not any(live.engines == engines for live in self._live):
                self._live.append(self._form(engines, run))

    def check(self, run: Run) -> None:
        _refuse_what_gloo_lacks(run)

    def leave(self, engine: object) -> None:
        for live in [x for x in self._live if engine in x.engines]:
            self._live.remove(live)
            self._dissolve(live)

    def ship(self, bucket: Bucket, run: Run) -> Shipment:
        if bucket.slot is None:
            return Shipment(bucket, GroupMessage({}))
        if run.wire.per_tensor:
            parts = [tensor for _, tensor in bucket.tensors()]
        elif run.wire.mixed or not bucket.layout.entries:
            parts = [bucket.memory]
        else:
            parts = [bucket.memory.view(bucket.layout.entries[0].spec.dtype)]
        names = {e.url: live.group.name for live in self._live for e in live.engines}
        groups = [live.group for live in self._live]
        return Shipment(bucket, GroupMessage(names), lambda: _broadcast_all(groups, parts))

    def _form(self, engines: tuple[Engine, ...], run: Run) -> _Live:
        assert self._store is not None
        self._generation += 1
        sizes = [e.tp for e in engines]
        unique_id = NcclIdGroup.new_id() if run.wire.bootstrap == "unique_id" else None
        inits = {
            e.url: GroupInit(
                master_address=self.address,
                master_port=self._store.port,
                rank_offset=offset,
                world_size=1 + sum(sizes),
                group_name=f"weightstream-{self._job}-{self._generation}",
                backend="nccl" if run.device.type == "cuda" else "gloo",
                timeout=run.timeouts.group,
                bucket_bytes=run.current_plan.largest_bucket,
                unique_id=unique_id,
            )
            for e, offset in zip(engines, rank_offsets(sizes), strict=True)
        }
        store, device = self._store, run.device
        first = inits[engines[0].url]
        lead: Future[Group] = start(
            lambda: NcclIdGroup(first, device) if unique_id else BroadcastGroup.lead(store, first, device), "group"
        )
        joins = [start(partial(e.join_group, inits[e.url]), "group") for e in engines]
        self._await_all([lead, *joins], run)
        return _Live(lead.result(), engines, inits)

    def _await_all(self, futures: list[Future[Any]], run: Run) -> None:
        """All joined, or the first refusal at once: the others are left to their own timeout."""
        pending = set(futures)
        while pending:
            done, pending = wait(
                pending, timeout=run.timeouts.group + run.timeouts.connect, return_when=FIRST_COMPLETED
            )
            if not done:
                raise TransportError(
                    f"the process group did not form within {run.timeouts.group} s (session.timeouts.group)"
                )
            # An engine's own words explain more than the trainer's timeout that they cause.
            for future in sorted(done, key=lambda f: f is futures[0]):
                if (error := future.exception()) is not None:
                    raise error

    def _dissolve(self, live: _Live) -> None:
        """Have everybody leave at once: a broadcast that still runs ends when the first peer is gone."""
        leaving: list[Future[None]] = [start(partial(e.leave_group, live.inits[e.url]), "group") for e in live.engines]
        leaving.append(start(live.group.destroy, "group"))
        wait(leaving, timeout=_LEAVE_SECONDS)


def _refuse_what_gloo_lacks(run: Run) -> None:
    """Where buckets travel in the dtype of their tensors, gloo must know it; else the engines fail in the broadcast."""
    if (run.wire.mixed and not run.wire.per_tensor) or run.device.type == "cuda":
        return  # as bytes, or by NCCL
    lacking = sorted({dtype_name(t.dtype) for t in run.current_plan.tensors if t.dtype not in _GLOO_DTYPES})
    if lacking:
        way_out = "transport=ipc"
        if run.wire.mixed:
            way_out += ", or backend.load_format=flattened_bucket"
        if run.backend.quantizes_on_load:
            way_out += ", or quantize=engine, which leaves it to the engine"
        raise ConfigError(
            f"transport=nccl on CPU: {run.backend.name} receives tensors in their own dtype, and gloo cannot broadcast "
            f"{', '.join(lacking)}; use {way_out}"
        )


def _broadcast_all(groups: list[Group], parts: list[torch.Tensor]) -> None:
    if len(groups) == 1:
        _broadcast(groups[0], parts)
        return
    futures = [start(partial(_broadcast, g, parts), "group") for g in groups]
    wait(futures)
    errors = [error for f in futures if (error := f.exception()) is not None]
    if errors:
        raise errors[0]


def _broadcast(group: Group, parts: list[torch.Tensor]) -> None:
    for part in parts:
        group.broadcast(part)
