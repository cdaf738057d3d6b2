"""What strangers might send."""

from __future__ import annotations

import base64
import pickle
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st

from pipelines.engine.pickles import Reader

EDGES = st.sampled_from(
    [
        *(0, 1, -1, 2, 255, 65536, 1 << 31, 1 << 62, 1 << 63, 1 << 64, -(1 << 63), 10**400),
        *(0.5, -0.0, 1e308, 5e-324, float("inf"), float("nan")),
        *("", "0", "1", "true", "x" * 300, "\x00", "\udcff", "../../etc/passwd", "{}", "9" * 5000, "nan", "torch"),
        *(None, True, False),
    ]
)
SCALARS = EDGES | st.integers(-4, 40) | st.text(max_size=8) | st.floats()
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)


def mutated(good: Any) -> st.SearchStrategy[Any]:
    """A JSON value that is right but for one to three places, each of which became something else or went away."""
    return st.builds(
        _mutate, st.just(good), st.lists(st.tuples(st.randoms(use_true_random=False), JSON), min_size=1, max_size=3)
    )


def _mutate(good: Any, changes: list[tuple[Any, Any]]) -> Any:
    value = good
    for random, other in changes:
        value = _replace(value, random, other)
    return value


def _replace(value: Any, random: Any, other: Any) -> Any:
    if isinstance(value, dict) and value and random.random() < 0.85:
        key = random.choice(sorted(value, key=str))
        if random.random() < 0.1:
            return {k: v for k, v in value.items() if k != key}
        return value | {key: _replace(value[key], random, other)}
    if isinstance(value, list) and value and random.random() < 0.85:
        at = random.randrange(len(value))
        if random.random() < 0.1:
            return value[:at] + value[at + 1 :]
        return [*value[:at], _replace(value[at], random, other), *value[at + 1 :]]
    return other


def damaged(good: bytes) -> st.SearchStrategy[bytes]:
    """Bytes that are right but for a cut, an insertion, or some changed ones."""

    def cut(at: int, length: int, new: bytes) -> bytes:
        return good[:at] + new + good[at + length :]

    return st.builds(cut, st.integers(0, len(good)), st.integers(0, 8), st.binary(max_size=8))


GOOD_PICKLES = [
    pickle.dumps([("w", torch.arange(4.0)), ("v", torch.ones(2, 2, dtype=torch.bfloat16))], protocol)
    for protocol in (2, 4)
]
_NAMES = [
    b"\x8c\x05torch\x8c\x04Size\x93",
    b"\x8c\x05types\x8c\x0fSimpleNamespace\x93",
    b"\x8c\x05torch\x8c\x06Tensor\x93",
    b"\x8c\x05torch\x8c\x08bfloat16\x93",
    b"ctorch._utils\n_rebuild_tensor_v2\n",
    b"ctorch._utils\n_rebuild_tensor_v3\n",
    b"ctorch.storage\n_load_from_bytes\n",
    b"ctorch.storage\nUntypedStorage\n",
    b"ccollections\nOrderedDict\n",
    b"c_codecs\nencode\n",
    b"ctorch.multiprocessing.reductions\nrebuild_storage_filename\n",
    b"ctorch.multiprocessing.reductions\nrebuild_cuda_tensor\n",
    b"cos\nsystem\n",
]
_PIECES = st.one_of(
    st.sampled_from(sorted(Reader.dispatch)).map(lambda code: bytes([code])),
    st.sampled_from(_NAMES),
    st.sampled_from(
        [b")", b"(", b"t", b"R", b"b", b"}", b"]", b"N", b"\x94", b"h\x00", b"h\x01", b"\x85", b"\x86", b"\x81", b"."]
    ),
    st.integers(0, 255).map(lambda n: b"K" + bytes([n])),
    st.text("abcxyz/_", max_size=6).map(lambda s: b"\x8c" + bytes([len(s)]) + s.encode()),
    st.binary(max_size=6).map(lambda b: b"C" + bytes([len(b)]) + b),
    st.binary(max_size=3),
)
PICKLES = st.one_of(
    st.binary(max_size=60),
    st.lists(_PIECES, max_size=25).map(lambda pieces: b"\x80\x04" + b"".join(pieces) + b"."),
    *(damaged(good) for good in GOOD_PICKLES),
)


def encoded(payloads: st.SearchStrategy[bytes]) -> st.SearchStrategy[str]:
    return payloads.map(lambda data: base64.b64encode(data).decode())


def bodies(
    names: list[str], special: dict[str, st.SearchStrategy[Any]] | None = None
) -> st.SearchStrategy[dict[str, Any]]:
    """JSON objects over these names."""
    value: Callable[[str], st.SearchStrategy[Any]] = lambda name: (special or {}).get(name, JSON) | JSON  # noqa: E731
    pair = st.sampled_from(names).flatmap(lambda name: st.tuples(st.just(name), value(name)))
    return st.lists(pair, max_size=6).map(dict)
