"""KV of earlier prompts, kept in blocks and reused: what makes a missing cache flush visible."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

import torch
import xxhash

BLOCK = 16

# per layer: keys and values [1, heads, BLOCK, head size]
Layers = list[tuple[torch.Tensor, torch.Tensor]]


class PrefixCache:
    """Blocks of 16 tokens, each found by the hash of all tokens up to its end; the least recently used goes first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._blocks: OrderedDict[bytes, Layers] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def match(self, tokens: list[int], limit: int) -> list[Layers]:
        """The longest known chain of blocks at the start of `tokens`, covering at most `limit` tokens."""
        found: list[Layers] = []
        for end, key in _keys(tokens):
            if end > limit or key not in self._blocks:
                break
            self._blocks.move_to_end(key)
            found.append(self._blocks[key])
        return found

    def insert(self, tokens: list[int], layers: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Keep copies of all full blocks of a sequence whose KV was computed; known blocks stay as they are."""
        for end, key in _keys(tokens):
            if key not in self._blocks:
                cut = slice(end - BLOCK, end)
                self._blocks[key] = [(k[:, :, cut].clone(), v[:, :, cut].clone()) for k, v in layers]
        while len(self._blocks) > self.capacity:
            self._blocks.popitem(last=False)

    def clear(self) -> None:
        self._blocks.clear()


def _keys(tokens: list[int]) -> Iterator[tuple[int, bytes]]:
    """`(end, key)` of every full block."""
    running = xxhash.xxh3_128()
    for end in range(BLOCK, len(tokens) + 1, BLOCK):
        for token in tokens[end - BLOCK : end]:
            running.update(token.to_bytes(8, "little"))
        yield end, running.digest()
