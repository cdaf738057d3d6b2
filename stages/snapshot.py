"""snapshot: keeps the last committed versions in host memory: an old actor for the loss, or a version to send once more."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from stages.base import Stage
from stages.errors import ConfigError
from stages.flow import Group, GroupSpec
from stages.run import Run

_ALIGN = 64


class _Copy:
    """One version: a flat buffer, and the tensors in it by name."""

    def __init__(self, specs: tuple[GroupSpec, ...], pinned: bool) -> None:
        self.specs = specs
        offsets, size = [], 0
        tensors = [t for spec in specs for t in spec.tensors]
        for t in tensors:
            offsets.append(size)
            size += -(-t.nbytes // _ALIGN) * _ALIGN
        memory = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        self.tensors = {
            t.name: memory[at : at + t.nbytes].view(t.dtype).view(t.shape)
            for t, at in zip(tensors, offsets, strict=True)
        }

    def fill(self, group: Group) -> None:
        for spec, tensor in zip(group.spec.tensors, group.tensors, strict=True):
            self.tensors[spec.name].copy_(tensor, non_blocking=True)


class Snapshot(Stage):
    """Copies every group as it passes, in its dtype on the wire, and keeps the last `keep` versions that were committed.

    Stands anywhere between gather_params and bucket: before quantize it keeps wide weights. Takes `keep` + 1 times the model
    in host memory on each rank that packs buckets (rank 0; on GPU with transport=ipc all), pinned for GPUs, allocated once.
    """

    consumes = Group
    produces = Group
    phase = "gather"

    def __init__(self, keep: int = 1) -> None:
        if keep < 1:
            raise ConfigError(f"snapshot.keep: {keep} must be at least 1; leave snapshot out of recipe.stages instead")
        self.keep = keep
        self._specs: tuple[GroupSpec, ...] = ()
        self._kept: dict[str, _Copy] = {}  # oldest first
        self._filling: _Copy | None = None  # from prepare until the update has ended
        self._spare: _Copy | None = None

    @property
    def versions(self) -> list[str]:
        """What is kept, oldest first."""
        return list(self._kept)

    def tensors(self, version: str) -> dict[str, torch.Tensor]:
        """HF name -> tensor on the CPU, tied names too; theirs is the memory of the stage, overwritten `keep` updates later.

        Raises ConfigError for a version that is not kept.
        """
        if version not in self._kept:
            raise ConfigError(f"version {version} is not kept by snapshot; it has {self.versions} (snapshot.keep)")
        kept = self._kept[version]
        ties = {alias: kept.tensors[name] for spec in kept.specs for alias, name in spec.aliases}
        return kept.tensors | ties

    def plan(self, specs: Iterable[GroupSpec], run: Run) -> Iterable[GroupSpec]:
        self._specs = tuple(specs)
        return self._specs

    def prepare(self, run: Run) -> None:
        specs = self._specs if run.transport.holds_bytes(run) else ()
        if self._spare is None or self._spare.specs != specs:
            self._spare = _Copy(specs, pinned=run.device.type == "cuda")
        self._filling = self._spare

    def __call__(self, items: Iterator[Group], run: Run) -> Iterator[Group]:
        filling = self._filling
        for group in items:
            if filling is not None and filling.tensors:
                filling.fill(group)
            yield group
        if filling is not None and run.device.type == "cuda":
            torch.cuda.current_stream(run.device).synchronize()

    def committed(self, version: str) -> None:
        assert self._filling is not None, "prepare() runs before every update"
        self._spare = self._kept.pop(version, None)
        self._kept[version], self._filling = self._filling, None
        while len(self._kept) > self.keep:
            self._spare = self._kept.pop(next(iter(self._kept)))

    def aborted(self) -> None:
        self._filling = None
