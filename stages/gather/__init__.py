"""gather_params: the trainer's parameters as a stream of groups of HF-named, full tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path

import torch

from stages.base import Stage
from stages.errors import ConfigError
from stages.flow import Group, GroupSpec, TensorSpec, dtype_of
from stages.gather.checkpoint import Checkpoint, CheckpointReader
from stages.gather.module import Leaf, leaves_of
from stages.gather.names import fusion_key, layer_order, match_dtype
from stages.run import Run

__all__ = ["GatherParams"]


class GatherParams(Stage):
    """Reads a torch module or an HF checkpoint folder, whatever `update()` was given.

    `dtype` is the dtype on the wire of floating-point tensors: "auto" takes the engine's own per tensor where its checkpoint
    is known and leaves the rest as they are. `keep_dtype` maps glob patterns of names to dtypes that win over it: a router's
    correction bias must stay float32, or tokens go to other experts. The cast itself happens while packing.
    """

    produces = Group
    phase = "gather"

    def __init__(self, dtype: str = "auto", keep_dtype: dict[str, str] | None = None) -> None:
        self.dtype = dtype
        self.keep_dtype = {"*e_score_correction_bias": "float32"} if keep_dtype is None else keep_dtype
        for name in (*(d for d in (dtype,) if d != "auto"), *self.keep_dtype.values()):
            try:
                dtype_of(name)
            except ValueError as error:
                raise ConfigError(f"gather: dtype {error}") from error
        self._source: _ModuleSource | _FolderSource | None = None
        self._readers: dict[str, Callable[[], torch.Tensor]] = {}

    def plan(self, specs: Iterable[GroupSpec], run: Run) -> Iterable[GroupSpec]:
        self._source = source_of(run.model)
        leaves, aliases = self._source.leaves()
        if not leaves:
            raise ConfigError("the model has no tensors to send")
        self._readers = {leaf.name: leaf.read for leaf in leaves}
        return group_specs([self._wire_spec(leaf, run) for leaf in leaves], aliases)

    def prepare(self, run: Run) -> None:
        if isinstance(run.model, torch.nn.Module):
            for name, tensor in (*run.model.named_parameters(), *run.model.named_buffers()):
                if tensor.is_meta:
                    raise ConfigError(f"{name} is on the meta device and has no values to send; load the weights first")

    def __call__(self, items: Iterator[None], run: Run) -> Iterator[Group]:
        if run.device.type == "cuda":
            torch.cuda.current_stream(run.device).synchronize()  # the optimizer step may still be running
        assert self._source is not None, "plan() runs before every update"
        readers = self._readers
        with self._source:
            for spec in run.gathered:
                yield Group(spec, tuple(readers[t.name]() for t in spec.tensors))

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
    """Fused sets as groups, in layer order; an alias goes with the tensor that it shares. Pure."""
    sets: dict[str, list[TensorSpec]] = {}
    for spec in specs:
        sets.setdefault(fusion_key(spec.name), []).append(spec)
    ordered = sorted(sets.values(), key=lambda tensors: layer_order(tensors[0].name))
    by_target: dict[str, list[tuple[str, str]]] = {}
    for alias, target in aliases:
        by_target.setdefault(target, []).append((alias, target))
    return [GroupSpec(tuple(ts), tuple(a for t in ts for a in by_target.get(t.name, ()))) for ts in ordered]


def source_of(model: object) -> _ModuleSource | _FolderSource:
    """What `update()` was given, as something to read. Raises ConfigError for anything else."""
    if isinstance(model, torch.nn.Module):
        return _ModuleSource(model)
    if isinstance(model, str | Path):
        return _FolderSource(Checkpoint(model))
    if isinstance(model, Checkpoint):
        return _FolderSource(model)
    raise ConfigError(f"update() takes a torch.nn.Module or an HF checkpoint folder, not {type(model).__name__}")


class _ModuleSource:
    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module

    def leaves(self) -> tuple[list[Leaf], list[tuple[str, str]]]:
        return leaves_of(self._module)

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None


class _FolderSource:
    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._reader: CheckpointReader = checkpoint.reader()
        self._stack = ExitStack()

    def leaves(self) -> tuple[list[Leaf], list[tuple[str, str]]]:
        leaves = [
            Leaf(s.name, s.dtype, s.shape, lambda n=s.name: self._reader.read(n))  # type: ignore[misc]
            for s in self._checkpoint.specs.values()
        ]
        names = self._checkpoint.tensors
        embeddings = [n for n in names if n.endswith("embed_tokens.weight")]
        if self._checkpoint.tied and embeddings and "lm_head.weight" not in names:
            return leaves, [("lm_head.weight", min(embeddings, key=len))]  # layers may have embeddings of their own
        return leaves, []

    def __enter__(self) -> None:
        self._stack.enter_context(self._reader)

    def __exit__(self, *_: object) -> None:
        self._stack.close()
