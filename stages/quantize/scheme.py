"""What an engine's checkpoint says about its quantization: config.json -> a format, its sizes, and which modules."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.errors import ConfigError
from stages.quantize.modules import Rules

KNOWN = "fp8, mxfp8, compressed-tensors"


@dataclass(frozen=True, slots=True)
class Scheme:
    """`format` is the name of a file of conf/quantize. Sizes are None where the format has none."""

    format: str
    rules: Rules
    compressed: bool = False  # named as compressed-tensors does
    block: tuple[int, int] | None = None
    group_size: int | None = None
    symmetric: bool = True


def scheme_of(folder: Path) -> Scheme | None:
    """The scheme of an HF checkpoint folder, None for one that is not quantized.

    Raises ConfigError for a method, a format or an option that no stage makes: engines would take the weights as they are,
    with garbage as the result.
    """
    file = folder / "config.json"
    if not file.is_file():
        return None
    try:
        config = json.loads(file.read_text())
        text = config.get("text_config") or {}
        found = config.get("quantization_config") or text.get("quantization_config") or config.get("compression_config")
        return _scheme(found, file) if found else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError, re.error) as error:
        raise ConfigError(f"{file}: malformed: {type(error).__name__}: {error}") from error


def _scheme(found: Mapping[str, Any], file: Path) -> Scheme:
    method = found.get("quant_method")
    if method == "fp8":
        return _fp8(found, file)
    if method == "mxfp8":
        return Scheme("mxfp8", Rules.hf(_ignored(found)))
    if method == "compressed-tensors":
        return _compressed(found, file)
    raise ConfigError(f"{file}: quant_method {method!r} is none that quantize can make ({KNOWN})")


def _fp8(found: Mapping[str, Any], file: Path) -> Scheme:
    if found.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise ConfigError(f"{file}: fp8 format {found['fmt']!r} cannot be made, only e4m3")
    if found.get("activation_scheme", "dynamic") != "dynamic":
        raise ConfigError(
            f"{file}: activation_scheme {found['activation_scheme']!r} needs calibrated input scales, which no weight "
            f"update can make; serve a checkpoint with activation_scheme dynamic"
        )
    rules = Rules.hf(_ignored(found))
    size = found.get("weight_block_size")
    if size is None:
        return Scheme("fp8_tensor", rules)
    name = "fp8_block_ue8m0" if found.get("scale_fmt") == "ue8m0" else "fp8_block"
    return Scheme(name, rules, block=_pair(size, file))


def _ignored(found: Mapping[str, Any]) -> list[str]:
    return [*_texts(found.get("ignored_layers")), *_texts(found.get("modules_to_not_convert"))]


def _texts(value: object) -> list[str]:
    """A list of module names and `re:` patterns. Raises TypeError or re.error for what is none."""
    names = value or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"{str(value)[:100]!r} is no list of names")
    for name in names:
        if name.startswith("re:"):
            re.compile(name[3:])
    return names


def _compressed(found: Mapping[str, Any], file: Path) -> Scheme:
    groups = list((found.get("config_groups") or {}).values())
    if not groups:
        raise ConfigError(f"{file}: compressed-tensors without config_groups")
    ignore = _texts(found.get("ignore"))
    targets = [target for group in groups for target in _texts(group.get("targets"))]
    rules = Rules.compressed(ignore, targets)
    schemes = {_compressed_group(group, rules, file) for group in groups}
    if len(schemes) > 1:
        names = sorted({s.format for s in schemes})
        raise ConfigError(
            f"{file}: config_groups of different formats or sizes ({', '.join(names)}) cannot be made in one stage"
        )
    return schemes.pop()


def _compressed_group(group: Mapping[str, Any], rules: Rules, file: Path) -> Scheme:
    weights = group.get("weights") or {}
    inputs = group.get("input_activations") or {}
    if inputs and not inputs.get("dynamic"):
        raise ConfigError(f"{file}: static input_activations need calibrated scales, which no weight update can make")
    if weights.get("actorder"):
        raise ConfigError(
            f"{file}: actorder {weights['actorder']!r} needs calibration, which no weight update can make"
        )
    kind = (weights.get("type"), weights.get("num_bits"), weights.get("strategy"))
    size = weights.get("group_size")
    symmetric = weights.get("symmetric", True)
    if kind[:2] == ("float", 8) and symmetric:
        if kind[2] == "tensor":
            return Scheme("fp8_tensor", rules, compressed=True)
        if kind[2] == "channel":
            return Scheme("fp8_channel", rules, compressed=True)
        if kind[2] == "block":
            return Scheme("fp8_block", rules, compressed=True, block=_pair(weights.get("block_structure"), file))
        if kind[2] == "group" and size == 32 and "uint8" in str(weights.get("scale_dtype")):
            return Scheme("mxfp8", rules, compressed=True)
    if kind == ("float", 4, "tensor_group") and size == 16 and symmetric:
        return Scheme("nvfp4", rules, compressed=True)
    if kind[:2] == ("int", 4) and kind[2] in ("group", "channel"):
        whole_rows = kind[2] == "channel" or size in (None, -1)
        return Scheme(
            "int4", rules, compressed=True, group_size=-1 if whole_rows else int(size or -1), symmetric=symmetric
        )
    raise ConfigError(
        f"{file}: compressed-tensors weights of type {kind[0]!r}, {kind[1]} bits, strategy {kind[2]!r}, "
        f"group_size {size} cannot be made by quantize"
    )


def _pair(size: object, file: Path) -> tuple[int, int]:
    if isinstance(size, Sequence) and not isinstance(size, str) and len(size) == 2:
        rows, columns = (int(n) for n in size)
        if rows > 0 and columns > 0:
            return rows, columns
    raise ConfigError(f"{file}: {size!r} is no block size; expected two numbers above zero")
