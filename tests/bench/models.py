"""Tensor lists of real models: `(HF name, shape)`, all bf16."""

from __future__ import annotations

import math

import torch

Spec = list[tuple[str, tuple[int, ...]]]


def qwen3_0p6b() -> Spec:
    """Qwen3-0.6B with a tied head: 310 tensors, 1.19 GB; one of them, the embedding, is 311 MB."""
    hidden, layers, mlp, vocab, heads, kv, dim = 1024, 28, 3072, 151936, 16, 8, 128
    spec: Spec = [("model.embed_tokens.weight", (vocab, hidden))]
    for layer in range(layers):
        p = f"model.layers.{layer}."
        spec += [
            (p + "self_attn.q_proj.weight", (heads * dim, hidden)),
            (p + "self_attn.k_proj.weight", (kv * dim, hidden)),
            (p + "self_attn.v_proj.weight", (kv * dim, hidden)),
            (p + "self_attn.o_proj.weight", (hidden, heads * dim)),
            (p + "self_attn.q_norm.weight", (dim,)),
            (p + "self_attn.k_norm.weight", (dim,)),
            (p + "mlp.gate_proj.weight", (mlp, hidden)),
            (p + "mlp.up_proj.weight", (mlp, hidden)),
            (p + "mlp.down_proj.weight", (hidden, mlp)),
            (p + "input_layernorm.weight", (hidden,)),
            (p + "post_attention_layernorm.weight", (hidden,)),
        ]
    return [*spec, ("model.norm.weight", (hidden,))]


def moe_10k() -> Spec:
    """A mixture of experts in small pieces: 10,168 tensors, 1.13 GB, 9,984 of them of 106 kB."""
    hidden, inner, layers, experts = 512, 104, 26, 128
    spec: Spec = [("model.embed_tokens.weight", (8192, hidden))]
    for layer in range(layers):
        p = f"model.layers.{layer}."
        spec += [(p + f"self_attn.{n}_proj.weight", (hidden, hidden)) for n in "qkvo"]
        spec += [
            (p + "input_layernorm.weight", (hidden,)),
            (p + "post_attention_layernorm.weight", (hidden,)),
            (p + "mlp.gate.weight", (experts, hidden)),
        ]
        for e in range(experts):
            spec += [
                (p + f"mlp.experts.{e}.gate_proj.weight", (inner, hidden)),
                (p + f"mlp.experts.{e}.up_proj.weight", (inner, hidden)),
                (p + f"mlp.experts.{e}.down_proj.weight", (hidden, inner)),
            ]
    return [*spec, ("model.norm.weight", (hidden,))]


def quick() -> Spec:
    """Something small, 67 MB, for a look whether everything runs."""
    return [(f"model.layers.{i}.mlp.up_proj.weight", (1024, 1024)) for i in range(32)]


MODELS = {"qwen3-0.6b": qwen3_0p6b, "moe-10k": moe_10k, "quick": quick}


def arena(spec: Spec) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """One touched block of memory, uint8, and every tensor of the spec as a view of it, at multiples of 64 bytes."""
    sizes = [-(-2 * math.prod(shape) // 64) * 64 for _, shape in spec]
    block = torch.zeros(sum(sizes), dtype=torch.uint8)
    views = {
        name: part[: 2 * math.prod(shape)].view(torch.bfloat16).view(shape)
        for (name, shape), part in zip(spec, block.split(sizes), strict=True)
    }
    return block, views


class Weights(torch.nn.Module):
    """A module that holds tensors under the names of a spec, all in one `arena`; `seed` decides their values."""

    def __init__(self, spec: Spec, seed: int) -> None:
        super().__init__()
        self.block, views = arena(spec)
        generator = torch.Generator().manual_seed(seed)
        noise = (torch.randn(1 << 20, generator=generator) * 0.02).to(torch.bfloat16)
        for index, (name, tensor) in enumerate(views.items()):
            for part in tensor.view(-1).split(noise.numel()):
                part.copy_(noise[: part.numel()])
            tensor.view(-1)[0] = float(index % 100 + 1 + seed)
            self._add(name, torch.nn.Parameter(tensor, requires_grad=False))

    def _add(self, name: str, parameter: torch.nn.Parameter) -> None:
        *path, leaf = name.split(".")
        module: torch.nn.Module = self
        for part in path:
            if part not in module._modules:
                module.add_module(part, torch.nn.Module())
            child = module._modules[part]
            assert child is not None
            module = child
        module.register_parameter(leaf, parameter)
