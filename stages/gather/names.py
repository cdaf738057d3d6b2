"""Names: wrapper segments out, fused sets together, layers in order."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase

from stages.errors import PlanMismatch

# Whole segments that wrappers add: torch.compile, FSDP1, activation checkpointing, (Distributed)DataParallel.
WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})

# Projections that engines load into one fused parameter: they travel together. SGLang fuses q_a and kv_a only when both are in
# the same load call; vLLM leaves the rest of a half-sent set uninitialised.
_FUSED = {
    "q_proj": "qkv",
    "k_proj": "qkv",
    "v_proj": "qkv",
    "gate_proj": "gate_up",
    "up_proj": "gate_up",
    "q_a_proj": "qkv_a",
    "kv_a_proj_with_mqa": "qkv_a",
}
# Everything that belongs to a weight: its bias and the scales of a quantized one.
_PARTS = re.compile(
    r"\.(weight|bias|weight_scale|weight_scale_inv|weight_scale_2|weight_global_scale|input_scale|weight_packed"
    r"|weight_shape|weight_zero_point|weight_g_idx)$"
)


def strip_wrappers(names: Iterable[str]) -> dict[str, str]:
    """`{name: name without wrapper segments}`; a leading `module.` goes too when every name has it.

    Raises PlanMismatch when two names become one.
    """
    names = list(names)
    parts = {n: [s for s in n.split(".") if s not in WRAPPERS] for n in names}
    while parts and all(p[0] == "module" and len(p) > 1 for p in parts.values()):
        parts = {n: p[1:] for n, p in parts.items()}
    clean = {n: ".".join(p) for n, p in parts.items()}
    owner: dict[str, str] = {}
    for name, short in clean.items():
        if short in owner:
            raise PlanMismatch(f"{owner[short]} and {name} are both {short} once wrapper segments are removed")
        owner[short] = name
    return clean


def fusion_key(name: str) -> str:
    """The set of tensors that this one must travel with: equal keys, one group.

    `a.0.self_attn.q_proj.weight` and `a.0.self_attn.v_proj.bias` share a key, a weight and its scale too.
    """
    module = _PARTS.sub("", name)
    parent, _, leaf = module.rpartition(".")
    return f"{parent}.{_FUSED[leaf]}" if leaf in _FUSED else module


def stream_order(name: str) -> tuple[bool, int, int]:
    """Sort key: what comes before the layers, the layers by number, what comes after; all routed experts behind that.

    Experts are most of a mixture's bytes and all alike, and expert parallelism gives them other owners than the rest: kept
    apart, a batch of them is spread over all owners, and a dense one is not cut by them.
    """
    match = re.search(r"\.(\d+)\.", name)
    if match:
        return ".experts." in name, 1, int(match[1])
    first = "embed" in name or "wte" in name
    return False, 0 if first else 2, 0


def match_dtype(name: str, patterns: dict[str, str]) -> str | None:
    """The value of the first glob pattern that matches the whole name."""
    return next((value for pattern, value in patterns.items() if fnmatchcase(name, pattern)), None)
