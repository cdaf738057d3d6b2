"""Tiny checkpoints, written once per session with transformers. `a` and `b` differ in every parameter."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from pipelines.engine.weights import quantize

VOCABULARY = 512
_COMMON = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 1024,
    "initializer_range": 0.3,  # large, so that two models never agree on the next token by chance
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


@dataclass(frozen=True)
class Folders:
    """Where the checkpoints of one session are."""

    qwen3_a: Path
    qwen3_b: Path
    tied: Path
    llama: Path
    moe_a: Path
    moe_b: Path
    fp8_a: Path
    fp8_b: Path


def write_all(root: Path) -> Folders:
    for seed, letter in enumerate("ab"):
        qwen3 = Qwen3Config(**_COMMON, tie_word_embeddings=False)
        _write(root / f"qwen3_{letter}", Qwen3ForCausalLM, qwen3, seed)
        _write(root / f"moe_{letter}", Qwen3MoeForCausalLM, Qwen3MoeConfig(**_COMMON, **_EXPERTS), seed)
        _quantize(root / f"qwen3_{letter}", root / f"fp8_{letter}")
    _write(root / "tied", Qwen3ForCausalLM, Qwen3Config(**_COMMON, tie_word_embeddings=True), 2)
    _write(root / "llama", LlamaForCausalLM, LlamaConfig(**_COMMON), 3)
    return Folders(*(root / name for name in Folders.__dataclass_fields__))


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def _write(folder: Path, model_class: type, config: object, seed: int) -> None:
    torch.manual_seed(seed)
    model = model_class(config)
    for parameter in model.parameters():
        if parameter.dim() == 1:  # norms start as ones in every model
            parameter.data.uniform_(0.5, 1.5)
    model.save_pretrained(folder)


def _quantize(source: Path, target: Path) -> None:
    """A block-fp8 twin: every projection as codes and scales."""
    target.mkdir()
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [32, 32]}
    (target / "config.json").write_text(json.dumps(config))
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in tensors_of(source).items():
        if name.endswith("_proj.weight"):
            tensors[name], tensors[f"{name}_scale_inv"] = quantize(tensor, (32, 32))
        else:
            tensors[name] = tensor
    save_file(tensors, target / "model.safetensors")
