"""DTensors as FSDP2 (`fully_shard`), tensor- and expert-parallel plans make them: this rank's share, and who has the rest."""

from __future__ import annotations

import sys
from typing import Any

import torch

from stages.errors import ConfigError, PlanMismatch
from stages.gather.layout import Cut, Spread


class Meshes:
    """The shapes and ranks of device meshes, each looked up once: DeviceMesh works them out anew at every access."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[Any, tuple[int, ...], tuple[int, ...]]] = {}

    def of(self, mesh: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """`(shape, ranks in row-major order)`."""
        if id(mesh) not in self._seen:
            ranks = mesh.mesh
            self._seen[id(mesh)] = mesh, tuple(ranks.shape), tuple(int(r) for r in ranks.flatten().tolist())
        return self._seen[id(mesh)][1:]


def share_of(name: str, tensor: torch.Tensor, meshes: Meshes) -> tuple[torch.Tensor, tuple[int, ...], Spread | None]:
    """`(this rank's share, full shape, spread)` of any tensor; a plain one is whole.

    Raises PlanMismatch for a DTensor whose values are partial sums, or cut in an order that its placements do not tell.
    """
    if not is_dtensor(tensor):
        return tensor.detach(), tuple(tensor.shape), None
    sharded: Any = tensor
    local: torch.Tensor = sharded._local_tensor.detach()  # to_local() is a differentiable call and checks for more
    order = getattr(sharded._spec, "shard_order", None)
    if order is not None and not sharded._spec.is_default_device_order(order):
        raise PlanMismatch(
            f"{name}: sharded in the order {order}; redistribute it to the default order before the update"
        )
    shape = tuple(tensor.shape)
    cuts = tuple(_cut(name, p, len(shape)) for p in sharded.placements)
    return local, shape, Spread(*meshes.of(sharded.device_mesh), cuts)


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Whether it is one, without importing DTensor where nobody did."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def _cut(name: str, placement: Any, dims: int) -> Cut | None:
    if placement.is_replicate():
        return None
    dim = getattr(placement, "dim", None)
    if placement.is_partial() or dim is None:
        raise PlanMismatch(
            f"{name}: placement {placement} holds no weights that can be sent; redistribute it to Shard or Replicate"
        )
    return Cut(dim % dims, int(getattr(placement, "split_factor", 1)))


def settle(module: torch.nn.Module) -> None:
    """Put FSDP2 modules that are still gathered from a forward pass back to their shards, which hold the optimizer's values.

    Local, and what `state_dict()` does too. Raises ConfigError for FSDP1, whose flat parameters have no names.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return
    for name, sub in module.named_modules():
        if hasattr(fsdp, "FSDPModule") and isinstance(sub, fsdp.FSDPModule):
            sub.reshard()
        elif isinstance(sub, fsdp.FullyShardedDataParallel):
            raise ConfigError(
                f"module {name or '(the root)'} is wrapped in FullyShardedDataParallel (FSDP1); wrap it with fully_shard (FSDP2)"
            )
