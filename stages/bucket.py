"""bucket: pack groups of tensors into the fixed slots of a ring, after a plan made once."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch

from stages.base import Stage
from stages.digest import PIECE, RunningDigest
from stages.errors import ConfigError, PlanMismatch
from stages.flow import Bucket as BucketItem
from stages.flow import BucketLayout, Entry, Group, GroupSpec, Plan, Slot, TensorSpec, dtype_name
from stages.ring import Ring
from stages.run import Run, Wire

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_size(size: int | str, setting: str = "bucket.capacity") -> int:
    """`"512MiB"`, `"1.5 GB"` or a number of bytes -> bytes. Raises ConfigError, naming the setting and the value."""
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([a-zA-Z]*)\s*", str(size))
    unit = (match[2] or "B").upper() if match else ""
    if match is None or unit not in _UNITS:
        raise ConfigError(f"{setting}: {size!r} is not a size; write for instance 64MiB, 1GB or 1048576")
    return int(float(match[1]) * _UNITS[unit])


class Bucket(Stage):
    """Packs groups into buckets of at most `capacity` bytes, each in one of `slots` buffers of the transport.

    A tensor or group larger than `capacity` gets slots of its own size where the engine decodes whole tensors, and is cut
    across buckets where our own receiver does. Digests are taken where the receiver checks them.
    """

    consumes = Group
    produces = BucketItem
    phase = "pack"

    def __init__(self, capacity: int | str = "64MiB", slots: int = 2) -> None:
        self.capacity = parse_size(capacity)
        self.slots = slots
        if self.capacity < 1:
            raise ConfigError(f"bucket.capacity: {capacity!r} must be at least one byte")
        if slots < 1:
            raise ConfigError(f"bucket.slots: {slots} must be at least 1 (2 overlap packing and sending)")
        self._ring: Ring | None = None
        self._slot_bytes = 0
        self._steps: list[list[_Copy]] = []
        self._planned: Plan | None = None

    def plan(self, specs: Iterable[GroupSpec], run: Run) -> Iterable[GroupSpec]:
        specs = tuple(specs)
        self._planned = make_plan(specs, self.capacity, run.wire)
        run.plan = self._planned
        return specs

    def prepare(self, run: Run) -> None:
        plan = run.current_plan
        if plan is self._planned:
            self._steps = _copies_by_group(plan)
            self._planned = None
        if not run.transport.holds_bytes(run):
            return
        need = plan.largest_bucket
        count = self.slots + _open_at_once(plan, run.wire) - 1
        if self._ring is None or need > self._slot_bytes or count > len(self._ring.slots):
            self.close()
            size = max(need, min(self.capacity, plan.nbytes))
            self._ring = Ring(run.transport.allocate(count, size, run))
            self._slot_bytes = size
        self._ring.reset()

    def close(self) -> None:
        ring, self._ring, self._slot_bytes = self._ring, None, 0
        if ring is not None:
            ring.abort()

    def abort(self) -> None:
        """Wake whoever waits for a slot."""
        if self._ring is not None:
            self._ring.abort()

    def __call__(self, items: Iterator[Group], run: Run) -> Iterator[BucketItem]:
        plan = run.current_plan
        filler = _Filler(plan, self._ring, run)
        try:
            due = zip(plan.groups, self._steps, strict=True)
            for group in items:
                spec, steps = next(due, (None, []))
                if (group.spec is not spec and group.spec != spec) or len(group.tensors) != len(group.spec.tensors):
                    raise PlanMismatch(_unplanned(group, spec))
                for step in steps:
                    if filler.add(group.tensors[step.index], step):
                        yield from filler.complete()
            yield from filler.finish()
        finally:
            filler.drop()


@dataclass(frozen=True, slots=True)
class _Copy:
    """Bytes `start .. start + nbytes` of tensor `index` of a group, which is `spec`, go to `offset` of bucket `bucket`."""

    index: int
    bucket: int
    offset: int
    nbytes: int
    start: int
    spec: TensorSpec
    dtype: torch.dtype
    shape: tuple[int, ...]


class _Open:
    """A bucket that is being filled: its slot, and the digest of what has been written."""

    __slots__ = ("_address", "_update", "_view", "digest", "lease", "on_cpu", "slot")

    def __init__(self, slot: Slot, hashed: bool) -> None:
        self.slot, self.lease = slot, slot.lease
        self.on_cpu = slot.memory.device.type == "cpu"
        self.digest = RunningDigest() if hashed else None
        self._update = None if self.digest is None else self.digest.update
        self._address = slot.address
        self._view = slot.view if hashed else memoryview(b"")

    def copy(self, offset: int, source: int, nbytes: int) -> None:
        """memmove drops the GIL and beats torch's copy_ by half on large blocks. Hashed while it is in the cache."""
        target, update, view = self._address + offset, self._update, self._view
        if update is None:
            ctypes.memmove(target, source, nbytes)
        elif nbytes <= PIECE:
            ctypes.memmove(target, source, nbytes)
            update(view[offset : offset + nbytes])
        else:
            for start in range(0, nbytes, PIECE):
                size = min(PIECE, nbytes - start)
                ctypes.memmove(target + start, source + start, size)
                update(view[offset + start : offset + start + size])

    def cast(self, tensor: torch.Tensor, step: _Copy) -> None:
        """A casting and compacting copy."""
        if step.nbytes == 0:
            return
        target = self.slot.memory[step.offset : step.offset + step.nbytes].view(step.dtype)
        if step.nbytes == step.spec.nbytes:
            target.view(step.shape).copy_(tensor)
        else:  # a piece of a tensor that has to be cast or compacted: whole items, by the plan's cuts
            item = step.dtype.itemsize
            target.copy_(tensor.reshape(-1)[step.start // item : (step.start + step.nbytes) // item])
        if self._update is not None:
            self._update(self._view[step.offset : step.offset + step.nbytes])


class _Filler:
    """Fills slots in the order of the plan. Buckets are complete in order, since the plan follows the groups."""

    def __init__(self, plan: Plan, ring: Ring | None, run: Run) -> None:
        self._plan, self._ring, self._run = plan, ring, run
        # Only where tensors are packed in the order of their entries; a bucket on disk is hashed as it is written.
        self._hashed = run.integrity and run.wire.digest and run.wire.split and run.device.type == "cpu"
        self._open: dict[int, _Open] = {}
        self._left = [len(b.entries) for b in plan.buckets]
        self._done = 0

    def add(self, tensor: torch.Tensor, step: _Copy) -> bool:
        """Write one piece of the stream. Returns whether the next bucket is full."""
        same, bucket = tensor.dtype is step.dtype, step.bucket
        if tensor.shape != step.shape or not (same or _castable(tensor.dtype, step.dtype)):
            streamed = f"{dtype_name(tensor.dtype)}{list(tensor.shape)}"
            raise PlanMismatch(f"planned was {step.spec}, streamed was {streamed}")
        if self._ring is not None:
            filling = self._open.get(bucket)
            if filling is None:
                filling = self._open[bucket] = _Open(self._ring.acquire(self._run.timeouts.put), self._hashed)
            if same and filling.on_cpu and tensor.is_cpu and tensor.is_contiguous():
                filling.copy(step.offset, tensor.data_ptr() + step.start, step.nbytes)
            else:
                filling.cast(tensor, step)
        self._left[bucket] -= 1
        return not self._left[self._done]

    def finish(self) -> Iterator[BucketItem]:
        yield from self.complete()
        if self._done != len(self._plan.buckets):
            missing = [e.spec.name for b in self._plan.buckets[self._done :] for e in b.entries]
            raise PlanMismatch(
                f"the stream ended early: {len(missing)} planned tensors did not come, first {missing[:3]}"
            )

    def drop(self) -> None:
        for filling in self._open.values():
            assert self._ring is not None
            self._ring.release(filling.slot, filling.lease)
        self._open.clear()

    def complete(self) -> Iterator[BucketItem]:
        """The buckets that are full and not given out yet."""
        while self._done < len(self._left) and self._left[self._done] == 0:
            layout = self._plan.buckets[self._done]
            filled = self._open.pop(layout.seq, None)
            self._done += 1
            yield self._bucket(layout, filled)

    def _bucket(self, layout: BucketLayout, filled: _Open | None) -> BucketItem:
        ring = self._ring
        bucket = BucketItem(
            layout=layout,
            plan=self._plan,
            update=self._run.update,
            slot=filled.slot if filled is not None else None,
            digest=filled.digest.value() if filled is not None and filled.digest is not None else None,
            last=layout.seq == len(self._plan.buckets) - 1,
        )
        if filled is not None and ring is not None:
            bucket._release = lambda: ring.release(filled.slot, filled.lease)
        return bucket


def _castable(have: torch.dtype, want: torch.dtype) -> bool:
    """Whether a plain cast is right: between floats, but not to or from fp8, which means nothing without scales."""
    return have == want or all(d.is_floating_point and d.itemsize > 1 for d in (have, want))


def _unplanned(group: Group, due: GroupSpec | None) -> str:
    names, wanted = ([t.name for t in spec.tensors] if spec else "the end" for spec in (group.spec, due))
    if names == wanted:
        return f"group {names} streamed by with other dtypes, shapes, ties or tensors than planned"
    return f"group {names} streamed by where {wanted} was due"


def _copies_by_group(plan: Plan) -> list[list[_Copy]]:
    """What to copy for each group, in the order of the plan's entries, so that no bucket is opened before its turn."""
    sources = {
        name: (group, index)
        for group, spec in enumerate(plan.groups)
        for index, tensor in enumerate(spec.tensors)
        for name in (tensor.name, *(alias for alias, target in spec.aliases if target == tensor.name))
    }
    steps: list[list[_Copy]] = [[] for _ in plan.groups]
    for bucket in plan.buckets:
        for e in bucket.entries:
            group, index = sources[e.spec.name]
            spec = plan.groups[group].tensors[index]
            steps[group].append(_Copy(index, bucket.seq, e.offset, e.nbytes, e.start, spec, spec.dtype, spec.shape))
    return steps


def _open_at_once(plan: Plan, wire: Wire) -> int:
    """Buckets being filled at the same time: one, or one per dtype where dtypes may not mix."""
    return 1 if wire.mixed else max(1, len({t.dtype for t in plan.tensors}))


def make_plan(groups: tuple[GroupSpec, ...], capacity: int, wire: Wire) -> Plan:
    """Cut groups into buckets under the rules of `wire`. Pure.

    Raises PlanMismatch when two tensors have one name. A bucket exceeds `capacity` only when it holds a single group that
    does; with `wire.split` none does (entries are cut at multiples of the item size).
    """
    seen: set[str] = set()
    for group in groups:
        for name in (*(t.name for t in group.tensors), *(a for a, _ in group.aliases)):
            if name in seen:
                raise PlanMismatch(f"{name} comes twice in one update")
            seen.add(name)
    wanted = [_expand(group, wire) for group in groups]
    cut = _split_buckets if wire.split else _whole_buckets
    return Plan(groups, tuple(BucketLayout(i, *content) for i, content in enumerate(cut(wanted, capacity, wire))))


def _expand(group: GroupSpec, wire: Wire) -> list[TensorSpec]:
    """The tensors of a group as they travel: tied names repeated where the engine wants them."""
    specs = list(group.tensors)
    if group.aliases and wire.aliases == "duplicate":
        by_name = {t.name: t for t in specs}
        specs += [replace(by_name[name], name=alias) for alias, name in group.aliases]
    return specs


def _up(offset: int, align: int) -> int:
    return -(-offset // align) * align


def _whole_buckets(
    groups: list[list[TensorSpec]], capacity: int, wire: Wire
) -> Iterator[tuple[tuple[Entry, ...], int]]:
    """Whole tensors, groups together; one open bucket per dtype where dtypes may not mix."""
    open_: dict[torch.dtype | None, list[TensorSpec]] = {}
    sizes: dict[torch.dtype | None, int] = {}
    for group in groups:
        parts: dict[torch.dtype | None, list[TensorSpec]] = {}
        for spec in group:
            parts.setdefault(None if wire.mixed else spec.dtype, []).append(spec)
        for key, specs in parts.items():
            size = sum(_up(s.nbytes, wire.align) for s in specs)
            if open_.get(key) and sizes[key] + size > capacity:
                yield _place(open_.pop(key), wire)
            if key not in open_:
                open_[key], sizes[key] = [], 0
            open_[key] += specs
            sizes[key] += size
    for specs in open_.values():
        yield _place(specs, wire)


def _place(specs: list[TensorSpec], wire: Wire) -> tuple[tuple[Entry, ...], int]:
    if wire.align == 1:
        specs = sorted(specs, key=lambda s: -s.dtype.itemsize)
    entries, offset = [], 0
    for spec in specs:
        offset = _up(offset, wire.align)
        entries.append(Entry(spec, offset, spec.nbytes))
        offset += spec.nbytes
    return tuple(entries), offset


def _split_buckets(
    groups: list[list[TensorSpec]], capacity: int, wire: Wire
) -> Iterator[tuple[tuple[Entry, ...], int]]:
    """One byte stream, cut wherever a bucket is full; cuts fall on whole items."""
    entries: list[Entry] = []
    offset = 0
    for spec in (s for group in groups for s in group):
        start, item, total = 0, spec.dtype.itemsize, spec.nbytes
        while True:
            at = _up(offset, wire.align)
            room = (capacity - at) // item * item
            left = total - start
            if entries and (at >= capacity or (room < min(left, item))):
                yield tuple(entries), offset
                entries, offset = [], 0
                continue
            nbytes = min(left, max(room, item)) if left else 0
            entries.append(Entry(spec, at, nbytes, start))
            start, offset = start + nbytes, at + nbytes
            if start >= total:
                break
    if entries:
        yield tuple(entries), offset
