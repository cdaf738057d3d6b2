"""What a transport tells an adapter about one bucket or group; adapters turn these into their engine's requests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class SharedSlots:
    """The slots of an ipc ring, for receivers that map them once.

    `segments` are names of shared-memory segments (CPU), `handles` per slot the CUDA IPC handles of every exporting GPU.
    """

    slot_bytes: int
    segments: list[str] = field(default_factory=list)
    handles: list[list[dict[str, Any]]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class IpcMessage:
    """Shared memory or CUDA IPC: per engine URL, one encoded payload per engine rank, made by the adapter's `encode_ipc`."""

    payloads: dict[str, list[str]]


@dataclass(frozen=True, slots=True)
class GroupMessage:
    """The bytes will be broadcast from rank 0 of a process group: its name, by engine URL."""

    group_names: dict[str, str]


@dataclass(frozen=True, slots=True)
class DiskMessage:
    """One file of a version folder, written but not yet published."""

    file: str


@dataclass(frozen=True, slots=True)
class GroupInit:
    """How an engine joins a process group in which the trainer is rank 0.

    Engine rank r of this engine joins as `rank_offset + r`; `world_size` counts the trainer.
    """

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str
    backend: str
    timeout: float
    bucket_bytes: int = 0
    unique_id: str | None = None
