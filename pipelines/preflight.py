"""Preflight: compare what is planned with what the engines expect, before a byte moves.

Engines answer most of these mismatches with success and wrong output, or by dying; so this is where users are protected.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from stages.errors import PreflightError
from stages.flow import Plan, TensorSpec, dtype_name
from stages.gather.names import fusion_key

# Parameters that checkpoints may hold and engines skip by design.
_SKIPPED_SUFFIXES = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")
_SAMPLED = 50  # unknown names that are compared with every missing one


def check(plan: Plan, expected: Mapping[str, TensorSpec], config: Mapping[str, Any], engine: str) -> None:
    """Raise PreflightError listing every mismatch between the plan and `expected` (HF name -> dtype and shape).

    Tied names may be sent or left out. Floating-point dtypes of two bytes and more may differ from each other only where the
    engine casts, which is lossy or surprising, so they must not; fp8 against anything else is always wrong.
    """
    sent = {t.name: t for t in plan.tensors}
    tied = {alias for group in plan.groups for alias, _ in group.aliases}
    engine_ties = any(c.get("tie_word_embeddings") for c in (config, config.get("text_config") or {}))
    if engine_ties:
        tied.add("lm_head.weight")
    unknown = [n for n in sent if n not in expected and n not in tied and not n.endswith(_SKIPPED_SUFFIXES)]
    missing = [n for n in expected if n not in sent and n not in tied and not n.endswith(_SKIPPED_SUFFIXES)]
    problems = [f"unknown name: {n}" for n in unknown] + [f"missing: {n}" for n in missing]
    for name, spec in sent.items():
        if name in expected:
            problems += _spec_problems(spec, expected[name])
    problems += _fusion_problems(sent, expected)
    if not engine_ties:
        stale = sorted(alias for alias in tied if alias in expected and alias not in sent)
        problems += [
            f"tied here, a tensor of its own in the engine, which would keep the old values: {n}" for n in stale
        ]
    if problems:
        hints = _hints(unknown, missing)
        quantized = config.get("quantization_config")
        if quantized and any(word in p for p in problems for word in ("float8", "_scale", "_packed")):
            method = quantized.get("quant_method", "unknown")
            hints.append(
                f"hint: the engine serves a checkpoint quantized with {method}; use quantize=auto, and quantize.skip for "
                f"modules that it keeps wide"
            )
        raise PreflightError(engine, problems, hints)


def taken_wide(expected: Mapping[str, TensorSpec], plan: Plan, on_load: frozenset[str]) -> Mapping[str, TensorSpec]:
    """`expected` for an engine that quantizes the weights `on_load` itself: their sent dtype, without their scales."""
    if not on_load:
        return expected
    wide = {t.name: t for t in plan.tensors if t.name in on_load and t.dtype.is_floating_point and t.dtype.itemsize > 1}
    scales = {name + "_scale_inv" for name in wide}
    return {
        name: replace(spec, dtype=wide[name].dtype) if name in wide else spec
        for name, spec in expected.items()
        if name not in scales
    }


def _hints(unknown: list[str], missing: list[str]) -> list[str]:
    """What may explain many mismatches at once."""
    prefix = _prefix_between(unknown, missing)
    if prefix is None:
        return []
    ours, theirs = (repr(p) if p else "nothing" for p in prefix)
    return [
        f"hint: where names here begin with {ours}, the engine's begin with {theirs}; add a Rename stage to the recipe"
    ]


def _prefix_between(unknown: list[str], missing: list[str]) -> tuple[str, str] | None:
    """The change of prefix that explains most of the names, if one explains half of those that could match."""
    candidates = set()
    for ours in unknown[:: len(unknown) // _SAMPLED + 1]:
        theirs = max(missing, key=lambda name: len(_common_tail(ours, name)), default="")
        if tail := _common_tail(ours, theirs):
            candidates.add((ours.removesuffix(tail), theirs.removesuffix(tail)))
    wanted = set(missing)
    explained = {
        (ours, theirs): sum(theirs + n.removeprefix(ours) in wanted for n in unknown if n.startswith(ours))
        for ours, theirs in sorted(candidates)
    }
    best = max(explained, key=lambda pair: explained[pair], default=None)
    if best is None or 2 * explained[best] < min(len(unknown), len(missing)):
        return None
    return best


def _common_tail(a: str, b: str) -> str:
    left, right = a.split("."), b.split(".")
    count = 0
    while count < min(len(left), len(right)) and left[-1 - count] == right[-1 - count]:
        count += 1
    return ".".join(left[len(left) - count :])


def _spec_problems(ours: TensorSpec, theirs: TensorSpec) -> list[str]:
    problems = []
    if ours.shape != theirs.shape:
        problems.append(f"shape: {ours.name} is {list(ours.shape)}, the engine has {list(theirs.shape)}")
    if ours.dtype != theirs.dtype:
        problems.append(
            f"dtype: {ours.name} is {dtype_name(ours.dtype)}, the engine has {dtype_name(theirs.dtype)} "
            f"(gather.dtype=auto casts to it where that is a plain cast)"
        )
    return problems


def _fusion_problems(sent: Mapping[str, TensorSpec], expected: Mapping[str, TensorSpec]) -> list[str]:
    """Sets that engines fuse must come whole: a half-sent one leaves uninitialised memory behind."""
    sets: dict[str, list[str]] = {}
    for name in expected:
        sets.setdefault(fusion_key(name), []).append(name)
    problems = []
    for names in sets.values():
        here = [n for n in names if n in sent]
        if len(names) > 1 and here and len(here) < len(names):
            problems.append(f"half of a fused set: {here} without {[n for n in names if n not in sent]}")
    return problems
