"""LoRA adapters of PEFT: merged in passing, as PEFT merges them, without touching the training copy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.chains import make_run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from gather.streams import collect, differences, rank_run
from gather.toy import Toy, hf_tensors
from gather.world import World
from stages.errors import PlanMismatch
from stages.gather import GatherParams

peft = pytest.importorskip("peft", reason="needs the lora extra (peft)")


def with_adapters(base: nn.Module, **options: Any) -> nn.Module:
    """Two adapters, both active, with factors that are not zero."""
    config = peft.LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj", "down_proj", "lm_head"], **options)
    model = peft.get_peft_model(base, config)
    torch.manual_seed(7)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    return model


def merged(model: nn.Module) -> dict[str, torch.Tensor]:
    """What PEFT itself makes of it."""
    return hf_tensors(model.merge_and_unload())


def shard_peft(model: nn.Module, size: int) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (size,))
    for layer in model.base_model.model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def gathered(model: nn.Module) -> dict[str, torch.Tensor]:
    stage = GatherParams(batch=40_000)
    made = collect(stage, model, make_run())
    stage.close()
    return made


@pytest.mark.parametrize("options", [{}, {"use_rslora": True}, {"modules_to_save": ["norm"]}])
def test_merges_as_peft_does(options: dict[str, Any]) -> None:
    before = {n: p.detach().clone() for n, p in with_adapters(Toy(), **options).named_parameters()}
    model = with_adapters(Toy(), **options)
    made = gathered(model)
    assert not differences(dict(model.named_parameters()), before)
    assert not differences(made, merged(model))


def test_a_tied_head_with_an_adapter_is_no_alias() -> None:
    model = with_adapters(Toy(tied=True))
    made = gathered(model)
    base, adapter = Toy(tied=True).lm_head.weight.detach(), model.base_model.model.lm_head
    assert not differences({"": made["model.embed_tokens.weight"]}, {"": base})
    assert not differences({"": made["lm_head.weight"]}, {"": base + adapter.get_delta_weight("default").detach()})


def test_two_adapters_add_up() -> None:
    def build() -> nn.Module:
        model = with_adapters(Toy())
        model.add_adapter("second", peft.LoraConfig(r=2, lora_alpha=8, target_modules=["q_proj"]))
        for name, parameter in model.named_parameters():
            if "second" in name:
                nn.init.normal_(parameter)
        return model

    torch.manual_seed(3)
    model = build()
    one = gathered(model)
    model.base_model.set_adapter(["default", "second"])
    both = gathered(model)
    name = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(one[name], both[name])
    assert not differences(both, merged(model))


def test_bfloat16_is_rounded_once() -> None:
    made = gathered(with_adapters(Toy()).to(torch.bfloat16))
    model = with_adapters(Toy()).to(torch.bfloat16).float()
    want = {n: t.bfloat16() for n, t in merged(model).items()}
    assert not differences(made, want)


@pytest.mark.parametrize(
    ("options", "words"),
    [({"use_dora": True}, "DoRA"), ({"lora_bias": True, "target_modules": ["q_proj"]}, "bias")],
)
def test_what_is_no_plain_product_is_refused(options: dict[str, Any], words: str) -> None:
    options = {"target_modules": ["q_proj"]} | options
    model = peft.get_peft_model(Toy(), peft.LoraConfig(r=4, **options))
    with pytest.raises(PlanMismatch, match=f"q_proj.*{words}.*merge_adapter"):
        gathered(model)


def test_disabled_adapters_are_refused() -> None:
    model = with_adapters(Toy())
    with model.disable_adapter(), pytest.raises(PlanMismatch, match="disabled"):
        gathered(model)


def sharded(rank: int, size: int) -> list[str]:
    want = merged(with_adapters(Toy()))
    stage, run = GatherParams(batch=40_000), rank_run((0,))
    model = shard_peft(with_adapters(Toy()), size)
    wrong = differences(collect(stage, model, run), want if rank == 0 else {})
    stage.close()
    return wrong


def test_sharded_by_fsdp2(world: World) -> None:
    assert world.run(2, sharded, 2) == [[], []]
