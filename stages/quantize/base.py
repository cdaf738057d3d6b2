"""The stage that all formats share: what becomes of each group, where the results live, what is refused."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from stages.base import Stage
from stages.errors import ConfigError, PlanMismatch, WeightstreamError
from stages.flow import Group, GroupSpec, TensorSpec, dtype_name
from stages.gather import source_of
from stages.quantize.modules import Rules, check_whole
from stages.quantize.scheme import Scheme, scheme_of
from stages.quantize.strips import Scratch, Strips, column_peaks, first_nonfinite, rows_per_piece
from stages.run import Run

log = logging.getLogger("weightstream")

_ALIGN = 256


class NonFinite(WeightstreamError):
    """A weight holds NaN or infinity, of which quantizing would make a block of zeros or of NaN."""

    def __init__(self, name: str, index: tuple[int, ...], value: float) -> None:
        self.name, self.index = name, index
        super().__init__(
            f"{name}{list(index)} is {value}; quantizing would spoil the whole block around it. "
            f"Look at the last optimizer step; quantize.allow_nonfinite=true sends it all the same"
        )


@dataclass(frozen=True, slots=True)
class Weight:
    """One weight to quantize. `dtype` is what its values are rounded to first, where the tensor is wider."""

    name: str
    tensor: torch.Tensor
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class _Step:
    """What becomes of one group: `parts[i]` are the specs made of tensor i, or None for one that passes as it is."""

    out: GroupSpec
    parts: tuple[tuple[TensorSpec, ...] | None, ...]

    @property
    def nbytes(self) -> int:
        return sum(_up(spec.nbytes) for parts in self.parts for spec in parts or ())


class Quantize(Stage):
    """Base of the formats. Which modules: those of the engine's own lists, less `skip`, which takes names, prefixes, runs
    of whole segments and `re:` expressions.

    NaN and infinity are refused: with `look_ahead` by reading every weight once before the engines are paused, else when
    they come by, with earlier buckets already sent. Results live in one buffer of the size of the largest group, used
    anew for every group; besides that there is the scratch memory of one strip per thread.
    """

    consumes = Group
    produces = Group
    phase = "quantize"
    format: ClassVar[str]  # as in conf/quantize and Scheme

    def __init__(
        self, skip: Sequence[str] | None = None, allow_nonfinite: bool = False, look_ahead: bool = True
    ) -> None:
        self.skip = tuple(skip or ())
        self.allow_nonfinite = allow_nonfinite
        self.look_ahead = look_ahead
        self.strips = Strips()
        self._steps: dict[GroupSpec, _Step] = {}
        self._ahead: dict[str, tuple[TensorSpec, tuple[TensorSpec, ...]]] = {}  # weights that gather quantizes
        self._buffers: dict[torch.device, torch.Tensor] = {}
        self._told: set[str] = set()

    # -- a format ---------------------------------------------------------------------------------------
    def adopt(self, scheme: Scheme) -> None:
        """Take names and sizes from the engine's scheme. Raises ConfigError where a setting contradicts it."""

    @abstractmethod
    def outputs(self, weight: TensorSpec) -> tuple[TensorSpec, ...]:
        """What is made of a weight `X.weight`, the codes first. Raises ConfigError for a shape that cannot be held."""

    @abstractmethod
    def encode(self, weights: Sequence[Weight], made: Sequence[tuple[torch.Tensor, ...]]) -> None:
        """Fill `made`, shaped as `outputs` said, from the weights of one group. Calls `check` for each weight."""

    @abstractmethod
    def block_of(self, shape: tuple[int, int]) -> tuple[int, int]:
        """The part of a weight that one scale depends on: see `shards_quantize_alike`."""

    # -- planning ---------------------------------------------------------------------------------------
    def plan(self, specs: Iterable[GroupSpec], run: Run) -> Iterable[GroupSpec]:
        specs = tuple(specs)
        rules = replace(self._rules(run), skipped=self.skip)
        picked = {t.name: rules.wants(_module(t.name)) for spec in specs for t in spec.tensors if _eligible(t)}
        check_whole((_module(name), wanted) for name, wanted in picked.items())
        self._steps = {spec: self._step(spec, picked, run.expected or {}) for spec in specs}
        self._buffers.clear()
        return [step.out for step in self._steps.values()]

    def ahead(
        self, weights: Iterable[TensorSpec], run: Run
    ) -> Mapping[str, tuple[tuple[int, int], tuple[TensorSpec, ...]]]:
        """What gather may make of shares of these weights, see stages.gather.ahead; other formats need whole weights."""
        rules = replace(self._rules(run), skipped=self.skip)
        self._ahead = {}
        found = {}
        for spec in weights:
            if not _eligible(spec) or not rules.wants(_module(spec.name)):
                continue
            rows, columns = spec.shape
            block = self.block_of((rows, columns))
            made = tuple(self._as_expected(out, run.expected or {}) for out in self.outputs(spec))
            grid = (-(-rows // block[0]), -(-columns // block[1]))
            if [out.shape for out in made] == [spec.shape, grid]:
                found[spec.name] = block, made
                self._ahead[spec.name] = spec, made
        return found

    def encode_share(self, name: str, share: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """Codes and scales of rows and columns of a weight. Raises NonFinite."""
        _, (codes, scales) = self._ahead[name]
        block = self.block_of((share.shape[0], share.shape[1]))
        grid = [-(-size // step) for size, step in zip(share.shape, block, strict=True)]
        made = (
            torch.empty(share.shape, dtype=codes.dtype, device=share.device),
            torch.empty(grid, dtype=scales.dtype, device=share.device),
        )
        with torch.no_grad():
            self.encode([Weight(name, share, dtype)], [made])
        return made

    def _rules(self, run: Run) -> Rules:
        scheme = scheme_of(run.reference) if run.reference is not None else None
        if scheme is None:
            return Rules()
        if scheme.format != self.format:
            raise ConfigError(
                f"quantize={self.format}: the engine's checkpoint {run.reference} is quantized as {scheme.format}; "
                f"choose quantize=auto or quantize={scheme.format}"
            )
        self.adopt(scheme)
        return scheme.rules

    def _step(self, group: GroupSpec, picked: dict[str, bool], expected: dict[str, TensorSpec]) -> _Step:
        parts = tuple(
            tuple(self._as_expected(spec, expected) for spec in self.outputs(t)) if picked.get(t.name) else None
            for t in group.tensors
        )
        tensors = tuple(spec for t, made in zip(group.tensors, parts, strict=True) for spec in made or (t,))
        aliases = []
        for alias, name in group.aliases:
            made = next((m for t, m in zip(group.tensors, parts, strict=True) if t.name == name), None)
            if made is None:
                aliases.append((alias, name))
                continue
            aliases += [(_module(alias) + spec.name.removeprefix(_module(name)), spec.name) for spec in made]
        return _Step(GroupSpec(tensors, tuple(aliases)), parts)

    def _as_expected(self, spec: TensorSpec, expected: dict[str, TensorSpec]) -> TensorSpec:
        """Scales as the engine's checkpoint holds them: [1] or no dimension, float32 or bfloat16, int32 or int64."""
        theirs = expected.get(spec.name)
        if theirs is None or spec.name.endswith((".weight", ".weight_packed")):
            return spec
        same = [n for n in spec.shape if n != 1] == [n for n in theirs.shape if n != 1]
        shape = theirs.shape if same else spec.shape
        wide = spec.dtype.itemsize > 1 and theirs.dtype.itemsize > 1
        cast = wide and spec.dtype.is_floating_point == theirs.dtype.is_floating_point
        if cast and theirs.dtype != spec.dtype:
            self._tell(
                f"quantize: {spec.name} and its like are {dtype_name(theirs.dtype)}, as in the engine's checkpoint"
            )
        return TensorSpec(spec.name, theirs.dtype if cast else spec.dtype, shape)

    def _tell(self, message: str) -> None:
        kind = message.rpartition(".")[2]
        if kind not in self._told:
            self._told.add(kind)
            log.info(message)

    # -- streaming --------------------------------------------------------------------------------------
    def prepare(self, run: Run) -> None:
        """Find NaN and infinity before anything is sent. Weights that a stage renames are looked at as they come by."""
        if self.allow_nonfinite or not self.look_ahead:
            return
        wanted = {
            t.name: t.dtype
            for group, step in self._steps.items()
            for t, parts in zip(group.tensors, step.parts, strict=True)
            if parts is not None
        } | {name: spec.dtype for name, (spec, _) in self._ahead.items()}
        source = source_of(run.model)
        with torch.no_grad(), source:
            for name, share in source.shares(run.comm.rank):
                if name in wanted and share.numel():
                    weight = Weight(name, share.reshape(-1, share.shape[-1]), wanted[name])
                    self.check(weight, self.peak(weight))

    def __call__(self, items: Iterator[Group], run: Run) -> Iterator[Group]:
        needed = run.transport.holds_bytes(run)
        for group in items:
            step = self._steps.get(group.spec)
            if step is None:
                raise PlanMismatch(f"group {[t.name for t in group.spec.tensors]} streamed by but was not planned")
            if not step.nbytes:
                yield Group(step.out, group.tensors)
                continue
            picked = [i for i, parts in enumerate(step.parts) if parts is not None]
            made = self._places(step, group.tensors[picked[0]].device)
            if needed:
                weights = [self._weight(group, i) for i in picked]
                with torch.no_grad():
                    self.encode(weights, [made[i] for i in picked])
            tensors = (part for i, t in enumerate(group.tensors) for part in made.get(i, (t,)))
            yield Group(step.out, tuple(tensors))

    def kept(self, purpose: str, shape: Sequence[int], device: torch.device) -> torch.Tensor:
        """float32 memory for what is kept of a whole weight, such as its largest magnitudes."""
        return self.strips.scratch.get(purpose, tuple(shape), torch.float32, device)

    def peak(self, weight: Weight) -> torch.Tensor:
        """Largest magnitude of a whole weight, 0-dim float32; infinite or NaN where it holds such a value."""
        tensor, step = weight.tensor, rows_per_piece(weight.tensor.shape[1])
        found = self.kept("peaks", [-(-tensor.shape[0] // step)], tensor.device)

        def look(number: int, rows: slice, scratch: Scratch) -> None:
            found[number] = column_peaks(tensor[rows], weight.dtype, scratch).amax()

        self.strips.each(tensor, step, look)
        return found.amax()

    def check(self, weight: Weight, peaks: torch.Tensor) -> None:
        """Raise NonFinite unless the largest magnitudes found in the weight are finite."""
        if self.allow_nonfinite or bool(torch.isfinite(peaks).all()):
            return
        found = first_nonfinite(weight.tensor, weight.dtype)
        if found is not None:
            raise NonFinite(weight.name, *found)

    def close(self) -> None:
        self._buffers.clear()
        self.strips.close()

    def _weight(self, group: Group, index: int) -> Weight:
        spec, tensor = group.spec.tensors[index], group.tensors[index]
        if tensor.shape != spec.shape:
            raise PlanMismatch(f"{spec.name}: planned shape {list(spec.shape)}, streamed {list(tensor.shape)}")
        return Weight(spec.name, tensor.detach(), spec.dtype)

    def _places(self, step: _Step, device: torch.device) -> dict[int, tuple[torch.Tensor, ...]]:
        """Where the results of a group go: views of the one buffer, by index of the tensor that they are made of."""
        buffer = self._buffers.get(device)
        if buffer is None:
            size = max(s.nbytes for s in self._steps.values())
            buffer = self._buffers[device] = torch.zeros(size, dtype=torch.uint8, device=device)
        places: dict[int, tuple[torch.Tensor, ...]] = {}
        offset = 0
        for index, parts in enumerate(step.parts):
            views = []
            for spec in parts or ():
                views.append(buffer[offset : offset + spec.nbytes].view(spec.dtype).view(spec.shape))
                offset += _up(spec.nbytes)
            if parts is not None:
                places[index] = tuple(views)
        return places


def _eligible(spec: TensorSpec) -> bool:
    """Only 2-D weights of two bytes and more: biases, norms and what already is quantized pass as they are."""
    return (
        spec.name.endswith(".weight")
        and len(spec.shape) == 2
        and spec.dtype.is_floating_point
        and spec.dtype.itemsize > 1
    )


def _module(name: str) -> str:
    return name.removesuffix(".weight")


def _up(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN
