"""task=plan: what an update would move, where, and into how much memory. No byte is moved and no engine is contacted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pipelines import preflight
from pipelines.compose import compose_backend, compose_chain, compose_timeouts, transport_of
from pipelines.config import build
from pipelines.executor import plan_chain
from pipelines.report_view import table_console
from pipelines.schema import option_of
from pipelines.tasks import room
from pipelines.tasks.outline import Outline, outline_of
from pipelines.trainers.base import Trainer
from stages.base import Stage
from stages.comm import Comm
from stages.errors import PreflightError
from stages.flow import Plan, dtype_name
from stages.run import Run

_CHECKPOINT = "pipelines.trainers.checkpoint.CheckpointTrainer"
_SHOWN = 12  # lines of a refusal
_MANY = 5000  # buckets, each a request to every engine


def run(settings: Mapping[str, Any]) -> int:
    """Print the plan; 1 when preflight would refuse it, else 0."""
    stages, run = prepare(settings)
    try:
        outline, engines = _outlines(settings)
        run.expected = engines.expected(run)
        run.model, run.reference = outline.source, engines.folder
        plan_chain(stages, run)
        refusal = _preflight(run, engines)
    finally:
        for stage in reversed(stages):
            stage.close()
    console = table_console()
    _show(settings, stages, run, outline, refusal, console)
    return int(refusal is not None)


def prepare(settings: Mapping[str, Any]) -> tuple[list[Stage], Run]:
    """The chain of these settings and a run of it, without engines."""
    backend = compose_backend(settings)
    stages = compose_chain(settings, backend)
    transport, device = transport_of(stages), torch.device("cpu")
    backend.check_device(device)
    run = Run(
        comm=Comm(),
        device=device,
        backend=backend,
        transport=transport,
        wire=backend.wire(transport.name),
        timeouts=compose_timeouts(settings),
    )
    return stages, run


def _outlines(settings: Mapping[str, Any]) -> tuple[Outline, Outline]:
    """What the trainer has, and what the engines were started from."""
    node, served = settings["trainer"], settings["session"]["reference"]
    if node["_target_"] == _CHECKPOINT:
        outline = outline_of(Path(node["path"]))
        return outline, outline if served is None else outline_of(Path(served))
    trainer: Trainer = build(node, Trainer)  # type: ignore[type-abstract]
    engines = outline_of(Path(served or trainer.reference))
    return Outline(trainer.source, trainer.reference, engines.config), engines


def _preflight(run: Run, engines: Outline) -> PreflightError | None:
    assert run.expected is not None
    expected = preflight.taken_wide(run.expected, run.current_plan, run.on_load)
    try:
        preflight.check(run.current_plan, expected, engines.config, "the engine")
    except PreflightError as error:
        return error
    return None


def _show(
    settings: Mapping[str, Any],
    stages: Sequence[Stage],
    run: Run,
    outline: Outline,
    refusal: PreflightError | None,
    console: Console,
) -> None:
    plan, sizes = run.current_plan, room.ranks_of(settings["engines"])
    table = Table(title=Text(f"plan: {outline.folder.name}"), show_header=False)
    table.add_column(no_wrap=True, style="bold")
    table.add_column()
    numbers = sum(t.nbytes // t.dtype.itemsize for g in run.gathered for t in g.tensors)
    known = " by its config" if outline.guessed else ""
    table.add_row("model", f"{outline.config.get('model_type', 'a model')}{known}: {_count(numbers)} numbers")
    table.add_row("travels", f"{room.size(plan.nbytes)} in {len(plan.tensors):,} tensors: {_dtypes(plan)}")
    table.add_row("buckets", _buckets(plan, settings))
    table.add_section()
    table.add_row("engines", _engines(settings, sizes, run))
    for tp in dict.fromkeys(sizes):
        of = f" (tp={tp})" if len(set(sizes)) > 1 else ""
        keeps = f", keeps about {room.size(plan.nbytes / tp)} of them" if tp > 1 else ""
        table.add_row(f"an engine rank{of}", f"{room.received(run.transport.name)} {room.size(plan.nbytes)}{keeps}")
    if sum(sizes) > 1:
        table.add_row("all engine ranks", f"{sum(sizes)} of them: {room.size(plan.nbytes * sum(sizes))}")
    table.add_section()
    for name, text, enough in room.needed(settings, stages, run):
        table.add_row(name, Text(text, "" if enough else "bold red"))
    table.add_section()
    fine = f"{len(plan.tensors):,} names, shapes and dtypes are as the engines hold them"
    table.add_row("preflight", Text("refused, see below", "bold red") if refusal else Text(fine, "green"))
    console.print(table)
    if refusal is not None:
        first, rest = (lines := str(refusal).splitlines())[:_SHOWN], len(lines) - _SHOWN
        console.print(Text("\n".join(first), "red"), soft_wrap=True)
        if rest > 0:
            console.print(Text(f"  ... and {len(refusal.problems) - _SHOWN + 1:,} more", "red"))
    if len(plan.buckets) > _MANY:
        console.print(Text(f"{len(plan.buckets):,} buckets are as many requests; raise bucket.capacity", "yellow"))


def _dtypes(plan: Plan) -> str:
    nbytes: Counter[torch.dtype] = Counter()
    for tensor in plan.tensors:
        nbytes[tensor.dtype] += tensor.nbytes
    if len(nbytes) == 1:
        return dtype_name(next(iter(nbytes)))
    return ", ".join(f"{room.size(n)} {dtype_name(dtype)}" for dtype, n in nbytes.most_common())


def _buckets(plan: Plan, settings: Mapping[str, Any]) -> str:
    cut = sum(1 for b in plan.buckets for e in b.entries if e.start)
    capacity = settings["bucket"].get("capacity")
    text = f"{len(plan.buckets):,} of up to {room.size(plan.largest_bucket)} (bucket.capacity={capacity})"
    if cut:
        return f"{text}, {cut:,} cuts through tensors"
    largest = max(plan.buckets, key=lambda b: b.nbytes)
    if len(largest.entries) == 1:
        return f"{text}, the largest one is {largest.entries[0].spec.name} alone, which the engine takes whole"
    return text


def _engines(settings: Mapping[str, Any], sizes: Sequence[int], run: Run) -> str:
    tp = ",".join(map(str, dict.fromkeys(sizes))) or "1"
    quantize = option_of("quantize", settings["quantize"])
    return f"{len(sizes)} x {run.backend.name}, tp={tp}, over {run.transport.name}, quantize={quantize}"


def _count(numbers: int) -> str:
    for factor, unit in ((1e9, "billion"), (1e6, "million"), (1e3, "thousand")):
        if numbers >= factor:
            return f"{numbers / factor:.4g} {unit}"
    return str(numbers)
