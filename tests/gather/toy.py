"""A small model with the names and fused experts of a real one, quick to build, and what its HF checkpoint would hold."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

VOCAB, HIDDEN, INNER = 515, 24, 36  # nothing divides by the number of ranks for long


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self, name, nn.Linear(HIDDEN, HIDDEN, bias=name == "q_proj"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.o_proj(self.q_proj(x) * self.k_proj(x) + self.v_proj(x))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, INNER, bias=False)
        self.up_proj = nn.Linear(HIDDEN, INNER, bias=False)
        self.down_proj = nn.Linear(INNER, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Experts(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(count, 2 * INNER, HIDDEN))
        self.down_proj = nn.Parameter(torch.randn(count, HIDDEN, INNER))


class Moe(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, count, bias=False)
        self.gate.register_buffer("e_score_correction_bias", torch.linspace(6.817, 7.063, count))
        self.experts = Experts(count)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = torch.einsum("bh,eih->beih", x, self.experts.gate_up_proj).sum(-1).chunk(2, -1)
        return torch.einsum("bei,ehi->bh", functional.silu(gate) * up, self.experts.down_proj)


class Layer(nn.Module):
    def __init__(self, experts: int) -> None:
        super().__init__()
        self.self_attn = Attention()
        self.mlp: nn.Module = Moe(experts) if experts else Mlp()
        self.norm = nn.LayerNorm(HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x)) + self.self_attn(x)


class Body(nn.Module):
    def __init__(self, layers: int, experts: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Layer(experts) for _ in range(layers))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)


class Toy(nn.Module):
    """`experts` > 0 replaces each MLP by that many fused experts with a router and its correction bias."""

    def __init__(self, tied: bool = False, experts: int = 0, layers: int = 2, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.model = Body(layers, experts)
        self.lm_head = nn.Linear(HIDDEN, VOCAB, bias=False)
        if tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.model.embed_tokens(ids)
        for layer in self.model.layers:
            x = layer(x)
        return self.lm_head(x)


def hf_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """What a checkpoint of an unsharded model holds: fused experts one by one, tied names included."""
    made = {}
    for name, tensor in model.state_dict().items():
        if name.endswith("experts.gate_up_proj"):
            for e, both in enumerate(tensor):
                made |= {
                    name.replace("gate_up_proj", f"{e}.gate_proj.weight"): both[:INNER].clone(),
                    name.replace("gate_up_proj", f"{e}.up_proj.weight"): both[INNER:].clone(),
                }
        elif name.endswith("experts.down_proj"):
            made |= {name.replace("down_proj", f"{e}.down_proj.weight"): t.clone() for e, t in enumerate(tensor)}
        else:
            made[name] = tensor.clone()
    return made
