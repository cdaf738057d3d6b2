"""The bytes of every format are the committed ones, and those are what an independent implementation computes."""

from __future__ import annotations

import hashlib
import json

import pytest
import torch

from .golden import FILE, FORMATS, combinations, compute, describe
from .inputs import Case
from .made import bytes_of, parts_of, stage_of

GOLDEN = json.loads(FILE.read_text())
ALL = [*combinations()]


@pytest.mark.parametrize(("name", "case"), ALL, ids=[f"{name} {case}" for name, case in ALL])
def test_bytes_are_golden(name: str, case: Case) -> None:
    kind, settings, _, _ = FORMATS[name]
    made = parts_of(stage_of(kind, **settings), torch.from_numpy(case.weight.copy()))
    found = {}
    for part, tensor in made.items():
        data = bytes_of(tensor)
        text = data.hex() if len(data) <= 256 else "sha256:" + hashlib.sha256(data).hexdigest()
        found[part] = [tensor.dtype.itemsize, list(tensor.shape), text]
    assert found == GOLDEN[f"{name} {case}"]


def test_every_golden_entry_is_tested() -> None:
    assert {f"{name} {case}" for name, case in ALL} == set(GOLDEN)


@pytest.mark.parametrize("name", FORMATS)
def test_golden_bytes_are_those_of_the_reference(name: str) -> None:
    for key, case in ALL:
        if key == name and case.shape[0] * case.shape[1] < 100_000:
            assert {p: describe(a) for p, a in compute(name, case).items()} == GOLDEN[f"{name} {case}"], case
