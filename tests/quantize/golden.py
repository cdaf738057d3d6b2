"""Golden bytes: `python -m tests.quantize.golden` writes golden.json anew, from tests/quantize/reference.py alone.

Per format, case and part: dtype, shape and the bytes; in hexadecimal up to 256 of them, beyond that as their SHA-256.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np

from . import reference
from .inputs import CASES, Case
from .reference import Array, Parts

FILE = Path(__file__).with_name("golden.json")

# name -> (format, its settings, columns must be a multiple of, the reference)
FORMATS: dict[str, tuple[str, dict[str, object], int, Callable[[Array], Parts]]] = {
    "fp8_block": ("fp8_block", {}, 1, reference.fp8_block),
    "fp8_block 64x128": ("fp8_block", {"block": [64, 128]}, 1, partial(reference.fp8_block, block=(64, 128))),
    "fp8_block_ue8m0": ("fp8_block_ue8m0", {}, 1, reference.fp8_block_ue8m0),
    "fp8_tensor": ("fp8_tensor", {}, 1, reference.fp8_tensor),
    "fp8_channel": ("fp8_channel", {}, 1, reference.fp8_channel),
    "mxfp8": ("mxfp8", {}, 32, reference.mxfp8),
    "nvfp4": ("nvfp4", {}, 16, reference.nvfp4),
    "int4": ("int4", {}, 128, reference.int4),
    "int4 groups of 32, zero points": (
        "int4",
        {"group_size": 32, "symmetric": False},
        32,
        partial(reference.int4, group=32, symmetric=False),
    ),
    "int4 whole rows": ("int4", {"group_size": -1}, 1, partial(reference.int4, group=-1)),
}


def combinations() -> Iterator[tuple[str, Case]]:
    """Every format with every case whose shape it can hold."""
    return ((name, case) for name, entry in FORMATS.items() for case in CASES if case.shape[1] % entry[2] == 0)


def compute(name: str, case: Case) -> Parts:
    return FORMATS[name][3](case.weight.astype(np.float64))


def describe(part: Array) -> list[object]:
    data = np.ascontiguousarray(part).tobytes()
    shown = data.hex() if len(data) <= 256 else "sha256:" + hashlib.sha256(data).hexdigest()
    return [part.dtype.itemsize, list(part.shape), shown]


def main() -> None:
    table = {
        f"{name} {case}": {part: describe(made) for part, made in compute(name, case).items()}
        for name, case in combinations()
    }
    lines = ",\n".join(f" {json.dumps(key)}: {json.dumps(value)}" for key, value in table.items())
    FILE.write_text("{\n" + lines + "\n}\n")


if __name__ == "__main__":
    main()
