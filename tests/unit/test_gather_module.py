"""Reading a module: every tensor once, by the name that engines know."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from support.chains import ONE_DTYPE, SPLIT, WIRES, make_run, pack, raw
from torch import nn

from stages.errors import ConfigError, PlanMismatch
from stages.flow import Group, GroupSpec, TensorSpec
from stages.gather import GatherParams, group_specs
from stages.gather.module import describe
from stages.gather.source import ModuleSource
from stages.run import Run, Wire


def names(module: nn.Module) -> list[str]:
    return [leaf.name for leaf in describe(module).leaves]


def aliases(module: nn.Module) -> list[tuple[str, str]]:
    return describe(module).aliases


def values(module: nn.Module) -> dict[str, torch.Tensor]:
    return dict(ModuleSource(module).shares())


def holder(**tensors: torch.Tensor) -> nn.Module:
    """A module with parameters of these dotted names (`__` stands for a dot)."""
    root = nn.Module()
    for name, tensor in tensors.items():
        *path, leaf = name.split("__")
        node = root
        for segment in path:
            if not hasattr(node, segment):
                node.add_module(segment, nn.Module())
            node = getattr(node, segment)
        node.register_parameter(leaf, nn.Parameter(tensor, requires_grad=False))
    return root


def gather(model: object, wire: Wire = SPLIT, stage: GatherParams | None = None, run: Run | None = None) -> list[Group]:
    run = run or make_run(wire)
    run.model = model
    stage = stage or GatherParams()
    run.gathered = tuple(stage.plan((), run))
    stage.prepare(run)
    return [Group(g.spec, tuple(t.clone() for t in g.tensors)) for g in stage(iter(()), run)]


def tensors_of(groups: Iterable[Group]) -> dict[str, torch.Tensor]:
    return {s.name: t for g in groups for s, t in zip(g.spec.tensors, g.tensors, strict=True)}


# -- wrappers -----------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(3, 2)
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("cache", torch.zeros(4), persistent=False)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(2)


class Compiled(nn.Module):
    """What torch.compile makes of a module, as far as names go."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._orig_mod = module


PLAIN = names(Model())


def test_two_blocks_keep_their_own_names() -> None:
    """A layer-by-layer sync that drops the block's prefix overwrites one by the other (verl-project/verl-omni#315)."""
    assert [n for n in PLAIN if "proj.weight" in n] == ["layers.0.proj.weight", "layers.1.proj.weight"]


def test_a_compiled_model_and_compiled_blocks_give_plain_names() -> None:
    assert names(Compiled(Model())) == PLAIN
    partly = Model()
    partly.layers[1] = Compiled(partly.layers[1])
    assert names(partly) == PLAIN


def test_data_parallel_gives_plain_names() -> None:
    assert names(nn.DataParallel(Model())) == PLAIN


def test_checkpointed_blocks_give_plain_names() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = Model()
    model.layers[0] = checkpoint_wrapper(model.layers[0])
    assert sorted(names(nn.DataParallel(model))) == sorted(PLAIN)


# -- what counts --------------------------------------------------------------------------------------------------


def test_buffers_count_when_a_checkpoint_would_hold_them() -> None:
    assert "layers.0.scale" in PLAIN
    assert not any("cache" in n for n in PLAIN)
    assert set(PLAIN) == set(Model().state_dict())


def test_a_scalar_travels_as_a_scalar() -> None:
    groups = gather(Model())
    assert tensors_of(groups)["layers.0.scale"].shape == ()
    assert pack(groups, SPLIT, 64).decode()["layers.1.scale"] == raw(torch.ones(()))


def test_a_parameter_that_is_none_is_no_tensor() -> None:
    assert names(nn.Linear(2, 2, bias=False)) == ["weight"]


def test_values_are_those_of_the_moment_they_are_read() -> None:
    model = Model()
    stage, run = GatherParams(), make_run()
    run.model = model
    run.gathered = tuple(stage.plan((), run))
    with torch.no_grad():
        model.norm.weight.fill_(5.0)
    assert tensors_of(stage(iter(()), run))["norm.weight"].tolist() == [5.0, 5.0]


def test_reading_copies_nothing() -> None:
    model = Model()
    assert values(model)["norm.weight"].data_ptr() == model.norm.weight.data_ptr()
    assert not values(model)["norm.weight"].requires_grad


def test_state_dict_hooks_are_not_run() -> None:
    """Hooks that copy every fused layer at each sync use up the memory (pytorch/torchtitan#4706)."""
    model = Model()

    def hook(*args: object) -> None:
        raise AssertionError("a state dict was made")

    model._register_state_dict_hook(hook)
    assert len(gather(model)) > 0


def test_a_model_without_tensors_is_refused() -> None:
    with pytest.raises(ConfigError, match="no tensors"):
        gather(nn.Module())


@pytest.mark.parametrize("model", [None, 3, {"a": 3}, [torch.zeros(1)]], ids=repr)
def test_what_is_no_model_is_refused(model: object) -> None:
    with pytest.raises(ConfigError, match=r"takes a torch\.nn\.Module, an HF checkpoint folder or a mapping"):
        gather(model)


def test_weights_without_storage_are_refused_before_anything_is_sent() -> None:
    """A module on the meta device has shapes to plan with, and nothing to send."""
    with torch.device("meta"):
        model = Model()
    run = make_run()
    run.model = model
    stage = GatherParams()
    run.gathered = tuple(stage.plan((), run))
    assert sum(len(g.tensors) for g in run.gathered) == len(PLAIN)
    with pytest.raises(ConfigError, match=r"layers\.0\.proj\.weight.*meta"):
        stage.prepare(run)


# -- tied ---------------------------------------------------------------------------------------------------------


def test_a_tied_head_travels_once_with_its_alias() -> None:
    model = holder(embed__weight=torch.zeros(4, 2), head__weight=torch.ones(1))
    model.head.weight = model.embed.weight
    assert names(model) == ["embed.weight"]
    assert aliases(model) == [("head.weight", "embed.weight")]


def test_tied_is_known_by_shared_storage_not_by_the_object() -> None:
    shared = torch.zeros(4, 2)
    model = holder(embed__weight=shared, head__weight=shared[:])
    assert model.embed.weight is not model.head.weight
    assert aliases(model) == [("head.weight", "embed.weight")]


@pytest.mark.parametrize(
    "other",
    [torch.zeros(8)[:4], torch.zeros(4).view(2, 2), torch.zeros(4)[1:], torch.zeros(4, dtype=torch.bfloat16)],
    ids=["longer storage", "other shape", "other start", "other dtype"],
)
def test_tensors_of_their_own_are_not_tied(other: torch.Tensor) -> None:
    base = torch.zeros(8)
    assert aliases(holder(a=base[:4], b=other)) == []
    assert aliases(holder(a=base[:4], b=base[4:])) == []
    assert aliases(holder(a=base[:4], b=base.view(2, 4)[0:1])) == []


def test_empty_tensors_are_not_tied_to_one_another() -> None:
    assert names(holder(a=torch.zeros(0, 3), b=torch.zeros(0, 3))) == ["a", "b"]


def test_a_module_used_twice_is_tied_to_itself() -> None:
    model = Model()
    model.layers[1] = model.layers[0]
    assert sorted(names(model)) == sorted(n for n in PLAIN if "layers.1" not in n)
    assert ("layers.1.proj.weight", "layers.0.proj.weight") in aliases(model)


def test_tied_meta_parameters_are_known_by_identity() -> None:
    model = holder(a=torch.zeros(3, device="meta"), b=torch.zeros(3, device="meta"))
    model.register_parameter("c", model.a)
    assert names(model) == ["a", "b"]
    assert aliases(model) == [("c", "a")]


# -- adapters -----------------------------------------------------------------------------------------------------


class LoraLinear(nn.Module):
    """What PEFT makes of a linear layer, as far as names go."""

    def __init__(self, merged: bool) -> None:
        super().__init__()
        self.base_layer = nn.Linear(4, 4, bias=False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(4, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, 4, bias=False)})
        self.merged = merged


class Saved(nn.Module):
    """modules_to_save: the original and its trained copies."""

    def __init__(self, *adapters: str) -> None:
        super().__init__()
        self.original_module = nn.Linear(4, 4, bias=False)
        self.modules_to_save = nn.ModuleDict({a: nn.Linear(4, 4, bias=False) for a in adapters})


def peft(merged: bool = True, adapters: tuple[str, ...] = ("default",), wrap: bool = False) -> nn.Module:
    inner = nn.Module()
    inner.q_proj = LoraLinear(merged)
    inner.norm = nn.LayerNorm(4)
    inner.lm_head = Saved(*adapters)
    model = nn.Module()
    model.base_model = nn.Module()
    model.base_model.model = inner
    if not wrap:
        return model
    outer = nn.Module()
    outer._fsdp_wrapped_module = model
    return outer


@pytest.mark.parametrize("wrap", [False, True], ids=["bare", "wrapped"])
def test_a_merged_adapter_gives_the_base_models_names(wrap: bool) -> None:
    """An engine without LoRA knows no base_layer (TIGER-AI-Lab/verl-tool#125)."""
    model = peft(wrap=wrap)
    assert sorted(names(model)) == ["lm_head.weight", "norm.bias", "norm.weight", "q_proj.weight"]


def test_an_adapter_that_is_not_merged_is_refused_with_what_to_do() -> None:
    with pytest.raises(PlanMismatch, match=r"2 unmerged LoRA tensors, first .*lora_A.*merge_adapter"):
        names(peft(merged=False))


def test_the_trained_copy_is_sent_once_under_the_plain_name() -> None:
    """Trained heads never reach the engine when only adapter layers are visited (huggingface/trl#5766)."""
    model = peft()
    saved = model.base_model.model.lm_head.modules_to_save["default"].weight
    assert values(model)["lm_head.weight"].data_ptr() == saved.data_ptr()


def test_two_trained_copies_of_one_module_are_refused() -> None:
    with pytest.raises(PlanMismatch, match=r"lm_head\.weight.*(first|second).*(first|second)"):
        names(peft(adapters=("first", "second")))


def test_a_trained_copy_without_its_original_is_not_lost() -> None:
    model = peft()
    del model.base_model.model.lm_head.original_module
    assert "lm_head.weight" in names(model)


def test_a_base_layer_that_collides_with_a_plain_name_is_refused() -> None:
    with pytest.raises(PlanMismatch, match=r"q\.weight"):
        names(holder(q__weight=torch.zeros(1), q__base_layer__weight=torch.ones(1)))


# -- experts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["", "__weight"], ids=["bare", "weight"])
def test_fused_experts_become_one_set_per_expert(suffix: str) -> None:
    """Transformers 5 stores (E, 2I, H); engines want experts one by one (verl-project/verl#6896)."""
    gate_up, down = torch.arange(3 * 8 * 6.0).view(3, 8, 6), torch.arange(3 * 6 * 4.0).view(3, 6, 4)
    tensors = {f"l__mlp__experts__gate_up_proj{suffix}": gate_up, f"l__mlp__experts__down_proj{suffix}": down}
    model = holder(**tensors, l__mlp__gate__weight=torch.zeros(3, 6), l__mlp__up_proj__weight=torch.zeros(2, 6))
    got = values(model)
    for e in range(3):
        assert torch.equal(got[f"l.mlp.experts.{e}.gate_proj.weight"], gate_up[e, :4])
        assert torch.equal(got[f"l.mlp.experts.{e}.up_proj.weight"], gate_up[e, 4:])
        assert torch.equal(got[f"l.mlp.experts.{e}.down_proj.weight"], down[e])
    assert len(got) == 9 + 2
    assert all(t.is_contiguous() for t in got.values())


def test_a_tensor_of_three_dimensions_is_no_fused_expert_by_that_alone() -> None:
    """Convolution-like weights under a per-expert name (NVIDIA-NeMo/RL#3280)."""
    model = nn.Module()
    model.experts = nn.ModuleList([nn.Conv1d(3, 4, 2, bias=False)])
    assert names(model) == ["experts.0.weight"]
    odd = holder(
        experts__up=torch.zeros(4, 3, 2),
        experts__gate_up_proj=torch.zeros(4, 2),
        conv__gate_up_proj=torch.zeros(2, 4, 2),
    )
    assert names(odd) == ["experts.up", "experts.gate_up_proj", "conv.gate_up_proj"]
    named = nn.Module()
    named.experts = nn.ModuleList([nn.Module()])
    named.experts[0].up_proj = nn.Conv1d(3, 4, 2, bias=False)
    assert describe(named).leaves[0].shape == (4, 3, 2)
    assert names(named) == ["experts.0.up_proj.weight"]


def test_experts_that_do_not_split_in_half_are_refused() -> None:
    with pytest.raises(PlanMismatch, match=r"experts\.gate_up_proj.*\[2, 5, 3\]"):
        names(holder(l__experts__gate_up_proj=torch.zeros(2, 5, 3)))


def test_experts_are_grouped_one_by_one() -> None:
    model = holder(l__0__experts__gate_up_proj=torch.zeros(2, 8, 6), l__0__experts__down_proj=torch.zeros(2, 6, 4))
    groups = [[t.name.removeprefix("l.0.experts.") for t in g.spec.tensors] for g in gather(model)]
    assert groups == [
        ["0.gate_proj.weight", "0.up_proj.weight"],
        ["1.gate_proj.weight", "1.up_proj.weight"],
        ["0.down_proj.weight"],
        ["1.down_proj.weight"],
    ]


def test_tied_experts_are_tied_one_by_one() -> None:
    model = holder(a__experts__down_proj=torch.zeros(2, 3, 4))
    model.b = model.a
    assert names(model) == ["a.experts.0.down_proj.weight", "a.experts.1.down_proj.weight"]
    assert aliases(model) == [(f"b.experts.{e}.down_proj.weight", f"a.experts.{e}.down_proj.weight") for e in (0, 1)]


# -- dtypes -------------------------------------------------------------------------------------------------------

BIAS = "l.0.mlp.gate.e_score_correction_bias"


@pytest.mark.parametrize("wire", WIRES.values(), ids=list(WIRES))
@pytest.mark.parametrize("engine_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_routers_correction_bias_stays_fp32_end_to_end(wire: Wire, engine_dtype: torch.dtype) -> None:
    """In bf16, 238 distinct values collapse to 9 and tokens go to other experts (NVIDIA-NeMo/RL#3540)."""
    bias = torch.linspace(6.817, 7.063, 238)
    model = nn.Module()
    model.l = nn.ModuleList([nn.Module()])
    model.l[0].mlp = holder(gate__e_score_correction_bias=bias, gate__weight=torch.zeros(238, 4))
    run = make_run(wire)
    run.expected = {n: TensorSpec(n, engine_dtype, leaf.shape) for leaf in describe(model).leaves for n in [leaf.name]}
    for dtype in ("auto", "bfloat16"):
        groups = gather(model, wire, GatherParams(dtype), run)
        announced = {t.name: t.dtype for g in groups for t in g.spec.tensors}
        assert announced[BIAS] == torch.float32
        assert announced["l.0.mlp.gate.weight"] == (torch.bfloat16 if dtype == "bfloat16" else engine_dtype)
        sent = pack(groups, wire, 64).decode()[BIAS]
        assert sent == raw(bias)


def test_auto_takes_the_engines_dtype_where_a_plain_cast_reaches_it() -> None:
    model = holder(a=torch.zeros(2), b=torch.zeros(2), c=torch.zeros(2).long(), d=torch.zeros(2), e=torch.zeros(2))
    run = make_run()
    wanted = {"a": torch.bfloat16, "b": torch.float8_e4m3fn, "c": torch.int32, "d": torch.int8}
    run.expected = {n: TensorSpec(n, d, (2,)) for n, d in wanted.items()}
    announced = {t.name: t.dtype for g in gather(model, run=run) for t in g.spec.tensors}
    assert announced == {
        "a": torch.bfloat16,
        "b": torch.float32,  # fp8 takes scales, which is quantize's work
        "c": torch.int64,
        "d": torch.float32,
        "e": torch.float32,
    }


def test_a_dtype_of_the_config_is_for_floats_only() -> None:
    model = holder(a=torch.zeros(2), b=torch.zeros(2).long(), c=torch.zeros(2).bool())
    announced = {t.name: t.dtype for g in gather(model, stage=GatherParams("float16")) for t in g.spec.tensors}
    assert announced == {"a": torch.float16, "b": torch.int64, "c": torch.bool}


@pytest.mark.parametrize("settings", [{"dtype": "bf16"}, {"dtype": "Tensor"}, {"keep_dtype": {"*": "half_float"}}])
def test_a_dtype_that_does_not_exist_is_refused(settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="gather"):
        GatherParams(**settings)  # type: ignore[arg-type]


# -- groups -------------------------------------------------------------------------------------------------------


def test_fused_sets_are_groups_in_layer_order_wherever_their_parts_stand() -> None:
    order = ["lm_head.weight", "l.1.k_proj.weight", "l.0.up_proj.weight", "l.0.q_proj.weight", "l.1.q_proj.weight"]
    order += ["l.0.gate_proj.weight", "embed.weight", "l.0.k_proj.bias"]
    specs = [TensorSpec(n, torch.float32, (1,)) for n in order]
    groups = group_specs(specs, [("tied.weight", "embed.weight")])
    assert [[t.name for t in g.tensors] for g in groups] == [
        ["embed.weight"],
        ["l.0.up_proj.weight", "l.0.gate_proj.weight"],
        ["l.0.q_proj.weight", "l.0.k_proj.bias"],
        ["l.1.k_proj.weight", "l.1.q_proj.weight"],
        ["lm_head.weight"],
    ]
    assert groups[0].aliases == (("tied.weight", "embed.weight"),)


def test_groups_are_the_same_on_every_call() -> None:
    model = Model()
    first: list[GroupSpec] = [g.spec for g in gather(model, ONE_DTYPE)]
    assert first == [g.spec for g in gather(model, ONE_DTYPE)]
