"""The transport contract: owns the memory of buckets and moves their bytes; knows no engine's endpoints."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

import torch

from stages.base import Stage
from stages.flow import Bucket, Shipment, Slot

if TYPE_CHECKING:
    from stages.backends.base import Engine
    from stages.run import Run


class Transport(Stage):
    """Turns buckets into shipments.

    `holds_bytes` says whether this rank packs buckets at all; other ranks only follow the stream. `leave` forgets an engine
    (it left, restarted or failed): what was set up with it is made anew at the next `prepare`.
    """

    consumes = Bucket
    produces = Shipment
    phase = "wire"
    name: ClassVar[str]

    def holds_bytes(self, run: Run) -> bool:
        """True on the ranks whose memory the engines read from. The default is rank 0 alone."""
        return run.comm.is_head

    def allocate(self, count: int, nbytes: int, run: Run) -> list[Slot]:
        """`count` slots of `nbytes`, touched once. Replaces, and frees, the slots of an earlier call."""
        return [Slot(i, torch.zeros(nbytes, dtype=torch.uint8, device=run.device)) for i in range(count)]

    def check(self, run: Run) -> None:
        """Raise ConfigError where this transport cannot carry `run.plan`. Pure."""

    def ship(self, bucket: Bucket, run: Run) -> Shipment:
        """One bucket as the engines will get it."""
        raise NotImplementedError

    def leave(self, engine: Engine) -> None:
        """Forget what was set up with this engine."""

    def last_version(self) -> int:
        """The highest numbered version that earlier runs left here; default numbers go on from it."""
        return 0

    def publish(self, run: Run) -> None:
        """All buckets were acknowledged: make them visible, where that is a step of its own (disk)."""

    def discard(self, run: Run) -> None:
        """The update failed: drop what it left behind."""

    def __call__(self, items: Iterator[Bucket], run: Run) -> Iterator[Shipment]:
        for bucket in items:
            yield self.ship(bucket, run)
