"""Digests of bytes and of weights, defined once for the trainer and for every engine end of ours.

A bucket's digest is xxh3-64 over its used bytes. A tensor's digest is xxh3-128 over its contiguous bytes. The digest of
a set of weights is xxh3-128 over one line per tensor, `name dtype shape digest`, sorted by name; tied aliases are not
part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import xxhash

from stages.flow import dtype_name

# Bytes copied and hashed at a time: source and target of a piece stay in a core's own cache.
PIECE = 512 << 10


class RunningDigest:
    """xxh3-64 over bytes as they pass."""

    def __init__(self) -> None:
        self._state = xxhash.xxh3_64()
        # Takes in more bytes: anything with the buffer protocol, contiguous. Bound here, since it is called per piece.
        self.update: Callable[[Any], None] = self._state.update

    def value(self) -> int:
        return self._state.intdigest()


def bytes_digest(memory: torch.Tensor) -> int:
    """xxh3-64 over a flat uint8 tensor on the CPU, without a copy."""
    return xxhash.xxh3_64_intdigest(memory.numpy().data)


def tensor_digest(tensor: torch.Tensor) -> str:
    """xxh3-128 over a tensor's contiguous bytes, as hex; without a copy where it is contiguous and on the CPU."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu()
    return xxhash.xxh3_128_hexdigest(flat.numpy().data)


def combine_digests(lines: Iterable[tuple[str, torch.dtype, tuple[int, ...], str]]) -> str:
    """The digest of a set whose tensors were digested before: `(name, dtype, shape, tensor digest)` each."""
    ordered = sorted(lines, key=lambda line: line[0])
    text = "".join(f"{name} {dtype_name(dtype)} {list(shape)} {digest}\n" for name, dtype, shape, digest in ordered)
    return xxhash.xxh3_128_hexdigest(text.encode())


def weights_digest(pairs: Iterable[tuple[str, torch.Tensor]]) -> str:
    """The digest of a set of weights."""
    return combine_digests((name, t.dtype, tuple(t.shape), tensor_digest(t)) for name, t in pairs)
