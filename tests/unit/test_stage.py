"""Stages of a user's own: one function is enough for a mapper, and a recipe names it by its path."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.chains import MIXED, SPLIT, expected_bytes, group_of, make_run, pack, tensor_of
from support.fakes import Toy, engines_of, updater_for

from stages.base import GroupMapper, Rename, Stage
from stages.errors import CompositionError, ConfigError, PlanMismatch
from stages.flow import Group, GroupSpec
from stages.run import Wire


class Prefixed(Rename):
    """Another root, and nothing of the vision tower."""

    def __init__(self, prefix: str = "language_model.") -> None:
        super().__init__()
        self.prefix = prefix

    def rename(self, name: str) -> str | None:
        return None if name.startswith("visual.") else self.prefix + name


class Halved(GroupMapper):
    """Changes values and dtype: what is sent is half, in bfloat16."""

    def map_spec(self, spec: GroupSpec) -> GroupSpec:
        return GroupSpec(tuple(replace(t, dtype=torch.bfloat16) for t in spec.tensors), spec.aliases)

    def map_group(self, group: Group, spec: GroupSpec) -> Group:
        return Group(spec, tuple(t / 2 for t in group.tensors))


def through(mapper: GroupMapper, groups: list[Group], wire: Wire = MIXED) -> list[Group]:
    """What comes out, checked against what the mapper planned."""
    run = make_run(wire)
    planned = list(mapper.plan([g.spec for g in groups], run))
    out = list(mapper(iter(groups), run))
    assert [g.spec for g in out] == planned
    pack(out, wire, 64)
    return out


def named(groups: list[Group]) -> dict[str, torch.Tensor]:
    return {s.name: t for g in groups for s, t in zip(g.spec.tensors, g.tensors, strict=True)}


def test_a_rename_keeps_every_tensor_with_its_name() -> None:
    groups = [group_of({"a": torch.ones(2), "b": torch.zeros(3)}), group_of({"c": torch.full((1,), 5.0)})]
    out = named(through(Prefixed(), groups))
    assert list(out) == ["language_model.a", "language_model.b", "language_model.c"]
    assert out["language_model.c"].item() == 5.0


def test_dropped_tensors_leave_their_group_and_empty_groups_the_stream() -> None:
    """All but listed drops arrives (Tencent-Hunyuan/UniRL#166: 112 of 113 tensors silently skipped)."""
    groups = [
        group_of({"visual.a": torch.zeros(1), "b": torch.ones(2), "visual.c": torch.zeros(3)}),
        group_of({"visual.d": torch.zeros(1)}),
        group_of({"e": torch.full((2,), 7.0)}),
    ]
    out = through(Prefixed(""), groups)
    assert [[t.name for t in g.spec.tensors] for g in out] == [["b"], ["e"]]
    assert torch.equal(named(out)["b"], torch.ones(2))


def test_aliases_follow_their_tensor_and_go_with_it() -> None:
    tied = group_of(
        {"embed": torch.ones(2), "visual.x": torch.ones(2)},
        [("head", "embed"), ("visual.y", "embed"), ("z", "visual.x")],
    )
    (out,) = through(Prefixed("m."), [tied], SPLIT)
    assert out.spec.aliases == (("m.head", "m.embed"),)
    assert expected_bytes([out], SPLIT) == pack([out], SPLIT, 64).decode()


def test_two_names_that_become_one_are_refused() -> None:
    class Flat(Rename):
        def rename(self, name: str) -> str:
            return name.rpartition(".")[2]

    groups = [group_of({"a.weight": torch.ones(2)}), group_of({"b.weight": torch.ones(2)})]
    with pytest.raises(PlanMismatch, match="weight comes twice"):
        through(Flat(), groups)


def test_a_mapper_may_change_values_and_dtypes() -> None:
    groups = [group_of({"a": torch.full((4,), 3.0)})]
    packing = pack(through(Halved(), groups), MIXED, 64)
    assert packing.decode() == {"a": bytes(torch.full((4,), 1.5, dtype=torch.bfloat16).untyped_storage())}


def test_a_mapper_that_streams_other_shapes_than_it_planned_is_refused_by_name() -> None:
    class Wrong(GroupMapper):
        def map_group(self, group: Group, spec: GroupSpec) -> Group:
            return Group(spec, tuple(t[:1] for t in group.tensors))

    with pytest.raises(PlanMismatch, match="planned was a float32"):
        through(Wrong(), [group_of({"a": torch.ones(4)})])


def test_a_group_that_was_never_planned_is_refused_by_name() -> None:
    mapper = Prefixed()
    mapper.plan([group_of({"a": torch.ones(1)}).spec], make_run())
    with pytest.raises(PlanMismatch, match="surprise"):
        list(mapper(iter([group_of({"surprise": tensor_of(torch.uint8, (3,))})]), make_run()))


def test_a_mapper_without_a_constructor_of_its_own_works() -> None:
    class Bare(GroupMapper):
        def __init__(self) -> None:
            pass

    assert len(through(Bare(), [group_of({"a": torch.ones(1)})])) == 1


# -- in a recipe --------------------------------------------------------------------------------------------------

CHAIN = ["gather_params", "bucket", "transport", "barrier", "notify_engines"]


def recipe(*own: object) -> list[object]:
    return [CHAIN[0], *own, *CHAIN[1:]]


def test_a_recipe_names_a_stage_of_the_users_own_by_its_path() -> None:
    mine = {"_target_": f"{__name__}.Prefixed", "prefix": "model."}
    with updater_for(stages=recipe(mine, {"_target_": f"{__name__}.Halved"})) as updater:
        report = updater.update(Toy(3.0))
        (engine,) = engines_of(updater)
        assert report.tensors == 5
        assert engine.weights["model.norm.weight"] == bytes(
            torch.full((5,), 1.5, dtype=torch.bfloat16).untyped_storage()
        )


def test_what_is_no_stage_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="not a Stage"):
        updater_for(stages=recipe({"_target_": "builtins.dict"}))
    with pytest.raises(ConfigError, match="no setting 'prefx'"):
        updater_for(stages=recipe({"_target_": f"{__name__}.Prefixed", "prefx": "x"}))
    with pytest.raises(CompositionError, match="Bucket produces Bucket, but Prefixed"):
        updater_for(stages=[*CHAIN[:2], {"_target_": f"{__name__}.Prefixed"}, *CHAIN[2:]])


def test_the_base_stage_promises_nothing() -> None:
    stage = Stage()
    stage.close()  # never opened
    stage.abort()
    with pytest.raises(NotImplementedError):
        stage(iter(()), make_run())
