"""Weights to quantize, made from integers, so that they are the same on every machine; as float32 numpy arrays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .reference import Array, bf16


def bell(shape: tuple[int, int], seed: int, width: float = 0.02) -> Array:
    """Roughly normal: sums of four 16-bit numbers out of splitmix64."""
    with np.errstate(over="ignore"):
        z = np.arange(shape[0] * shape[1], dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z += np.uint64((seed + 1) * 0xD1B54A32D192ED03 % 2**64)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    total = sum(((z >> np.uint64(16 * i)) & np.uint64(0xFFFF)).astype(np.int64) for i in range(4)) - 2 * 0xFFFF
    return (total / (2 * 0xFFFF) * 1.73 * width).astype(np.float32).reshape(shape)


def zeros(shape: tuple[int, int], seed: int) -> Array:
    return np.zeros(shape, np.float32)


def one_hot(shape: tuple[int, int], seed: int) -> Array:
    weight = np.zeros(shape, np.float32)
    weight[shape[0] // 2, shape[1] // 2] = 1.0
    return weight


def tiny(shape: tuple[int, int], seed: int) -> Array:
    return bell(shape, seed, 1e-6)


def tiniest(shape: tuple[int, int], seed: int) -> Array:
    return bell(shape, seed, 1e-30)


def huge(shape: tuple[int, int], seed: int) -> Array:
    return bell(shape, seed, 1e37)


def spread_out(shape: tuple[int, int], seed: int) -> Array:
    """Magnitudes of neighbours that differ by up to 2^24."""
    powers = np.exp2((np.arange(shape[0] * shape[1]) * 7 % 25 - 24).reshape(shape))
    return (bell(shape, seed, 1.0) * powers).astype(np.float32)


def ties(shape: tuple[int, int], seed: int) -> Array:
    """Halfway between codes where the scale is one: multiples of 1/16 and of 8, up to 448."""
    steps = np.arange(shape[0] * shape[1]).reshape(shape)
    values = np.where(steps % 2 == 0, (steps % 97) / 16, (steps % 57) * 8.0)
    weight = np.where(steps % 3 == 0, -values, values).astype(np.float32)
    weight.reshape(-1)[0] = 448.0
    return weight


@dataclass(frozen=True)
class Case:
    make: Callable[[tuple[int, int], int], Array]
    shape: tuple[int, int]
    rounded: bool = False  # to bfloat16

    def __str__(self) -> str:
        return f"{self.make.__name__}-{self.shape[0]}x{self.shape[1]}" + ("-bf16" if self.rounded else "")

    @property
    def weight(self) -> Array:
        made = self.make(self.shape, seed=7)
        return bf16(made).astype(np.float32) if self.rounded else made


KINDS = (bell, zeros, one_hot, tiny, tiniest, huge, spread_out, ties)
CASES = (
    *(Case(kind, (2, 128)) for kind in (bell, ties)),  # small enough for golden.json to hold every byte
    *(Case(kind, (24, 256)) for kind in KINDS),
    *(Case(kind, (24, 256), rounded=True) for kind in (bell, tiny, spread_out)),
    Case(bell, (1, 7168)),
    Case(bell, (7168, 1)),
    Case(bell, (130, 200)),
    Case(bell, (128, 128)),
    Case(bell, (576, 7168), rounded=True),
    Case(spread_out, (300, 2560)),
)
