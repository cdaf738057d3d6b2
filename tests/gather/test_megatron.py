"""Real Megatron-core models on gloo: what is gathered is the HF checkpoint that they were loaded from, bit by bit."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from gather.streams import collect, differences, rank_run
from gather.world import World
from stages.flow import TensorSpec
from stages.gather import GatherParams

if importlib.util.find_spec("megatron") is None:
    pytest.skip("needs the megatron extra (megatron-core)", allow_module_level=True)

LAYERS, HIDDEN, HEADS, KV, SIZE, INNER, EXPERTS, VOCAB, PADDED = 4, 32, 4, 2, 8, 48, 4, 515, 520
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_head_dim": 8, "qk_pos_emb_head_dim": 4, "v_head_dim": 8}


@dataclass(frozen=True)
class Kind:
    """A family of models."""

    name: str
    tied: bool = False
    bias: bool = False
    norm: bool = False
    moe: bool = False
    latent: bool = False


LLAMA, QWEN2 = Kind("llama"), Kind("qwen2", tied=True, bias=True)
QWEN3, QWEN3_MOE = Kind("qwen3", norm=True, tied=True), Kind("qwen3_moe", norm=True, moe=True)
DEEPSEEK = Kind("deepseek", moe=True, latent=True)


def checkpoint(kind: Kind) -> dict[str, torch.Tensor]:
    """HF tensors of a model of this kind, random but the same everywhere."""
    random = torch.Generator().manual_seed(11)
    made: dict[str, torch.Tensor] = {}

    def add(name: str, *shape: int) -> None:
        made[name] = torch.randn(shape, generator=random)

    def mlp(prefix: str) -> None:
        add(f"{prefix}.gate_proj.weight", INNER, HIDDEN)
        add(f"{prefix}.up_proj.weight", INNER, HIDDEN)
        add(f"{prefix}.down_proj.weight", HIDDEN, INNER)

    add("model.embed_tokens.weight", VOCAB, HIDDEN)
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        attention = f"{layer}.self_attn"
        add(f"{layer}.input_layernorm.weight", HIDDEN)
        add(f"{layer}.post_attention_layernorm.weight", HIDDEN)
        if kind.latent:
            both = LATENT["qk_head_dim"] + LATENT["qk_pos_emb_head_dim"]
            add(f"{attention}.q_a_proj.weight", LATENT["q_lora_rank"], HIDDEN)
            add(f"{attention}.q_a_layernorm.weight", LATENT["q_lora_rank"])
            add(f"{attention}.q_b_proj.weight", HEADS * both, LATENT["q_lora_rank"])
            rows = LATENT["kv_lora_rank"] + LATENT["qk_pos_emb_head_dim"]
            add(f"{attention}.kv_a_proj_with_mqa.weight", rows, HIDDEN)
            add(f"{attention}.kv_a_layernorm.weight", LATENT["kv_lora_rank"])
            rows = HEADS * (LATENT["qk_head_dim"] + LATENT["v_head_dim"])
            add(f"{attention}.kv_b_proj.weight", rows, LATENT["kv_lora_rank"])
            add(f"{attention}.o_proj.weight", HIDDEN, HEADS * LATENT["v_head_dim"])
        else:
            for name, heads in (("q", HEADS), ("k", KV), ("v", KV)):
                add(f"{attention}.{name}_proj.weight", heads * SIZE, HIDDEN)
                if kind.bias:
                    add(f"{attention}.{name}_proj.bias", heads * SIZE)
            add(f"{attention}.o_proj.weight", HIDDEN, HEADS * SIZE)
            if kind.norm:
                add(f"{attention}.q_norm.weight", SIZE)
                add(f"{attention}.k_norm.weight", SIZE)
        if not kind.moe:
            mlp(f"{layer}.mlp")
            continue
        add(f"{layer}.mlp.gate.weight", EXPERTS, HIDDEN)
        for e in range(EXPERTS):
            mlp(f"{layer}.mlp.experts.{e}")
        if kind.latent:
            made[f"{layer}.mlp.gate.e_score_correction_bias"] = torch.linspace(6.817, 7.063, EXPERTS)
            mlp(f"{layer}.mlp.shared_experts")
    add("model.norm.weight", HIDDEN)
    if not kind.tied:
        add("lm_head.weight", VOCAB, HIDDEN)
    return made


@contextlib.contextmanager
def without_cuda() -> Iterator[None]:
    """Stand-ins for what megatron-core 0.16 asks of a GPU while it builds a model."""
    import megatron.core.transformer.moe.moe_utils as moe_utils
    import megatron.core.transformer.multi_latent_attention as latent_attention
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    with (
        mock.patch.object(torch.cuda, "current_device", lambda: "cpu"),
        mock.patch.object(torch.Tensor, "cuda", lambda self: self),
        mock.patch.object(latent_attention, "HAVE_TE", False),
        mock.patch.object(moe_utils, "te_general_gemm", None, create=True),
        mock.patch.object(CudaRNGStatesTracker, "fork", lambda self, *_, **__: contextlib.nullcontext()),
    ):
        yield


class NoAttention(torch.nn.Module):
    """Latent attention's core needs Transformer Engine; it has no weights."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()


def build(kind: Kind, tp: int, pp: int, ep: int, chunks: int = 1) -> list[Any]:
    """This rank's chunks of the model, with whatever weights."""
    from megatron.core import parallel_state as state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    state.destroy_model_parallel()
    virtual = chunks if chunks > 1 else None
    state.initialize_model_parallel(tp, pp, virtual_pipeline_model_parallel_size=virtual, expert_model_parallel_size=ep)
    settings: dict[str, Any] = {
        "num_layers": LAYERS,
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "ffn_hidden_size": INNER,
        "use_cpu_initialization": True,
        "add_bias_linear": False,
        "add_qkv_bias": kind.bias,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "normalization": "RMSNorm",
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "virtual_pipeline_model_parallel_size": virtual,
        "expert_model_parallel_size": ep,
        "pipeline_dtype": torch.float32,
    }
    if kind.moe:
        settings |= {"num_moe_experts": EXPERTS, "moe_ffn_hidden_size": INNER, "moe_router_topk": 2}
    if kind.latent:
        settings |= LATENT | {"multi_latent_attention": True, "rope_type": "rope", "qk_layernorm": True}
        settings |= {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
        settings |= {"moe_shared_expert_intermediate_size": INNER}
        config = MLATransformerConfig(**settings)
    else:
        config = TransformerConfig(num_query_groups=KV, kv_channels=SIZE, qk_layernorm=kind.norm, **settings)
    spec = get_gpt_layer_local_spec(
        num_experts=EXPERTS if kind.moe else None,
        moe_grouped_gemm=False,
        qk_layernorm=kind.norm or kind.latent,
        multi_latent_attention=kind.latent,
        normalization="RMSNorm",
    )
    if kind.latent:
        spec.submodules.self_attention.submodules.core_attention = NoAttention
    return [
        GPTModel(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=PADDED,
            max_sequence_length=16,
            pre_process=state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=i if virtual else None),
            post_process=state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=i if virtual else None),
            share_embeddings_and_output_weights=kind.tied,
            position_embedding_type="rope",
            vp_stage=i if virtual else None,
        )
        for i in range(chunks)
    ]


def load(chunks: list[Any], hf: dict[str, torch.Tensor]) -> None:
    """Write the checkpoint into a model, with no help from the code under test: whole tensors first, then this rank's cut."""
    from megatron.core import parallel_state as state

    tp, mine = state.get_tensor_model_parallel_world_size(), state.get_tensor_model_parallel_rank()

    def padded(name: str) -> torch.Tensor:
        return torch.cat([hf[name], torch.full((PADDED - VOCAB, HIDDEN), 99.0)])

    def glu(prefix: str) -> torch.Tensor:
        gate, up = (hf[f"{prefix}.{n}_proj.weight"].chunk(tp)[mine] for n in ("gate", "up"))
        return torch.cat([gate, up])

    def qkv(attention: str, what: str) -> torch.Tensor:
        q, k, v = (hf[f"{attention}.{n}_proj.{what}"].unflatten(0, (KV, -1)) for n in "qkv")
        return torch.cat([q, k, v], 1).flatten(0, 1).chunk(tp)[mine]

    def rows(name: str) -> torch.Tensor:
        return hf[name].chunk(tp)[mine]

    def columns(name: str) -> torch.Tensor:
        return hf[name].chunk(tp, 1)[mine]

    for model in chunks:
        own = {n: p for n, p in (*model.named_parameters(), *model.named_buffers()) if p is not None}
        want: dict[str, torch.Tensor] = {}
        if model.pre_process:
            want["embedding.word_embeddings.weight"] = padded("model.embed_tokens.weight").chunk(tp)[mine]
        if model.post_process:
            want["decoder.final_layernorm.weight"] = hf["model.norm.weight"]
            head = "lm_head.weight" if "lm_head.weight" in hf else "model.embed_tokens.weight"
            if "output_layer.weight" in own:
                want["output_layer.weight"] = padded(head).chunk(tp)[mine]
        for i, layer in enumerate(model.decoder.layers):
            here, there = f"decoder.layers.{i}", f"model.layers.{layer.layer_number - 1}"
            attention = f"{here}.self_attention"
            want[f"{here}.input_layernorm.weight"] = hf[f"{there}.input_layernorm.weight"]
            want[f"{here}.pre_mlp_layernorm.weight"] = hf[f"{there}.post_attention_layernorm.weight"]
            want[f"{attention}.linear_proj.weight"] = columns(f"{there}.self_attn.o_proj.weight")
            if f"{attention}.linear_qkv.weight" in own:
                want[f"{attention}.linear_qkv.weight"] = qkv(f"{there}.self_attn", "weight")
                if f"{there}.self_attn.q_proj.bias" in hf:
                    want[f"{attention}.linear_qkv.bias"] = qkv(f"{there}.self_attn", "bias")
                for n in "qk":
                    if f"{there}.self_attn.{n}_norm.weight" in hf:
                        want[f"{attention}.{n}_layernorm.weight"] = hf[f"{there}.self_attn.{n}_norm.weight"]
            else:
                for n, name in {
                    "linear_q_down_proj": "q_a_proj",
                    "q_layernorm": "q_a_layernorm",
                    "linear_q_up_proj": "q_b_proj",
                    "linear_kv_down_proj": "kv_a_proj_with_mqa",
                    "kv_layernorm": "kv_a_layernorm",
                    "linear_kv_up_proj": "kv_b_proj",
                }.items():
                    full = hf[f"{there}.self_attn.{name}.weight"]
                    cut = full.shape != own[f"{attention}.{n}.weight"].shape
                    want[f"{attention}.{n}.weight"] = full.chunk(tp)[mine] if cut else full
            if f"{here}.mlp.linear_fc1.weight" in own:
                want[f"{here}.mlp.linear_fc1.weight"] = glu(f"{there}.mlp")
                want[f"{here}.mlp.linear_fc2.weight"] = columns(f"{there}.mlp.down_proj.weight")
                continue
            want[f"{here}.mlp.router.weight"] = hf[f"{there}.mlp.gate.weight"]
            if f"{there}.mlp.gate.e_score_correction_bias" in hf:
                want[f"{here}.mlp.router.expert_bias"] = hf[f"{there}.mlp.gate.e_score_correction_bias"]
                want[f"{here}.mlp.shared_experts.linear_fc1.weight"] = glu(f"{there}.mlp.shared_experts")
                down = columns(f"{there}.mlp.shared_experts.down_proj.weight")
                want[f"{here}.mlp.shared_experts.linear_fc2.weight"] = down
            first = EXPERTS // state.get_expert_model_parallel_world_size() * state.get_expert_model_parallel_rank()
            for e in range(EXPERTS // state.get_expert_model_parallel_world_size()):
                expert, name = f"{here}.mlp.experts.local_experts.{e}", f"{there}.mlp.experts.{first + e}"
                both = [hf[f"{name}.{n}_proj.weight"].chunk(expert_tp())[expert_rank()] for n in ("gate", "up")]
                want[f"{expert}.linear_fc1.weight"] = torch.cat(both)
                down = hf[f"{name}.down_proj.weight"].chunk(expert_tp(), 1)[expert_rank()]
                want[f"{expert}.linear_fc2.weight"] = down
        left = set(dict(model.named_parameters())) - set(want)
        assert not left, left
        with torch.no_grad():
            for n, value in want.items():
                own[n].copy_(value)


def expert_tp() -> int:
    from megatron.core import parallel_state as state

    return int(state.get_expert_tensor_parallel_world_size())


def expert_rank() -> int:
    from megatron.core import parallel_state as state

    return int(state.get_expert_tensor_parallel_rank())


Layout = tuple[Kind, int, int, int, int]  # kind, tp, pp, ep, chunks per stage


def check(rank: int, layouts: list[Layout]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind, tp, pp, ep, chunks in layouts:
        name = f"{kind.name} tp={tp} pp={pp} ep={ep} chunks={chunks}"
        try:
            hf = checkpoint(kind)
            with without_cuda():
                model = build(kind, tp, pp, ep, chunks)
            load(model, hf)
            run = rank_run((0,))
            run.expected = {n: TensorSpec(n, t.dtype, tuple(t.shape)) for n, t in hf.items()}
            stage = GatherParams(batch=20_000)
            made = collect(stage, model if chunks > 1 else model[0], run)
            if kind.tied and rank == 0:
                hf["lm_head.weight"] = hf["model.embed_tokens.weight"]
            if wrong := differences(made, hf if rank == 0 else {}):
                found[name] = wrong
            stage.close()
        except BaseException as error:
            raise RuntimeError(name) from error
    from megatron.core import parallel_state as state

    state.destroy_model_parallel()
    assert dist.is_initialized()
    return found


TWO: list[Layout] = [
    (LLAMA, 2, 1, 1, 1),
    (LLAMA, 1, 2, 1, 1),
    (LLAMA, 1, 1, 1, 1),
    (QWEN2, 2, 1, 1, 1),
    (QWEN2, 1, 2, 1, 2),
    (QWEN3, 1, 2, 1, 1),
    (QWEN3, 2, 1, 1, 1),
    (QWEN3_MOE, 1, 1, 2, 1),
    (QWEN3_MOE, 1, 2, 1, 1),
    (DEEPSEEK, 1, 1, 2, 1),
    (DEEPSEEK, 1, 2, 1, 1),
]
FOUR: list[Layout] = [
    (LLAMA, 2, 2, 1, 1),
    (LLAMA, 2, 1, 1, 1),
    (QWEN2, 1, 4, 1, 1),
    (QWEN3, 2, 2, 1, 2),
    (QWEN3_MOE, 1, 2, 2, 1),
    (QWEN3_MOE, 1, 1, 4, 1),
    (QWEN3_MOE, 2, 1, 2, 1),
    (DEEPSEEK, 1, 2, 2, 1),
    (DEEPSEEK, 2, 2, 1, 1),
]


def test_two_ranks_give_back_the_checkpoint(world: World) -> None:
    assert world.run(2, check, TWO) == [{}] * 2


def test_four_ranks_give_back_the_checkpoint(world: World) -> None:
    assert world.run(4, check, FOUR) == [{}] * 4
