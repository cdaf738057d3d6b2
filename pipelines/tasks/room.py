"""How much memory an update takes on each side, and how much of it is there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from stages.base import Stage
from stages.bucket import Bucket, parse_size
from stages.run import Run
from stages.transport.disk import Disk

SHARED = "/dev/shm"
Line = tuple[str, str, bool]  # what, how much, whether there is as much


def size(nbytes: float) -> str:
    """`61.1 GB`; decimal units, as in the report."""
    for factor, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if nbytes >= factor:
            return f"{nbytes / factor:.3g} {unit}" if nbytes < 999.5 * factor else f"{nbytes / factor:.0f} {unit}"
    return f"{nbytes:.0f} B"


def ranks_of(engines: Mapping[str, Any]) -> list[int]:
    """The ranks of each engine of the `engines` node."""
    tp = engines["tp"]
    if isinstance(tp, list):
        return list(tp)
    return [tp] * (engines["count"] if engines["kind"] == "embedded" else len(engines.get("urls") or engines["actors"]))


def ring_of(bucket: Bucket, run: Run) -> tuple[int, int]:
    """`(slots, bytes of each)` that the bucket stage asks the transport for."""
    plan = run.current_plan
    kinds = 1 if run.wire.mixed else max(1, len({t.dtype for t in plan.tensors}))
    return bucket.slots + kinds - 1, max(plan.largest_bucket, min(bucket.capacity, plan.nbytes))


def received(transport: str) -> str:
    """What an engine rank does with the bytes."""
    return {"ipc": "reads", "disk": "loads from the folder"}.get(transport, "receives")


def needed(settings: Mapping[str, Any], stages: Sequence[Stage], run: Run) -> Iterator[Line]:
    """Memory on the trainer's side, on the engines', and on disk."""
    plan, transport = run.current_plan, run.transport
    for bucket in (s for s in stages if isinstance(s, Bucket)):
        count, nbytes = ring_of(bucket, run)
        text, enough = f"{count} slots of {size(nbytes)}: {size(count * nbytes)}", True
        if transport.name == "ipc":
            free = shared_free()
            enough = free is not None and free >= count * nbytes
            text += f" in {SHARED}, " + ("which is not there" if free is None else f"where {size(free)} are free")
        yield "trainer, buckets", text, enough
    if (ranks := settings["launcher"]["ranks"]) > 1:
        batch = settings["gather"].get("batch")
        if batch is not None:
            most = size(2 * parse_size(batch, "gather.batch"))
            yield "trainer, gather", f"up to {most} on a rank that holds bytes, of {ranks} ranks", True
    wide = set(run.gathered)
    if made := [group.nbytes for group in plan.groups if group not in wide]:
        yield "trainer, quantize", f"about {size(max(made))}: the largest group that it makes", True
    yield "an engine rank", _engine_side(run), True
    if isinstance(transport, Disk):
        versions = transport.keep + 1
        left, total = disk_free(transport.path), versions * plan.nbytes
        text = f"{versions} versions ({transport.keep} kept, one written): {size(total)}, {size(left)} free"
        yield "folder", text, left >= total


def _engine_side(run: Run) -> str:
    name = run.transport.name
    if name == "ipc":
        return "nothing besides the weights: it maps the trainer's slots"
    if name == "disk":
        return "what its own loader takes"
    return f"one bucket besides the weights: {size(run.current_plan.largest_bucket)}"


def shared_free() -> int | None:
    """Bytes free in shared memory; None where there is none."""
    return shutil.disk_usage(SHARED).free if os.path.isdir(SHARED) and os.access(SHARED, os.W_OK) else None


def disk_free(path: Path) -> int:
    """Bytes free where `path` is, or would be made."""
    there = next(p for p in (path, *path.parents) if p.exists())
    return shutil.disk_usage(there).free
