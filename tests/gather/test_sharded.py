"""FSDP2, tensor- and expert-parallel modules: what is gathered equals the unsharded model, bit by bit."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from gather.streams import collect, differences, rank_run
from gather.toy import Toy, hf_tensors
from gather.world import World
from stages.gather import GatherParams

BATCH = 40_000  # bytes: an embedding alone, else a few groups
Built = tuple[nn.Module, dict[str, torch.Tensor]]


def shard(model: nn.Module, mesh: Any, **options: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def plain(**options: Any) -> tuple[Toy, dict[str, torch.Tensor]]:
    model = Toy(**options)
    return model, hf_tensors(model)


def place(module: nn.Module, name: str, mesh: Any, *placements: Any) -> None:
    """Replace a parameter by a DTensor."""
    tensor = getattr(module, name)
    setattr(module, name, nn.Parameter(distribute_tensor(tensor.detach(), mesh, placements), requires_grad=False))


# -- two ranks ---------------------------------------------------------------------------------------


def fsdp(size: int) -> Built:
    model, want = plain()
    return shard(model, init_device_mesh("cpu", (size,))), want


def fsdp_tied(size: int) -> Built:
    model, want = plain(tied=True)
    return shard(model, init_device_mesh("cpu", (size,))), want


def fsdp_after_forward(size: int) -> Built:
    """The root module stays gathered after a forward pass, in bfloat16; the float32 shards are what counts."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    model, want = plain()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    shard(model, init_device_mesh("cpu", (size,)), mp_policy=policy)
    with torch.no_grad():
        model(torch.arange(4))
    return model, want


def fsdp_trained(size: int) -> Built:
    """Two ranks of data, one optimizer step; held against the same step on one rank."""
    ids = torch.arange(8)
    model, _ = plain()
    torch.optim.SGD(model.parameters(), lr=0.0).step()
    model = shard(model, init_device_mesh("cpu", (size,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(ids).sum().backward()
    optimizer.step()
    want = {n: p.full_tensor().detach() for n, p in model.named_parameters()}
    return model, want


def fsdp_frozen_and_ignored(size: int) -> Built:
    from torch.distributed.fsdp import fully_shard

    model, want = plain()
    model.model.embed_tokens.weight.requires_grad_(False)
    ignored = set(model.model.layers[0].self_attn.parameters())
    fully_shard(model.model.layers[0], ignored_params=ignored)
    fully_shard(model, ignored_params=ignored)
    return model, want


def fsdp_offloaded(size: int) -> Built:
    from torch.distributed.fsdp import CPUOffloadPolicy

    model, want = plain()
    return shard(model, init_device_mesh("cpu", (size,)), offload_policy=CPUOffloadPolicy(pin_memory=False)), want


def fsdp_on_columns(size: int) -> Built:
    model, want = plain()
    mesh = init_device_mesh("cpu", (size,))
    return shard(model, mesh, shard_placement_fn=lambda p: Shard(1) if p.dim() == 2 else Shard(0)), want


def wrapped(size: int) -> Built:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model, want = plain()
    for i, layer in enumerate(model.model.layers):
        model.model.layers[i] = torch.compile(checkpoint_wrapper(layer))
    return torch.compile(shard(model, init_device_mesh("cpu", (size,)))), want


def tensor_parallel(size: int) -> Built:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model, want = plain()
    plan = {f"self_attn.{n}_proj": ColwiseParallel() for n in "qkv"} | {"self_attn.o_proj": RowwiseParallel()}
    plan |= {"mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel(), "mlp.down_proj": RowwiseParallel()}
    mesh = init_device_mesh("cpu", (size,))
    for layer in model.model.layers:
        parallelize_module(layer, mesh, plan)
    parallelize_module(model, mesh, {"model.embed_tokens": RowwiseParallel(), "lm_head": ColwiseParallel()})
    return model, want


def mixed_placements(size: int) -> Built:
    model, want = plain()
    mesh = init_device_mesh("cpu", (size,))
    place(model.model.embed_tokens, "weight", mesh, Shard(1))
    place(model.lm_head, "weight", mesh, Shard(0))
    place(model.model.layers[0].norm, "weight", mesh, Replicate())
    place(model.model.layers[0].self_attn.q_proj, "bias", mesh, Shard(0))
    place(model.model.layers[1].self_attn.q_proj, "weight", mesh, Shard(-1))
    return model, want


def fewer_rows_than_ranks(size: int) -> Built:
    model = nn.Module()
    model.few, model.none, model.scalar = (
        nn.Parameter(torch.randn(size - 1, 3)),
        nn.Parameter(torch.zeros(0, 3)),
        nn.Parameter(torch.tensor(2.5)),
    )
    want = hf_tensors(model)
    place(model, "few", init_device_mesh("cpu", (size,)), Shard(0))
    place(model, "none", init_device_mesh("cpu", (size,)), Shard(0))
    return model, want


def data_parallel(size: int) -> Built:
    model, want = plain(tied=True)
    return nn.parallel.DistributedDataParallel(model), want


def nothing_on_this_rank(size: int) -> Built:
    model, want = plain()
    return (nn.Module() if dist.get_rank() == 0 else model), want


def experts(size: int) -> Built:
    model, want = plain(experts=5)  # 3 + 2 over two ranks
    mesh = init_device_mesh("cpu", (size,))
    for layer in model.model.layers:
        place(layer.mlp.experts, "gate_up_proj", mesh, Shard(0))
        place(layer.mlp.experts, "down_proj", mesh, Shard(0))
    return model, want


# -- four ranks --------------------------------------------------------------------------------------


def hybrid(size: int) -> Built:
    model, want = plain(tied=True)
    return shard(model, init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))), want


def fsdp_over_tensor_parallel(size: int) -> Built:
    """Tensor parallel cut first, then FSDP on the same dimension: the ranks' rows are not in order."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model, want = plain()
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("dp", "tp"))
    plan = {f"self_attn.{n}_proj": ColwiseParallel() for n in "qkv"} | {"self_attn.o_proj": RowwiseParallel()}
    plan |= {"mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel(), "mlp.down_proj": RowwiseParallel()}
    for layer in model.model.layers:
        parallelize_module(layer, mesh["tp"], plan)
    return shard(model, mesh["dp"]), want


def experts_over_fsdp(size: int) -> Built:
    """Experts over their own mesh dimension and FSDP within; everything else FSDP over all ranks."""
    from torch.distributed.fsdp import fully_shard

    model, want = plain(experts=6)
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("fsdp", "ep"))
    world = init_device_mesh("cpu", (size,))
    for layer in model.model.layers:
        for name in ("gate_up_proj", "down_proj"):
            place(layer.mlp.experts, name, mesh["ep"], Shard(0))
        fully_shard(layer.mlp.experts, mesh=mesh["fsdp"], shard_placement_fn=lambda p: Shard(1))
    return shard(model, world), want


def nested_meshes(size: int) -> Built:
    model, want = plain()
    mesh = init_device_mesh("cpu", (2, size // 2))
    place(model.model.embed_tokens, "weight", mesh, Shard(0), Shard(0))
    place(model.lm_head, "weight", mesh, Shard(0), Shard(1))
    place(model.model.layers[0].self_attn.o_proj, "weight", mesh, Replicate(), Shard(1))
    place(model.model.layers[1].self_attn.o_proj, "weight", mesh, Shard(0), Replicate())
    return model, want


def pipeline_stages(size: int) -> Built:
    """Each rank has a layer of its own; the first also the embedding, the last the head."""
    model, want = plain(layers=size)
    rank = dist.get_rank()
    for i in range(size):
        if i != rank:
            model.model.layers[i] = nn.Module()
    if rank:
        model.model.embed_tokens = nn.Module()
    if rank != size - 1:
        model.lm_head = nn.Module()
    return model, want


TWO: list[Callable[[int], Built]] = [
    fsdp,
    fsdp_tied,
    fsdp_after_forward,
    fsdp_trained,
    fsdp_frozen_and_ignored,
    fsdp_offloaded,
    fsdp_on_columns,
    wrapped,
    tensor_parallel,
    mixed_placements,
    fewer_rows_than_ranks,
    data_parallel,
    nothing_on_this_rank,
    experts,
]
FOUR: list[Callable[[int], Built]] = [
    hybrid,
    fsdp_over_tensor_parallel,
    experts_over_fsdp,
    nested_meshes,
    pipeline_stages,
]


def check_all(rank: int, builders: list[Callable[[int], Built]], holders: list[tuple[int, ...]]) -> dict[str, Any]:
    """Gather every layout twice, the second time after the weights changed; what went wrong, by layout."""
    found: dict[str, Any] = {}
    for build, holding in itertools.product(builders, holders):
        stage, run = GatherParams(batch=BATCH), rank_run(holding)
        try:
            model, want = build(dist.get_world_size())
            wrong = differences(collect(stage, model, run), want if rank in holding else {})
            with torch.no_grad():
                for p in {id(p): p for p in model.parameters()}.values():
                    getattr(p, "_local_tensor", p).mul_(2)
            twice = {n: t if "correction_bias" in n else t * 2 for n, t in want.items()}
            wrong += differences(collect(stage, model, run), twice if rank in holding else {})
        except BaseException as error:
            raise RuntimeError(build.__name__) from error
        stage.close()
        if wrong:
            found[f"{build.__name__} to {holding}"] = wrong
    return found


def test_two_ranks_bit_equal(world: World) -> None:
    assert world.run(2, check_all, TWO, [(0,), (0, 1)]) == [{}, {}]


def test_four_ranks_bit_equal(world: World) -> None:
    assert world.run(4, check_all, FOUR, [(0,), (1, 3)]) == [{}] * 4


def check_cast(rank: int) -> list[str]:
    """float32 shares travel as bfloat16 already; the router's correction bias does not."""
    stage, run = GatherParams(dtype="bfloat16", batch=BATCH), rank_run((0,))
    model, want = experts(2)
    want = {n: t if "correction_bias" in n else t.bfloat16() for n, t in want.items()}
    wrong = differences(collect(stage, model, run), want if rank == 0 else {})
    stage.close()
    return wrong


def test_shares_are_cast_before_they_travel(world: World) -> None:
    assert world.run(2, check_cast) == [[], []]
