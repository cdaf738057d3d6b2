"""gather_params: the trainer's parameters as a stream of groups of HF-named, full tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from operator import is_
from pathlib import Path
from typing import Any

import torch

from stages.base import Stage
from stages.bucket import parse_size
from stages.errors import ConfigError
from stages.flow import Group, GroupSpec, TensorSpec, dtype_of
from stages.gather.ahead import Ahead, Encoder
from stages.gather.checkpoint import Checkpoint
from stages.gather.exchange import Exchange
from stages.gather.group import OwnGroup
from stages.gather.layout import Description, Layout, Leaf, digest_of, parse_description, unite
from stages.gather.names import fusion_key, match_dtype, stream_order
from stages.gather.source import FolderSource, ModuleSource, Source, StateSource
from stages.gather.watch import Watch, watch
from stages.run import Run

__all__ = ["GatherParams", "source_of"]


class GatherParams(Stage):
    """Reads a torch module or an HF checkpoint folder, whatever `update()` was given.

    How the module is sharded shows on its parameters. Shares go to the ranks that hold bytes, in batches of whole groups of
    up to `batch` bytes, the next batch under way while this one is consumed; other ranks take part and yield groups
    without bytes. Ranks tell one another what they store when that changes, and agree on its digest at every update.

    `dtype` is the dtype on the wire of floating-point tensors: "auto" takes the engine's own per tensor where its checkpoint
    is known and leaves the rest as they are. `keep_dtype` maps glob patterns of names to dtypes that win over it: a router's
    correction bias must stay float32, or tokens go to other experts. The cast itself happens while packing.

    With an `encoder`, the quantize stage right behind, ranks quantize their shares before they travel wherever that gives
    the same bytes; that time counts as gathering.
    """

    produces = Group
    phase = "gather"

    def __init__(
        self, dtype: str = "auto", keep_dtype: dict[str, str] | None = None, batch: int | str = "128MiB"
    ) -> None:
        self.dtype = dtype
        self.keep_dtype = {"*e_score_correction_bias": "float32"} if keep_dtype is None else keep_dtype
        for name in (*(d for d in (dtype,) if d != "auto"), *self.keep_dtype.values()):
            try:
                dtype_of(name)
            except ValueError as error:
                raise ConfigError(f"gather: dtype {error}") from error
        self.batch = parse_size(batch, "gather.batch")
        self._source: Source | None = None
        self._described = Description()
        self._digest: str | None = None  # of what `_described` says
        self._watch: Watch | None = None
        self._expected: object = None  # what `_described` was made with
        self._agreed: list[tuple[str, bool]] | None = None  # what all ranks said when the layout was made
        self._layout = Layout([], [], {}, ())
        self.encoder: Encoder | None = None
        self._ahead: Ahead | None = None
        self._ahead_of: tuple[object, ...] = ()
        self._specs: tuple[GroupSpec, ...] = ()
        self._specs_of: tuple[object, ...] = (None, None, None)  # what they were made from
        self._exchange: Exchange | None = None
        self._group: OwnGroup | None = None
        self._works: list[Any] = []  # exchanges under way
        self._streaming = False

    def plan(self, specs: Iterable[GroupSpec], run: Run) -> Iterable[GroupSpec]:
        """The groups of the model over all ranks. With more than one rank a collective, like `prepare`."""
        if run.device.type == "cuda":
            torch.cuda.current_stream(run.device).synchronize()  # the optimizer step may still be running
        if self._streaming:
            self._break()
        if self._watch is None or self._expected is not run.expected or not self._watch.same(run.model):
            self._describe(run)
        whole_group = self._agree(run)
        if not self._layout.leaves:
            raise ConfigError("the model has no tensors to send")
        key = (self._layout, run.expected, run.reference)
        if self._exchange is None or not all(map(is_, key, self._specs_of)):
            planned, layout = self._plan(run)
            if self._exchange is None or planned != self._specs:
                self._exchange = Exchange(layout, planned, self.batch, run.comm.rank, run.comm.world_size)
            self._specs, self._specs_of = planned, key
        if self._exchange.collective and not whole_group:
            self._leave()
            self._group = OwnGroup(run)
        if self._group is not None:
            self._group.stop.clear()
        return self._specs

    def prepare(self, run: Run) -> None:
        assert self._exchange is not None, "plan() runs before every update"
        if isinstance(run.model, torch.nn.Module):
            for name, tensor in self._described.tensors.items():
                if tensor.is_meta:
                    raise ConfigError(f"{name} is on the meta device and has no values to send; load the weights first")
        self._exchange.allocate(run.device)

    def __call__(self, items: Iterator[None], run: Run) -> Iterator[Group]:
        assert self._source is not None and self._exchange is not None, "plan() runs before every update"
        self._exchange.allocate(run.device)
        self._streaming = True
        try:
            with self._source:
                tensors = self._described.tensors
                if self._ahead is not None:
                    tensors = self._ahead.tensors(tensors)
                yield from self._exchange.stream(tensors, self._group, self._works)
            self._streaming = False
        finally:
            if self._streaming:
                self._break()

    def abort(self) -> None:
        if self._group is not None:
            self._group.stop.set()

    def close(self) -> None:
        if self._streaming:
            self._break()
        self._leave()
        self._exchange, self._agreed = None, None
        self._source, self._described, self._watch = None, Description(), None
        self._digest, self._expected, self._specs_of = None, None, (None, None, None)

    def _describe(self, run: Run) -> None:
        self._watch = self._digest = None
        self._source = source_of(run.model)
        self._described = self._source.describe(run.comm.rank, run.expected)
        self._expected = run.expected
        self._watch = watch(run.model, self._described)

    def _plan(self, run: Run) -> tuple[tuple[GroupSpec, ...], Layout]:
        """The groups that are streamed, and the layout of what they are put together from."""
        specs = {leaf.name: self._wire_spec(leaf, run) for leaf in self._layout.leaves}
        if self.encoder is None or run.comm.world_size == 1:
            return tuple(group_specs(list(specs.values()), self._layout.aliases)), self._layout
        key = (self._layout, run.expected, run.reference)
        if self._ahead is None or any(a is not b for a, b in zip(key, self._ahead_of, strict=True)):
            self._ahead, self._ahead_of, self._exchange = Ahead(self._layout, specs, self.encoder, run), key, None
        made, layout = self._ahead.made, self._ahead.layout
        wire = [made.get(leaf.name) or specs[leaf.name] for leaf in layout.leaves]
        return tuple(group_specs(wire, layout.aliases)), layout

    def _agree(self, run: Run) -> bool:
        """Bring `self._layout` up to date with all ranks. Returns whether all of them still have the process group."""
        comm = run.comm
        if self._digest is None:
            self._digest = digest_of(self._described.text())
        digest = self._digest
        mine = [digest, run.transport.holds_bytes(run), self._group is not None]
        all_said: list[list[Any]] = comm.meet("what the ranks store", mine)
        said: list[tuple[str, bool]] = [(digest, holds) for digest, holds, _ in all_said]
        if said != self._agreed:
            first: dict[str, list[int]] = {}
            for rank, (theirs, _) in enumerate(said):
                first.setdefault(theirs, []).append(rank)
            texts = comm.meet("layouts", self._described.text() if first[digest][0] == comm.rank else "")
            seen = [(parse_description(texts[ranks[0]]), ranks) for ranks in first.values()]
            self._layout = unite(seen, tuple(rank for rank, (_, holds) in enumerate(said) if holds))
            self._agreed, self._exchange = said, None
        return all(ready for *_, ready in all_said)

    def _break(self) -> None:
        """A stream ended early: other ranks may wait in an exchange that this one will not join, or the other way round."""
        group, self._group = self._group, None
        works, self._works = self._works, []
        self._streaming = False
        if group is not None:
            group.abandon(works)
        if self._exchange is not None and works:
            self._exchange.release()  # what is stuck may still write into them

    def _leave(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()

    def _wire_spec(self, leaf: Leaf, run: Run) -> TensorSpec:
        dtype = leaf.dtype
        if dtype.is_floating_point:
            kept = match_dtype(leaf.name, self.keep_dtype)
            expected = (run.expected or {}).get(leaf.name)
            if kept is not None:
                dtype = dtype_of(kept)
            elif self.dtype != "auto":
                dtype = dtype_of(self.dtype)
            elif expected is not None and expected.dtype.is_floating_point and expected.dtype.itemsize > 1:
                dtype = expected.dtype  # never a cast to fp8: that takes scales, which is quantize's work
        return TensorSpec(leaf.name, dtype, leaf.shape)


def group_specs(specs: list[TensorSpec], aliases: list[tuple[str, str]]) -> list[GroupSpec]:
    """Fused sets as groups, dense ones in layer order before experts; an alias goes with the tensor that it shares. Pure."""
    sets: dict[str, list[TensorSpec]] = {}
    for spec in specs:
        sets.setdefault(fusion_key(spec.name), []).append(spec)
    ordered = sorted(sets.values(), key=lambda tensors: stream_order(tensors[0].name))
    by_target: dict[str, list[tuple[str, str]]] = {}
    for alias, target in aliases:
        by_target.setdefault(target, []).append((alias, target))
    return [GroupSpec(tuple(ts), tuple(a for t in ts for a in by_target.get(t.name, ()))) for ts in ordered]


def source_of(model: object) -> Source:
    """What `update()` was given, as something to read. Raises ConfigError for anything else."""
    if isinstance(model, torch.nn.Module):
        return ModuleSource(model)
    if isinstance(model, list | tuple) and model and all(isinstance(m, torch.nn.Module) for m in model):
        return ModuleSource(*model)
    if isinstance(model, str | Path):
        return FolderSource(Checkpoint(model))
    if isinstance(model, Checkpoint):
        return FolderSource(model)
    if isinstance(model, Mapping) and all(isinstance(t, torch.Tensor) for t in model.values()):
        return StateSource(model)
    raise ConfigError(
        f"update() takes a torch.nn.Module, an HF checkpoint folder or a mapping of HF names to tensors, not "
        f"{type(model).__name__}"
    )
