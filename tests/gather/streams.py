"""Runs of the gather stage alone: what it plans and streams on this rank."""

from __future__ import annotations

from typing import Any

import torch
from support.chains import Memory, make_run

from stages.comm import Comm
from stages.gather import GatherParams
from stages.run import Run, Timeouts

PATIENT = Timeouts(connect=5.0, control=20.0, put=20.0, group=20.0, agree=20.0)


class HeldBy(Memory):
    """A transport whose buckets these ranks fill."""

    def __init__(self, *ranks: int) -> None:
        self.ranks = ranks

    def holds_bytes(self, run: Run) -> bool:
        return run.comm.rank in self.ranks


def rank_run(holders: tuple[int, ...] = (0,), **fields: Any) -> Run:
    """This rank's run, of the ranks of the default group."""
    return make_run(comm=Comm.from_torch(20.0), transport=HeldBy(*holders), **({"timeouts": PATIENT} | fields))


def collect(stage: GatherParams, model: Any, run: Run) -> dict[str, torch.Tensor]:
    """One pass over the model: the tensors as they would be packed, by name; tied names repeated. Empty where dropped."""
    run.model = model
    run.update += 1
    run.comm.begin(run.update)
    run.gathered = tuple(stage.plan((), run))
    stage.prepare(run)
    made: dict[str, torch.Tensor] = {}
    seen = []
    for group in stage(iter(()), run):
        seen.append(group.spec)
        for spec, tensor in zip(group.spec.tensors, group.tensors, strict=True):
            assert tensor.shape == spec.shape
            if not tensor.is_meta:
                assert spec.name not in made
                made[spec.name] = tensor.to(spec.dtype, copy=True)
        made |= {alias: made[name] for alias, name in group.spec.aliases if name in made}
    assert tuple(seen) == run.gathered
    return made


def differences(have: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> list[str]:
    """Names that are missing, extra, or not equal bit by bit."""
    wrong = sorted(set(have) ^ set(want))
    for name in set(have) & set(want):
        a, b = have[name].contiguous(), want[name].contiguous()
        if (
            a.dtype != b.dtype
            or a.shape != b.shape
            or not torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8))
        ):
            wrong.append(f"{name} {a.dtype}{list(a.shape)} for {b.dtype}{list(b.shape)}")
    return wrong
