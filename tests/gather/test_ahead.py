"""Shares that are quantized before they travel: the same bytes as quantizing the gathered weight, and fewer of them sent."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from gather.streams import differences, rank_run
from gather.world import World
from pipelines.compose import compose_backend, compose_chain
from pipelines.config import load
from stages.base import Stage
from stages.errors import RemoteRankError
from stages.gather import GatherParams
from stages.quantize.base import NonFinite, Quantize
from stages.quantize.fp8_block import Fp8Block, Fp8BlockUe8m0
from stages.quantize.fp8_channel import Fp8Channel
from stages.quantize.fp8_tensor import Fp8Tensor
from stages.quantize.int4 import Int4
from stages.quantize.mxfp8 import Mxfp8
from stages.run import Run

FORMATS: tuple[type[Quantize], ...] = (Fp8Block, Fp8BlockUe8m0, Fp8Channel, Mxfp8, Fp8Tensor, Int4)
SHAPES = {"even": (512, 256), "ragged": (511, 256), "odd": (300, 256), "short": (64, 256)}


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down_proj = nn.Parameter(torch.randn(4, 256, 128))


class Model(nn.Module):
    """Weights whose shards end at block edges, and weights whose shards do not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        for name, (rows, columns) in SHAPES.items():
            setattr(self, name, nn.Linear(columns, rows, bias=name == "even"))
        self.mlp = nn.Module()
        self.mlp.experts = Experts()


def built(where: str, size: int) -> nn.Module:
    model = Model()
    mesh = init_device_mesh("cpu", (size,))
    if where == "fsdp":
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=mesh)
    else:
        for linear in (m for m in model.modules() if isinstance(m, nn.Linear)):
            cut = distribute_tensor(linear.weight.detach(), mesh, [Shard(1)])
            linear.weight = nn.Parameter(cut, requires_grad=False)
        experts = distribute_tensor(model.mlp.experts.down_proj.detach(), mesh, [Shard(0)])
        model.mlp.experts.down_proj = nn.Parameter(experts, requires_grad=False)
    return model


def run_chain(gather: GatherParams, quantize: Quantize, model: Any, run: Run) -> dict[str, torch.Tensor]:
    """What comes out of the two, by name; empty where dropped."""
    run.model = model
    run.update += 1
    run.comm.begin(run.update)
    run.gathered = tuple(gather.plan((), run))
    quantize.plan(run.gathered, run)
    with run.comm.together("prepare"):
        gather.prepare(run)
        quantize.prepare(run)
    made = {}
    for group in quantize(gather(iter(()), run), run):
        for spec, tensor in zip(group.spec.tensors, group.tensors, strict=True):
            if not tensor.is_meta:
                made[spec.name] = tensor.to(spec.dtype, copy=True)
    return made


def sent_bytes(gather: GatherParams) -> int:
    assert gather._exchange is not None
    return sum(sum(batch.outgoing) for batch in gather._exchange.batches)


def both_ways(rank: int, where: str, holders: tuple[int, ...]) -> dict[str, tuple[list[str], int, int, int]]:
    """By format: what differs, weights quantized ahead, bytes sent ahead and by gathering first."""
    found = {}
    model = built(where, dist.get_world_size())
    for kind in FORMATS:
        results, sent = [], []
        ahead = 0
        for early in (True, False):
            gather, quantize = GatherParams(), kind()
            if early:
                gather.encoder = quantize
            run = rank_run(holders)
            results += [run_chain(gather, quantize, model, run) for _ in range(2)]  # the second by the same plan
            ahead = ahead or (len(gather._ahead.made) // 2 if gather._ahead else 0)
            sent.append(sent_bytes(gather))
            gather.close()
            quantize.close()
        wrong = [name for one in results[1:] for name in differences(one, results[0])]
        assert bool(results[0]) == (rank in holders)
        found[kind.format] = wrong, ahead, sent[0], sent[1]
    return found


@pytest.mark.parametrize("where", ["fsdp", "columns and experts"])
@pytest.mark.parametrize("holders", [(0,), (0, 1)], ids=["one holder", "all hold"])
def test_the_bytes_are_those_of_gathering_first(world: World, where: str, holders: tuple[int, ...]) -> None:
    found = world.run(2, both_ways, where, holders)
    assert {(rank, kind): wrong for rank, f in enumerate(found) for kind, (wrong, *_) in f.items() if wrong} == {}
    ahead = {kind: count for kind, (_, count, *_) in found[0].items()}
    experts = 2 * len(holders)  # those that somebody lacks
    even, every, none = 2 + experts, 4 + experts, experts
    if where == "fsdp":  # two of four weights are cut inside of a block
        expected = {"fp8_block": even, "fp8_block_ue8m0": even, "fp8_channel": every, "mxfp8": every}
    else:  # only experts have whole rows
        expected = {"fp8_block": every, "fp8_block_ue8m0": every, "fp8_channel": none, "mxfp8": every}
    assert ahead == expected | {"fp8_tensor": 0, "int4": 0}
    for kind in ("fp8_block", "mxfp8"):
        early, late = (sum(f[kind][i] for f in found) for i in (2, 3))
        assert early < 0.6 * late


def spoiled(rank: int) -> str:
    """What this rank says when rank 1's share of a weight holds NaN."""
    model = built("fsdp", 2)
    if rank == 1:
        with torch.no_grad():
            model.even.weight.to_local()[0, 3] = float("nan")
    gather, quantize = GatherParams(), Fp8Block()
    gather.encoder = quantize
    try:
        run_chain(gather, quantize, model, rank_run())
    except (NonFinite, RemoteRankError) as error:
        return str(error)
    finally:
        gather.close()
        quantize.close()
    return ""


def test_what_cannot_be_quantized_is_known_before_anything_travels(world: World) -> None:
    assert all("even.weight" in said and "nan" in said for said in world.run(2, spoiled))


@pytest.mark.parametrize("quantize", ["fp8_block", "auto", "none"])
@pytest.mark.parametrize("between", ["", "{_target_: X},"])
def test_the_chain_tells_gather_of_the_stage_right_behind_it(quantize: str, between: str) -> None:
    between = between.replace("X", f"{__name__}.Between")
    settings = load(
        [
            f"quantize={quantize}",
            f"recipe.stages=[gather_params,{between}quantize,bucket,transport,barrier,notify_engines]",
        ]
    )
    stages = compose_chain(settings, compose_backend(settings))
    assert isinstance(stages[0], GatherParams)
    assert (stages[0].encoder is not None) == (quantize != "none" and not between)


class Between(Stage):
    """Passes groups on."""

    from stages.flow import Group

    consumes = Group
    produces = Group

    def __call__(self, items: Iterator[Any], run: Run) -> Iterator[Any]:
        return items
