"""When may shards be quantized one by one? Where no scale covers elements of two shards."""

from __future__ import annotations

from collections.abc import Sequence


def shards_quantize_alike(
    shape: tuple[int, int], shard_edges: tuple[Sequence[int], Sequence[int]], block: tuple[int, int]
) -> bool:
    """Whether quantizing the shards of a weight gives, byte for byte, the shards of the quantized weight.

    `shard_edges` are the rows and the columns at which it is cut, `block` is the part that shares one scale (see
    `Quantize.block_of`): (128, 128), a row, or the whole weight. Where this is False, gather first. Raises ValueError
    for an edge outside of the weight.
    """
    for size, edges, step in zip(shape, shard_edges, block, strict=True):
        for edge in edges:
            if not 0 <= edge <= size:
                raise ValueError(f"a shard edge at {edge} lies outside of {list(shape)}")
            if edge % step and edge != size:
                return False
    return True
