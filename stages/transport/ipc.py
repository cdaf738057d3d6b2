"""ipc: engines on this host read the buckets where they lie: POSIX shared memory on CPU, CUDA IPC handles on GPU.

Sender: a ring of persistent slots, filled by bucket. Receiver: SGLang and LMDeploy open the handle in the payload by torch's
own means; our own receiver (`stages.receiver`) maps all slots once and keeps them. A slot may be refilled when the engine has
answered for it: LMDeploy on GPU records an event, vLLM and our receiver answer after copying, SGLang on GPU gets a fresh copy.
"""

from __future__ import annotations

import os
from concurrent.futures import wait
from typing import Any

import torch

from stages.backends.base import Engine
from stages.errors import ConfigError
from stages.flow import Bucket, Shipment, Slot
from stages.run import Run
from stages.threads import at_once, start
from stages.transport import cuda_ipc
from stages.transport.base import Transport
from stages.transport.messages import IpcMessage, SharedSlots
from stages.transport.shm import Segment

_DETACH_SECONDS = 5.0


class Ipc(Transport):
    """Shared memory (CPU) or CUDA IPC (GPU, each trainer rank colocated with its engine rank) on one host."""

    name = "ipc"

    def __init__(self) -> None:
        self._segments: list[Segment] = []
        self._attached: dict[Engine, int] = {}  # generation of segments that it knows
        self._generation = 0
        self._slot_bytes = 0
        self._memories: list[torch.Tensor] = []
        self._handles: list[list[dict[str, Any]]] = []
        self._exported = 0

    def open(self, run: Run) -> None:
        if run.device.type == "cuda":
            refuse_expandable_segments(os.environ)

    def close(self) -> None:
        """Segments go at once; engines that mapped them are asked to let go, too, but not waited for for long."""
        wait([start(e.detach, "detach") for e in self._attached], timeout=_DETACH_SECONDS)
        self._attached.clear()
        self._free()

    def _free(self) -> None:
        for segment in self._segments:
            segment.unlink()
        self._segments = []
        self._memories, self._handles = [], []

    def holds_bytes(self, run: Run) -> bool:
        return run.device.type == "cuda" or run.comm.is_head

    def allocate(self, count: int, nbytes: int, run: Run) -> list[Slot]:
        self._free()
        self._generation += 1
        self._slot_bytes = nbytes
        if run.device.type != "cpu":
            slots = super().allocate(count, nbytes, run)
            self._memories = [s.memory for s in slots]
            return slots
        slots = []
        for index in range(count):
            segment = Segment(nbytes)
            self._segments.append(segment)
            slots.append(Slot(index, segment.memory, segment))
        return slots

    def prepare(self, run: Run) -> None:
        if self._exported != self._generation and run.device.type == "cuda":
            mine = [cuda_ipc.export(memory) for memory in self._memories]
            ranks = run.comm.meet("ipc slots", mine)
            self._handles = [list(of_slot) for of_slot in zip(*ranks, strict=True)]
            self._exported = self._generation
        if not run.comm.is_head:
            return
        slots = SharedSlots(self._slot_bytes, [s.name for s in self._segments], self._handles)
        fresh = [e for e in run.engines if self._attached.get(e) != self._generation]
        for engine, attached in zip(fresh, at_once(fresh, lambda e: e.attach(slots), "attach"), strict=True):
            attached.result()
            self._attached[engine] = self._generation

    def leave(self, engine: Engine) -> None:
        self._attached.pop(engine, None)

    def ship(self, bucket: Bucket, run: Run) -> Shipment:
        if run.device.type == "cuda":
            torch.cuda.current_stream(run.device).synchronize()
            return Shipment(bucket, IpcMessage(self._gather(bucket, run)))
        payloads = {}
        if bucket.slot is not None:
            for engine in run.engines:
                payloads[engine.url] = [engine.encode_ipc(bucket, run)] * engine.tp
        return Shipment(bucket, IpcMessage(payloads))

    def _gather(self, bucket: Bucket, run: Run) -> dict[str, list[str]]:
        """Every trainer rank's handle, to the engine rank on the same GPU: engine ranks in order over trainer ranks."""
        first, mine = 0, None
        for engine in run.engines:
            if first <= run.comm.rank < first + engine.tp:
                mine = engine.encode_ipc(bucket, run)
            first += engine.tp
        if first > run.comm.world_size:
            raise ConfigError(
                f"transport=ipc on GPU needs one trainer rank per engine rank: the engines have {first} ranks, the trainer "
                f"{run.comm.world_size}; use transport=nccl for engines on other GPUs"
            )
        everyone = run.comm.meet("ipc handles", mine or "")
        payloads, first = {}, 0
        for engine in run.engines:
            payloads[engine.url] = everyone[first : first + engine.tp]
            first += engine.tp
        return payloads


def refuse_expandable_segments(environ: dict[str, str] | os._Environ[str]) -> None:
    """CUDA memory from expandable segments cannot be shared by handle. Raises ConfigError that names the variable."""
    for variable in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"):
        for setting in environ.get(variable, "").split(","):
            key, _, value = setting.partition(":")
            if key.strip() == "expandable_segments" and value.strip().lower() in ("true", "1"):
                raise ConfigError(
                    f"{variable} has expandable_segments:True, with which CUDA IPC handles cannot be opened by another "
                    f"process; remove it from the trainer's environment (and the engines'), or use transport=nccl"
                )
