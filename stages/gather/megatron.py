"""Megatron-core GPT models: tensor, pipeline and expert parallel parameters by their HF names.

Every rank describes what it has: layers are numbered over all pipeline stages, experts over all expert-parallel ranks, and
how tensor parallelism cut a parameter stands on the parameter. Seen in megatron-core 0.16.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from stages.errors import PlanMismatch
from stages.flow import TensorSpec
from stages.gather.layout import Box, Cut, Description, Leaf, Part, Spans, Spread, whole

# A parameter of a layer -> the HF tensors that it holds. Several names: rows one after the other (GLU) or, for `linear_qkv`,
# interleaved by kv group. With Transformer Engine the norms are part of the linear layer behind them.
_ATTENTION: dict[str, tuple[str, ...]] = {
    "input_layernorm.weight": ("input_layernorm.weight",),
    "self_attention.linear_qkv.layer_norm_weight": ("input_layernorm.weight",),
    "self_attention.linear_qkv.weight": (
        "self_attn.q_proj.weight",
        "self_attn.k_proj.weight",
        "self_attn.v_proj.weight",
    ),
    "self_attention.linear_qkv.bias": ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
    "self_attention.q_layernorm.weight": ("self_attn.q_norm.weight",),
    "self_attention.k_layernorm.weight": ("self_attn.k_norm.weight",),
    "self_attention.linear_proj.weight": ("self_attn.o_proj.weight",),
    "self_attention.linear_proj.bias": ("self_attn.o_proj.bias",),
}
_LATENT_ATTENTION: dict[str, tuple[str, ...]] = {
    "input_layernorm.weight": ("input_layernorm.weight",),
    "self_attention.linear_q_proj.weight": ("self_attn.q_proj.weight",),
    "self_attention.linear_q_down_proj.weight": ("self_attn.q_a_proj.weight",),
    "self_attention.q_layernorm.weight": ("self_attn.q_a_layernorm.weight",),
    "self_attention.linear_q_up_proj.layer_norm_weight": ("self_attn.q_a_layernorm.weight",),
    "self_attention.linear_q_up_proj.weight": ("self_attn.q_b_proj.weight",),
    "self_attention.linear_kv_down_proj.weight": ("self_attn.kv_a_proj_with_mqa.weight",),
    "self_attention.kv_layernorm.weight": ("self_attn.kv_a_layernorm.weight",),
    "self_attention.linear_kv_up_proj.layer_norm_weight": ("self_attn.kv_a_layernorm.weight",),
    "self_attention.linear_kv_up_proj.weight": ("self_attn.kv_b_proj.weight",),
    "self_attention.linear_proj.weight": ("self_attn.o_proj.weight",),
}
_MLP: dict[str, tuple[str, ...]] = {
    "pre_mlp_layernorm.weight": ("post_attention_layernorm.weight",),
    "mlp.linear_fc1.layer_norm_weight": ("post_attention_layernorm.weight",),
    "mlp.linear_fc1.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.linear_fc2.weight": ("mlp.down_proj.weight",),
    "mlp.router.weight": ("mlp.gate.weight",),
    "mlp.router.expert_bias": ("mlp.gate.e_score_correction_bias",),
    "mlp.shared_experts.linear_fc1.weight": (
        "mlp.shared_experts.gate_proj.weight",
        "mlp.shared_experts.up_proj.weight",
    ),
    "mlp.shared_experts.linear_fc2.weight": ("mlp.shared_experts.down_proj.weight",),
    "mlp.experts.#.linear_fc1.weight": ("mlp.experts.#.gate_proj.weight", "mlp.experts.#.up_proj.weight"),
    "mlp.experts.#.linear_fc2.weight": ("mlp.experts.#.down_proj.weight",),
}
_OUTSIDE: dict[str, str] = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
_TABLES = {  # by config.multi_latent_attention
    False: _ATTENTION | _MLP,  # Llama, Qwen2, Qwen3, Qwen3-MoE
    True: _LATENT_ATTENTION | _MLP,  # DeepSeek-V2 and -V3
}

# One expert among those of this rank: a module of its own, or one of many weights of a grouped linear layer.
_EXPERT = (
    re.compile(r"^mlp\.experts\.local_experts\.(?P<local>\d+)\.(?P<rest>linear_fc[12]\.weight)$"),
    re.compile(r"^mlp\.experts\.(?P<rest>linear_fc[12]\.weight)(?P<local>\d+)$"),
)
_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.(.+)$")


def models_in(module: torch.nn.Module) -> list[Any]:
    """The Megatron GPT models in a module and its wrappers; none where Megatron was never imported."""
    gpt = sys.modules.get("megatron.core.models.gpt.gpt_model")
    return [] if gpt is None else [m for m in module.modules() if isinstance(m, gpt.GPTModel)]


def describe_megatron(models: Sequence[Any], rank: int, expected: Mapping[str, TensorSpec] | None) -> Description:
    """What this rank's model chunks hold. The vocabulary's padding goes where `expected` knows the real size.

    Raises PlanMismatch for parameters that the table does not know.
    """
    made = Description()
    for model in models:
        _Chunk(model, rank, expected or {}, made).describe()
    return made


class _Chunk:
    """One GPTModel: the layers of one (virtual) pipeline stage."""

    def __init__(self, model: Any, rank: int, expected: Mapping[str, TensorSpec], made: Description) -> None:
        self._model, self._config = model, model.config
        self._rank, self._expected, self._made = rank, expected, made
        self._table = _TABLES[bool(self._config.multi_latent_attention)]
        state: Any = sys.modules["megatron.core.parallel_state"]
        self._dense = _ranks(state.get_tensor_model_parallel_group())
        self._expert = _ranks(state.get_expert_tensor_parallel_group())

    def describe(self) -> None:
        for name, tensor in self._tensors():
            if (match := _LAYER.match(name)) is not None:
                self._layer(name, self._model.decoder.layers[int(match[1])], match[2], tensor)
            elif name == "output_layer.weight" and self._tied:
                continue  # the last stage's copy of the embedding
            elif name in _OUTSIDE:
                self._add(_OUTSIDE[name], tensor, (_OUTSIDE[name],), self._dense)
            else:
                raise _unknown(name)
        if self._tied and self._model.post_process:
            self._made.aliases.append(("lm_head.weight", "model.embed_tokens.weight"))

    @property
    def _tied(self) -> bool:
        return bool(self._model.share_embeddings_and_output_weights)

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._model.named_parameters()
        yield from ((n, b) for n, b in self._model.named_buffers() if n.endswith(".expert_bias") and b is not None)

    def _layer(self, name: str, layer: Any, rest: str, tensor: torch.Tensor) -> None:
        prefix, group = f"model.layers.{layer.layer_number - 1}", self._dense
        expert = next((m for pattern in _EXPERT if (m := pattern.match(rest)) is not None), None)
        number = ""
        if expert is not None:
            number, group = str(layer.mlp.local_expert_indices[int(expert["local"])]), self._expert
            rest = f"mlp.experts.#.{expert['rest']}"
        hf = self._table.get(rest)
        if hf is None:
            raise _unknown(name)
        names = tuple(f"{prefix}.{n.replace('#', number)}" for n in hf)
        self._add(f"{prefix}.{rest.replace('#', number)}", tensor, names, group)

    def _add(self, key: str, tensor: torch.Tensor, names: tuple[str, ...], group: tuple[int, ...]) -> None:
        shape, spread = list(tensor.shape), None
        if getattr(tensor, "tensor_model_parallel", False):
            dim = int(getattr(tensor, "partition_dim", 0))
            shape[dim] *= len(group)
            spread = Spread((len(group),), group, (Cut(dim, 2 if len(names) == 2 else 1),))
        full = tuple(shape)
        self._made.store(key, tensor.detach(), full, spread, self._rank)
        for name, rows in zip(names, self._rows(key, full, names), strict=True):
            box: Box = (rows, *whole(full[1:]))
            size = (sum(stop - start for start, stop in rows), *full[1:])
            self._made.leaves.append(Leaf(name, tensor.dtype, size, (Part(key, box),)))

    def _rows(self, key: str, shape: tuple[int, ...], names: tuple[str, ...]) -> list[Spans]:
        """Which rows of a parameter each of its HF tensors is."""
        rows = shape[0]
        if len(names) == 3:
            return self._qkv_rows(key, rows)
        if len(names) == 2:
            return [((0, rows // 2),), ((rows // 2, rows),)]
        if names[0] in ("model.embed_tokens.weight", "lm_head.weight") and names[0] in self._expected:
            rows = min(rows, self._expected[names[0]].shape[0])
        return [((0, rows),)]

    def _qkv_rows(self, key: str, rows: int) -> list[Spans]:
        """Per kv group: its query heads, its key head, its value head."""
        config = self._config
        groups, size = config.num_query_groups, config.kv_channels
        queries = config.num_attention_heads // groups * size
        step = queries + 2 * size
        if rows != groups * step:
            raise PlanMismatch(f"{key}: {rows} rows are not {groups} groups of {step} (num_query_groups, kv_channels)")
        starts = range(0, rows, step)
        return [
            tuple((s, s + queries) for s in starts),
            tuple((s + queries, s + queries + size) for s in starts),
            tuple((s + queries + size, s + step) for s in starts),
        ]


def _ranks(group: Any) -> tuple[int, ...]:
    import torch.distributed as dist

    return tuple(dist.get_process_group_ranks(group))


def _unknown(name: str) -> PlanMismatch:
    return PlanMismatch(f"{name}: no HF name is known for this Megatron parameter; see stages/gather/megatron.py")
