"""Weights are addressed by checkpoint names, written in place, and described by one digest."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from pipelines.engine.checkpoint import Checkpoint
from pipelines.engine.model import ServedModel
from pipelines.engine.weights import ShapeMismatchError, UnknownNameError, Weights, quantize
from stages.digest import tensor_digest, weights_digest
from stages.errors import ConfigError
from tests.engine.checkpoints import Folders, tensors_of
from tests.engine.client import PROMPT


def logits(model: ServedModel) -> torch.Tensor:
    return model.forward(PROMPT, model.new_cache())


@pytest.mark.parametrize("name", ["qwen3_a", "tied", "llama", "moe_a"])
def test_a_served_model_computes_what_transformers_computes(folders: Folders, name: str) -> None:
    folder = getattr(folders, name)
    reference = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        expected = reference(torch.tensor([PROMPT])).logits[0, -1]
    torch.testing.assert_close(logits(ServedModel(str(folder), "auto", "cpu")), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("before", "after"), [("qwen3_a", "qwen3_b"), ("moe_a", "moe_b"), ("fp8_a", "fp8_b")])
def test_writing_every_tensor_of_another_checkpoint_makes_it_that_model(
    folders: Folders, before: str, after: str
) -> None:
    model = ServedModel(str(getattr(folders, before)), "auto", "cpu")
    other = ServedModel(str(getattr(folders, after)), "auto", "cpu")
    for name, tensor in tensors_of(getattr(folders, after)).items():
        assert model.weights.apply(name, tensor) is None
    model.weights.refresh()
    assert model.weights.digests() == other.weights.digests()
    assert torch.equal(logits(model), logits(other))


def test_experts_have_names_of_their_own(folders: Folders) -> None:
    model = ServedModel(str(folders.moe_a), "auto", "cpu")
    stored = tensors_of(folders.moe_a)
    assert set(model.weights.tensors) == set(stored)
    assert all(torch.equal(model.weights.tensors[name], stored[name]) for name in stored)
    gate = "model.layers.1.mlp.experts.2.gate_proj.weight"
    fused = model.module.get_submodule("model.layers.1.mlp.experts").gate_up_proj
    model.weights.apply(gate, torch.full((32, 64), 7.0))
    assert bool((fused[2, :32] == 7).all())
    assert not bool((fused[2, 32:] == 7).any())


def test_a_tied_head_is_an_alias(folders: Folders) -> None:
    model = ServedModel(str(folders.tied), "auto", "cpu")
    assert model.weights.tied == {"lm_head.weight": "model.embed_tokens.weight"}
    assert "lm_head.weight" not in model.weights.tensors
    model.weights.apply("lm_head.weight", torch.zeros(512, 64))
    assert not bool(model.weights.tensors["model.embed_tokens.weight"].any())


def test_wrong_names_and_shapes_are_refused_before_anything_is_written(folders: Folders) -> None:
    weights = Weights.replica(str(folders.qwen3_a), "auto", "cpu", {})
    before = weights.digests()
    with pytest.raises(UnknownNameError, match="model.nothing"):
        weights.apply("model.nothing", torch.zeros(1))
    with pytest.raises(ShapeMismatchError, match=r"\[64\], got \[1\]"):
        weights.apply("model.norm.weight", torch.zeros(1))
    assert weights.digests() == before


def test_another_dtype_is_cast_and_reported(folders: Folders) -> None:
    weights = Weights.replica(str(folders.qwen3_a), "auto", "cpu", {})
    value = torch.rand(64).bfloat16()
    assert weights.apply("model.norm.weight", value) == "model.norm.weight was cast from bfloat16 to float32"
    assert torch.equal(weights.tensors["model.norm.weight"], value.float())


def test_replica_and_model_have_the_same_digest(folders: Folders) -> None:
    model = ServedModel(str(folders.moe_a), "auto", "cpu").weights
    replica = Weights.replica(str(folders.moe_a), "auto", "cpu", {})
    assert model.digest(model.digests()) == replica.digest(replica.digests())
    assert model.digest(model.digests()) == weights_digest(tensors_of(folders.moe_a).items())


def test_the_digest_sees_names_dtypes_shapes_and_bytes_but_not_order_or_strides() -> None:
    a, b = torch.rand(2, 3), torch.rand(4)
    digest = weights_digest([("a", a), ("b", b)])
    assert weights_digest([("b", b), ("a", a.t().contiguous().t())]) == digest
    others = [
        [("a", a), ("c", b)],
        [("a", a), ("b", b.view(torch.int32))],
        [("a", a.view(3, 2)), ("b", b)],
        [("a", a), ("b", b + 1)],
        [("a", a)],
    ]
    assert digest not in [weights_digest(other) for other in others]
    assert tensor_digest(torch.tensor(1.0)) != tensor_digest(torch.tensor(2.0))


def test_fp8_weights_are_served_dequantized(folders: Folders) -> None:
    exact = ServedModel(str(folders.qwen3_a), "auto", "cpu")
    model = ServedModel(str(folders.fp8_a), "auto", "cpu")
    name = "model.layers.0.self_attn.q_proj.weight"
    codes, scales = quantize(exact.weights.tensors[name], (32, 32))
    assert torch.equal(model.weights.tensors[name].view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(model.weights.tensors[f"{name}_scale_inv"], scales)
    served = model.module.get_parameter(name)
    torch.testing.assert_close(served, exact.weights.tensors[name], atol=0.1, rtol=0.07)


def test_a_quantization_that_is_not_block_fp8_is_refused(folders: Folders, tmp_path: object) -> None:
    checkpoint = Checkpoint(folders.fp8_a)
    checkpoint.config["quantization_config"] = {"quant_method": "awq"}
    with pytest.raises(ConfigError, match="awq"):
        _ = checkpoint.block_fp8


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path: object) -> None:
    with pytest.raises(ConfigError, match="not a Hugging Face checkpoint"):
        Checkpoint(str(tmp_path))
