"""What is described once: values may change unseen, everything else must not."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from support.chains import make_run, raw

from stages.flow import Group, TensorSpec
from stages.gather import GatherParams
from stages.gather.watch import watch
from stages.run import Run


class Small(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(4, 3) for _ in range(3)])
        self.register_buffer("scale", torch.ones(2))
        self.register_buffer("cache", torch.ones(2), persistent=False)


@pytest.fixture
def model() -> Small:
    return Small()


@pytest.fixture
def described(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    """Grows with every description that is made."""
    seen: list[object] = []
    real = GatherParams._describe

    def counted(self: GatherParams, run: Run) -> None:
        seen.append(run.model)
        real(self, run)

    monkeypatch.setattr(GatherParams, "_describe", counted)
    yield seen


def gather(stage: GatherParams, run: Run) -> dict[str, bytes]:
    """One update: what arrives, by name."""
    stage.plan((), run)
    stage.prepare(run)
    found: dict[str, bytes] = {}
    group: Group
    for group in stage(iter(()), run):
        found |= {s.name: raw(t) for s, t in zip(group.spec.tensors, group.tensors, strict=True)}
        found |= {alias: found[name] for alias, name in group.spec.aliases}
    return found


def wanted(model: torch.nn.Module) -> dict[str, bytes]:
    return {name: raw(tensor.detach()) for name, tensor in model.state_dict(keep_vars=True).items()}


def values(model: Small) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)


def data(model: Small) -> None:
    """What trainers do that swap parameters out and in: other memory under the same parameter."""
    for parameter in model.parameters():
        parameter.data = parameter.data + 1


def a_cache(model: Small) -> None:
    model.cache = torch.zeros(2)


@pytest.mark.parametrize("change", [values, data, a_cache])
def test_values_are_read_anew_without_describing(
    model: Small, described: list[object], change: Callable[[Small], None]
) -> None:
    stage, run = GatherParams(), make_run(model=model)
    assert gather(stage, run) == wanted(model)
    first = stage._specs
    for _ in range(3):
        change(model)
        assert gather(stage, run) == wanted(model)
    assert len(described) == 1
    assert stage._specs is first


def a_parameter(model: Small) -> None:
    model.layers[0].weight = torch.nn.Parameter(torch.randn(4, 4))


def the_same_shape(model: Small) -> None:
    model.layers[0].weight = torch.nn.Parameter(torch.randn(3, 4))


def another_shape(model: Small) -> None:
    model.layers[0].weight.data = torch.randn(5, 4)


def a_dtype(model: Small) -> None:
    model.layers[1].weight.data = torch.randn(3, 4).bfloat16()


def strides(model: Small) -> None:
    model.layers[1].weight.data = torch.randn(4, 3).T


def a_module(model: Small) -> None:
    model.layers[2] = torch.nn.Linear(4, 3)


def one_more(model: Small) -> None:
    model.extra = torch.nn.Parameter(torch.randn(2))


def one_less(model: Small) -> None:
    del model.layers[2]


def a_buffer(model: Small) -> None:
    model.scale = torch.zeros(2)


def persistence(model: Small) -> None:
    model._non_persistent_buffers_set.clear()


def a_tie(model: Small) -> None:
    model.layers[1].weight.data = model.layers[0].weight.data


def a_tie_less(model: Small) -> None:
    model.layers[1].weight.data = model.layers[0].weight.data.clone()


CHANGES = [
    a_parameter,
    the_same_shape,
    another_shape,
    a_dtype,
    strides,
    a_module,
    one_more,
    one_less,
    a_buffer,
    persistence,
    a_tie,
    a_tie_less,
]


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_is_described_anew(model: Small, described: list[object], change: Callable[[Small], None]) -> None:
    if change is a_tie_less:
        a_tie(model)
    stage, run = GatherParams(), make_run(model=model)
    gather(stage, run)
    change(model)
    assert gather(stage, run) == wanted(model)
    assert len(described) == 2


def test_another_model_is_described(model: Small, described: list[object]) -> None:
    stage, run = GatherParams(), make_run(model=model)
    gather(stage, run)
    run.model = Small()
    assert gather(stage, run) == wanted(run.model)
    assert len(described) == 2


def test_other_expectations_are_heeded(model: Small, described: list[object]) -> None:
    stage, run = GatherParams(), make_run(model=model)
    gather(stage, run)
    run.expected = {"scale": TensorSpec("scale", torch.bfloat16, (2,))}
    stage.plan((), run)
    assert {s.name: s.dtype for g in stage._specs for s in g.tensors}["scale"] == torch.bfloat16


def test_a_layer_with_adapters_and_odd_tensors_are_not_watched(model: Small) -> None:
    stage, run = GatherParams(), make_run(model=model)
    gather(stage, run)
    assert stage._watch is not None
    model.layers[0].lora_A = torch.nn.ModuleDict()
    assert watch(model, stage._described) is None
    del model.layers[0].lora_A
    model.layers[0].weight.ds_tensor = torch.zeros(1)  # type: ignore[attr-defined]
    assert watch(model, stage._described) is None
    assert watch("/a/folder", stage._described) is None
