"""Tiny random checkpoints in the Hugging Face layout, with a tokenizer; made offline, the same bytes every time.

Each tensor is drawn from (seed, its name) and config.json is written by hand, so nothing depends on installed
libraries. Two recipes that differ in `seed` are two trained versions of one model; two that differ in `fp8` hold the
same weights.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

BLOCK = 128
VOCABULARY = 512
SPECIALS = ("<pad>", "<bos>", "<eos>", "<unk>")
CLASSES = {"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}

State = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Size:
    """Multiples of 128 also when split over two ranks, so that fp8 blocks never straddle a rank's edge."""

    hidden: int = 256
    mlp: int = 512
    layers: int = 2
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 64
    experts: int = 4
    expert_mlp: int = 256


TINY = Size()
SMALL = Size(hidden=1024, mlp=2048, layers=8, heads=16, kv_heads=8, experts=8, expert_mlp=512)


@dataclass(frozen=True)
class Recipe:
    arch: str = "qwen3"
    seed: int = 0
    dtype: str = "bfloat16"
    fp8: bool = False
    tied: bool = False
    size: Size = TINY

    def __str__(self) -> str:
        marks = [self.arch, self.dtype, *(m for m in ("fp8", "tied") if getattr(self, m)), f"seed{self.seed}"]
        return "-".join(marks + ([] if self.size == TINY else [f"hidden{self.size.hidden}"]))


def write_checkpoint(folder: Path, recipe: Recipe, edit: Callable[[State], None] | None = None) -> Path:
    """Write the checkpoint; `edit` may change the tensors first, to make one that no engine should be given."""
    folder.mkdir(parents=True)
    state = tensors(recipe)
    if edit is not None:
        edit(state)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    (folder / "config.json").write_text(json.dumps(config(recipe) | ids, indent=1))
    (folder / "generation_config.json").write_text(json.dumps(ids))
    _write_tokenizer(folder)
    return folder


def config(recipe: Recipe) -> dict[str, Any]:
    size = recipe.size
    out: dict[str, Any] = {
        "architectures": [CLASSES[recipe.arch]],  # vLLM 0.32 silently serves a pooling model without it
        "model_type": recipe.arch,
        "vocab_size": VOCABULARY,
        "hidden_size": size.hidden,
        "intermediate_size": size.mlp,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": size.head_dim,
        "max_position_embeddings": 1024,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": recipe.tied,
        "use_cache": True,
        "initializer_range": 0.02,
        "torch_dtype": recipe.dtype,
    }
    if recipe.arch == "llama":
        out["mlp_bias"] = False
    else:
        out |= {"use_sliding_window": False, "sliding_window": None}
    if recipe.arch == "qwen3_moe":
        out |= {
            "num_experts": size.experts,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": size.expert_mlp,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
            "output_router_logits": False,
            "router_aux_loss_coef": 0.001,
        }
    if recipe.fp8:
        out["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
        }
    return out


def shapes(recipe: Recipe) -> dict[str, tuple[int, ...]]:
    """Name -> shape, in the order of a forward pass."""
    size = recipe.size
    out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, size.hidden)}
    for layer in range(size.layers):
        prefix = f"model.layers.{layer}."
        out[prefix + "input_layernorm.weight"] = (size.hidden,)
        for name, heads in (("q", size.heads), ("k", size.kv_heads), ("v", size.kv_heads)):
            out[f"{prefix}self_attn.{name}_proj.weight"] = (heads * size.head_dim, size.hidden)
        if recipe.arch != "llama":
            for name in ("q_norm", "k_norm"):
                out[f"{prefix}self_attn.{name}.weight"] = (size.head_dim,)
        out[prefix + "self_attn.o_proj.weight"] = (size.hidden, size.heads * size.head_dim)
        out[prefix + "post_attention_layernorm.weight"] = (size.hidden,)
        mlps = {"mlp.": size.mlp}
        if recipe.arch == "qwen3_moe":
            out[prefix + "mlp.gate.weight"] = (size.experts, size.hidden)
            mlps = {f"mlp.experts.{expert}.": size.expert_mlp for expert in range(size.experts)}
        for mlp, inner in mlps.items():
            out[f"{prefix}{mlp}gate_proj.weight"] = out[f"{prefix}{mlp}up_proj.weight"] = (inner, size.hidden)
            out[f"{prefix}{mlp}down_proj.weight"] = (size.hidden, inner)
    out["model.norm.weight"] = (size.hidden,)
    if not recipe.tied:
        out["lm_head.weight"] = (VOCABULARY, size.hidden)
    return out


def tensors(recipe: Recipe) -> State:
    state: State = {}
    for name, shape in shapes(recipe).items():
        tensor = _draw(name, shape, recipe.seed).to(getattr(torch, recipe.dtype))
        if recipe.fp8 and name.endswith("_proj.weight"):
            state[name], state[name + "_scale_inv"] = _quantize(tensor)
        else:
            state[name] = tensor
    return state


def _draw(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    tensor: torch.Tensor = torch.randn(
        shape, generator=torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    )
    if len(shape) == 1:
        return tensor * 0.1 + 1  # a norm: near one, yet of its own in every version
    if "embed_tokens" in name:
        tensor[0] = 0  # <pad>: LMDeploy zeroes its row when it loads
        return tensor
    return tensor * (2 / math.sqrt(shape[1]))  # wide enough that each layer matters for what is generated


def _quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The plainest block fp8; no shape here has a ragged edge."""
    rows, columns = (n // BLOCK for n in weight.shape)
    blocks = weight.float().view(rows, BLOCK, columns, BLOCK)
    scale = blocks.abs().amax(dim=(1, 3)).clamp_min(1e-10) / 448
    codes = (blocks / scale[:, None, :, None]).clamp(-448, 448).view(weight.shape)
    return codes.to(torch.float8_e4m3fn), scale


def _write_tokenizer(folder: Path) -> None:
    """Byte-level BPE of exactly VOCABULARY ids: specials, the bytes, then merges of two letters."""
    vocabulary = {token: i for i, token in enumerate([*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    letters = "etaoinshrdlucmfwygpbvkxqjz"
    merges = [(a, b) for a in letters for b in letters][: VOCABULARY - len(vocabulary)]
    vocabulary |= {a + b: len(vocabulary) + i for i, (a, b) in enumerate(merges)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIALS])
    tokenizer.save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 1024}
    about |= {f"{token[1:-1]}_token": token for token in SPECIALS}
    (folder / "tokenizer_config.json").write_text(json.dumps(about, indent=1))


class CheckpointCache:
    """Checkpoint folders by recipe, each written once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, recipe: Recipe) -> Path:
        path = self.folder / str(recipe)
        return path if path.exists() else write_checkpoint(path, recipe)
