"""Which modules are quantized: by name, by whole path segments, from the engine's own lists."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from stages.errors import ConfigError
from stages.gather.names import fusion_key

# What no engine quantizes, whatever its lists say: embeddings, heads, routers, small projections that DeepSeek, Qwen3-Next
# and Mamba keep wide. A whole last segment each: `gate` is a router, `gate_proj` is not.
_KEPT_LEAVES = frozenset(
    {"embed_tokens", "embeddings", "word_embeddings", "wte", "wpe", "lm_head", "output_head", "score", "classifier"}
    | {"gate", "router", "shared_expert_gate", "eh_proj", "weights_proj", "conv1d"}
    | {"in_proj_a", "in_proj_b", "in_proj_ba"}
)
_KEPT_ANYWHERE = frozenset(
    {"visual", "vision_tower", "vision_model", "vision_encoder", "multi_modal_projector", "audio_tower"}
)

# Names under which engines' lists know what checkpoints hold in parts.
_FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
    "q_a_proj": "fused_qkv_a_proj_with_mqa",
    "kv_a_proj_with_mqa": "fused_qkv_a_proj_with_mqa",
}


@dataclass(frozen=True, slots=True)
class Rules:
    """`ignored` and `targets` in the engine's own words, `skipped` in the user's; empty targets mean every module.

    A rule is a module's exact name, a prefix of whole segments, or `re:` and a regular expression that must match from
    the start. `skipped`, and `ignored` where `inside` says so, may also be a run of whole segments anywhere in the name.
    """

    ignored: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    inside: bool = True
    skipped: tuple[str, ...] = ()

    @classmethod
    def hf(cls, ignored: Iterable[str]) -> Rules:
        """`modules_to_not_convert` or `ignored_layers`: `mlp.gate` stands for that module of every layer."""
        return cls(tuple(ignored))

    @classmethod
    def compressed(cls, ignored: Iterable[str], targets: Iterable[str]) -> Rules:
        """compressed-tensors' `ignore` and `targets`. Raises ConfigError for a class of modules other than Linear."""
        names = []
        for target in targets:
            if target == "Linear":
                return cls(tuple(ignored), (), inside=False)
            if not target.startswith("re:") and "." not in target:
                raise ConfigError(
                    f"quantization_config targets the class {target!r}; only Linear, names and re: can be told apart"
                )
            names.append(target)
        return cls(tuple(ignored), tuple(names), inside=False)

    def wants(self, module: str) -> bool:
        """Whether the engine keeps this module's weight quantized."""
        if (
            always_kept(module)
            or _any(self.skipped, module, inside=True)
            or _any(self.ignored, module, inside=self.inside)
        ):
            return False
        return not self.targets or _any(self.targets, module, inside=False)


def matches(rule: str, module: str, *, inside: bool = False) -> bool:
    """Whether one rule (see Rules) matches a module's name."""
    if rule.startswith("re:"):
        return re.match(rule[3:], module) is not None
    run = "." + rule.strip(".") + "."
    where = "." + module + "."
    return run in where if inside else where.startswith(run)


def _any(rules: Iterable[str], module: str, *, inside: bool) -> bool:
    parent, _, leaf = module.rpartition(".")
    names = (module, f"{parent}.{_FUSED[leaf]}") if leaf in _FUSED else (module,)
    return any(matches(rule, name, inside=inside) for rule in rules for name in names)


def always_kept(module: str) -> bool:
    """Modules that stay as they are in every engine: embeddings, heads, norms, routers, towers of other modalities."""
    segments = module.split(".")
    leaf = segments[-1]
    return leaf in _KEPT_LEAVES or leaf.endswith("norm") or not _KEPT_ANYWHERE.isdisjoint(segments)


def check_whole(decisions: Iterable[tuple[str, bool]]) -> None:
    """Raise ConfigError where engines fuse modules of which some are quantized and some are not."""
    sets: dict[str, dict[str, bool]] = {}
    for module, wanted in decisions:
        sets.setdefault(fusion_key(f"{module}.weight"), {})[module] = wanted
    for members in sets.values():
        if len(set(members.values())) > 1:
            yes = [m for m, wanted in members.items() if wanted]
            no = [m for m, wanted in members.items() if not wanted]
            raise ConfigError(
                f"engines fuse {yes} with {no}: quantize all of them or none (ignore lists, quantize.skip)"
            )
