"""Running a quantize stage over tensors, and looking at what it makes."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stages.base import Stage
from stages.flow import Group, GroupSpec, TensorSpec
from tests.support.chains import make_run

from .reference import Array

CLASSES = {
    "fp8_block": "fp8_block.Fp8Block",
    "fp8_block_ue8m0": "fp8_block.Fp8BlockUe8m0",
    "fp8_tensor": "fp8_tensor.Fp8Tensor",
    "fp8_channel": "fp8_channel.Fp8Channel",
    "mxfp8": "mxfp8.Mxfp8",
    "nvfp4": "nvfp4.Nvfp4",
    "int4": "int4.Int4",
    "auto": "auto.Auto",
}
WEIGHT = "model.layers.0.mlp.down_proj.weight"


def stage_of(name: str, **settings: Any) -> Any:
    module, _, cls = CLASSES[name].partition(".")
    return getattr(importlib.import_module(f"stages.quantize.{module}"), cls)(**settings)


def group_of(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None = None) -> Group:
    """One group; `dtype` is what its spec says of the floats, where that differs from the tensors."""
    specs = tuple(TensorSpec(n, dtype or t.dtype, tuple(t.shape)) for n, t in tensors.items())
    return Group(GroupSpec(specs), tuple(tensors.values()))


def quantize(stage: Stage, groups: Sequence[Group], **run: Any) -> dict[str, torch.Tensor]:
    """All that comes out, by name. Each tensor is copied at once, since the stage uses its memory again."""
    context = make_run(**run)
    planned = list(stage.plan([g.spec for g in groups], context))
    found: dict[str, torch.Tensor] = {}
    for group, spec in zip(stage(iter(groups), context), planned, strict=True):
        assert group.spec == spec
        for tensor, each in zip(group.tensors, spec.tensors, strict=True):
            assert tensor.shape == each.shape
            assert tensor.dtype == each.dtype or each.name not in (t.name for t in spec.tensors)
            found[each.name] = tensor.clone()
    return found


def parts_of(
    stage: Stage, weight: torch.Tensor, dtype: torch.dtype | None = None, **run: Any
) -> dict[str, torch.Tensor]:
    """What is made of one weight, by the rest of the name: `weight`, `weight_scale_inv`."""
    made = quantize(stage, [group_of({WEIGHT: weight}, dtype)], **run)
    return {name.removeprefix(WEIGHT.removesuffix("weight")): tensor for name, tensor in made.items()}


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_same(made: Mapping[str, torch.Tensor], expected: Mapping[str, Array]) -> None:
    """Equal names, shapes and bytes."""
    assert [*made] == [*expected]
    for name, tensor in made.items():
        assert tuple(tensor.shape) == expected[name].shape, name
        ours = np.frombuffer(bytes_of(tensor), np.uint8)
        theirs = np.frombuffer(np.ascontiguousarray(expected[name]).tobytes(), np.uint8)
        wrong = np.flatnonzero(ours != theirs)
        assert not len(wrong), f"{name}: {len(wrong)} of {len(ours)} bytes differ, first at {wrong[:5]}"


def write_config(folder: Path, quantization: Mapping[str, Any] | None, **more: Any) -> Path:
    """A checkpoint folder that is nothing but its config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    config = dict(more) if quantization is None else {**more, "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
