"""Quantizing shards and then gathering: the same bytes where the rule allows it, and only there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.quantize.shards import shards_quantize_alike

from .golden import FORMATS
from .inputs import bell, spread_out
from .made import bytes_of, parts_of, stage_of


def gathered(
    name: str, own: dict[str, Any], weight: torch.Tensor, cut: int, dim: int
) -> dict[str, torch.Tensor] | None:
    """Quantize the two halves alone and put the parts together; None where that is no longer a matter of joining."""
    halves = [parts_of(stage_of(name, **own), half) for half in weight.tensor_split([cut], dim)]
    joined = {}
    for part in halves[0]:
        pieces = [half[part] for half in halves]
        if pieces[0].dim() == 2:
            joined[part] = torch.cat([p.view(torch.uint8) for p in pieces], dim).view(pieces[0].dtype)
        elif part != "weight_shape":
            joined[part] = pieces[0]
    return joined


@settings(max_examples=80, deadline=None)
@given(
    name=st.sampled_from(sorted(FORMATS)),
    dim=st.integers(0, 1),
    cut=st.integers(1, 8),
    step=st.sampled_from([8, 32, 64, 128]),
    seed=st.integers(0, 50),
)
def test_the_rule_says_when_shards_quantize_alike(name: str, dim: int, cut: int, step: int, seed: int) -> None:
    format_, own, _, _ = FORMATS[name]
    weight = torch.from_numpy(spread_out((384, 512), seed) + bell((384, 512), seed))
    edge = cut * step
    if edge >= weight.shape[dim]:
        return
    stage = stage_of(format_, **own)
    edges = ((edge,), ()) if dim == 0 else ((), (edge,))
    alike = shards_quantize_alike((384, 512), edges, stage.block_of((384, 512)))
    if not alike:
        return
    whole = parts_of(stage, weight)
    joined = gathered(format_, own, weight, edge, dim)
    assert joined is not None
    for part, tensor in joined.items():
        assert bytes_of(tensor) == bytes_of(whole[part]), part


def test_where_the_rule_says_no_the_bytes_do_differ() -> None:
    weight = torch.from_numpy(bell((384, 128), 1))
    assert not shards_quantize_alike((384, 128), ((192,), ()), (128, 128))
    halves = [parts_of(stage_of("fp8_block"), half) for half in weight.split(192)]
    whole = parts_of(stage_of("fp8_block"), weight)
    assert [tuple(h["weight_scale_inv"].shape) for h in halves] == [(2, 1), (2, 1)]
    assert tuple(whole["weight_scale_inv"].shape) == (3, 1)
    assert bytes_of(torch.cat([h["weight"].view(torch.uint8) for h in halves])) != bytes_of(whole["weight"])


@pytest.mark.parametrize(
    ("shape", "edges", "block", "expected"),
    [
        ((384, 128), ((128, 256), ()), (128, 128), True),
        ((384, 128), ((192,), ()), (128, 128), False),
        ((384, 256), ((), (128,)), (128, 128), True),
        ((384, 256), ((), (64,)), (128, 128), False),
        ((130, 200), ((0, 130), (0, 200)), (128, 128), True),  # edges of the weight itself are no cuts
        ((130, 200), ((128,), ()), (128, 128), True),  # a ragged rest is a shard of its own
        ((64, 64), ((7,), ()), (1, 64), True),
        ((64, 64), ((), (32,)), (1, 64), False),
        ((64, 64), ((), (32,)), (1, 32), True),
        ((64, 64), ((32,), ()), (64, 64), False),
    ],
)
def test_cuts(shape: tuple[int, int], edges: Any, block: tuple[int, int], expected: bool) -> None:
    assert shards_quantize_alike(shape, edges, block) is expected


def test_an_edge_outside_is_an_error() -> None:
    with pytest.raises(ValueError, match="lies outside"):
        shards_quantize_alike((4, 4), ((5,), ()), (1, 1))
