"""snapshot: the last committed versions stay in host memory, bit for bit, in buffers that are used again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from support.chains import raw
from support.fakes import Toy, engines_of, updater_for

from pipelines.updater import WeightUpdater
from stages.errors import ConfigError, UpdateFailed

STAGES = [
    "gather_params",
    {"_target_": "stages.snapshot.Snapshot", "keep": 2},
    "bucket",
    "prefetch",
    "transport",
    "barrier",
    "notify_engines",
]


@pytest.fixture
def updater() -> Iterator[WeightUpdater]:
    with updater_for(stages=STAGES) as made:
        yield made


def bytes_of(updater: WeightUpdater, version: str) -> dict[str, bytes]:
    return {name: raw(tensor) for name, tensor in updater.snapshots.tensors(version).items()}


def test_the_last_versions_are_kept_as_they_were(updater: WeightUpdater) -> None:
    model = Toy(1.0)
    for value in (1.0, 2.0, 3.0):
        for parameter in model.parameters():
            parameter.data.fill_(value)
        updater.update(model)
    assert updater.snapshots.versions == ["2", "3"]
    assert bytes_of(updater, "2") == Toy(2.0).bytes()
    assert bytes_of(updater, "3") == Toy(3.0).bytes()
    with pytest.raises(ConfigError, match=r"version 1 is not kept.*\['2', '3'\]"):
        updater.snapshots.tensors("1")


def test_buffers_are_used_again(updater: WeightUpdater) -> None:
    seen = set()
    for value in range(8):
        updater.update(Toy(float(value)))
        latest = updater.snapshots.tensors(updater.snapshots.versions[-1])
        seen.add(min(tensor.data_ptr() for tensor in latest.values()))
    assert len(seen) == 3


def test_a_version_that_was_not_committed_is_not_kept(updater: WeightUpdater) -> None:
    updater.update(Toy(1.0))
    (engine,) = engines_of(updater)
    engine.script("commit", engine.refuse("commit"))
    with pytest.raises(UpdateFailed):
        updater.update(Toy(2.0))
    assert updater.snapshots.versions == ["1"]
    assert bytes_of(updater, "1") == Toy(1.0).bytes()


def test_an_older_version_can_be_sent_again(updater: WeightUpdater) -> None:
    for value in (1.0, 2.0):
        updater.update(Toy(value))
    updater.update(updater.snapshots.tensors("1"), version="1 again")
    (engine,) = engines_of(updater)
    assert engine.weights == Toy(1.0).bytes()
    assert updater.snapshots.versions == ["2", "1 again"]


def test_tied_names_stay_tied(updater: WeightUpdater) -> None:
    model = Toy(1.0)
    model.k_proj.weight = model.q_proj.weight
    report = updater.update(model, version="tied")
    kept = updater.snapshots.tensors("tied")
    assert kept["k_proj.weight"].data_ptr() == kept["q_proj.weight"].data_ptr()
    assert updater.update(kept, version="again").bytes == report.bytes


def test_it_loads_into_a_module(updater: WeightUpdater) -> None:
    updater.update(Toy(1.5), version="old actor")
    actor = Toy(0.0)
    actor.load_state_dict(updater.snapshots.tensors("old actor"))
    assert actor.bytes() == Toy(1.5).bytes()


def test_another_model_gets_buffers_of_its_own(updater: WeightUpdater) -> None:
    updater.update(Toy(1.0))
    updater.update(torch.nn.Linear(3, 3), version="linear")
    assert updater.snapshots.versions == ["1", "linear"]
    assert bytes_of(updater, "1") == Toy(1.0).bytes()


def test_a_recipe_without_it_says_so() -> None:
    with updater_for() as updater, pytest.raises(ConfigError, match="recipe=snapshot"):
        _ = updater.snapshots
