"""Every format a second time: numpy, float64, tables of representable values. Uses neither torch nor our code.

float32 results are made by rounding float64 ones, which for a single division or product of float32 numbers is exact.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Parts = dict[str, Array]  # suffix of the name -> little-endian values, fp8 as uint8


def f32(x: Any) -> Array:
    """Rounded to float32, kept in float64."""
    return np.asarray(x, dtype=np.float64).astype(np.float32).astype(np.float64)


def bf16(x: Array) -> Array:
    """Rounded to bfloat16, half to even, by integer arithmetic on the bits."""
    bits = np.asarray(x, dtype=np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return rounded.astype(np.uint32).view(np.float32).astype(np.float64)


def _e4m3_values() -> Array:
    """Magnitudes of codes 0x00 to 0x7e: subnormals of 2^-9, then eight per power of two up to 448."""
    values = []
    for code in range(0x7F):
        exponent, mantissa = code >> 3, code & 7
        values.append(mantissa * 2.0**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    return np.array(values)


E4M3 = _e4m3_values()
E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def nearest(magnitude: Array, table: Array) -> Array:
    """Index of the nearest value of the table; of two equally near, the even index."""
    above = np.clip(np.searchsorted(table, magnitude), 1, len(table) - 1)
    low, high = magnitude - table[above - 1], table[above] - magnitude
    down = (low < high) | ((low == high) & ((above - 1) % 2 == 0))
    return np.where(down, above - 1, above)


def to_e4m3(x: Array) -> Array:
    """Codes as uint8; the sign of zero is kept, as a cast keeps it."""
    x = np.clip(x, -448.0, 448.0)
    return (nearest(np.abs(x), E4M3) + 128 * np.signbit(x)).astype(np.uint8)


def _blocks(x: Array, block: tuple[int, int]) -> tuple[Array, Callable[[Array], Array]]:
    """abs-max per block, and a function that spreads one value per block over the elements."""
    rows, columns = block
    tall = np.maximum.reduceat(np.abs(x), np.arange(0, x.shape[0], rows), 0)
    amax = np.maximum.reduceat(tall, np.arange(0, x.shape[1], columns), 1)
    return amax, lambda s: np.repeat(np.repeat(s, rows, 0), columns, 1)[: x.shape[0], : x.shape[1]]


def fp8_block(x: Array, block: tuple[int, int] = (128, 128)) -> Parts:
    amax, spread = _blocks(x, block)
    scale = f32(np.maximum(amax, f32(1e-10)) / 448)
    return {"weight": to_e4m3(f32(x / spread(scale))), "weight_scale_inv": scale.astype("<f4")}


def fp8_block_ue8m0(x: Array, block: tuple[int, int] = (128, 128)) -> Parts:
    amax, spread = _blocks(x, block)
    scale = power_of_two_above(f32(np.maximum(amax, f32(1e-4)) / 448))
    return {"weight": to_e4m3(f32(x / spread(scale))), "weight_scale_inv": scale.astype("<f4")}


def power_of_two_above(scale: Array) -> Array:
    fraction, exponent = np.frexp(scale)  # fraction in [0.5, 1)
    return np.ldexp(1.0, np.maximum(np.where(fraction == 0.5, exponent - 1, exponent), -126))


def fp8_tensor(x: Array) -> Parts:
    scale = f32(np.maximum(np.abs(x).max(), f32(1e-10)) / 448)
    return {"weight": to_e4m3(f32(x / scale)), "weight_scale": scale.reshape(1).astype("<f4")}


def fp8_channel(x: Array) -> Parts:
    scale = f32(np.maximum(np.abs(x).max(1, keepdims=True), f32(1e-10)) / 448)
    return {"weight": to_e4m3(f32(x / scale)), "weight_scale": scale.astype("<f4")}


def mxfp8(x: Array) -> Parts:
    amax, spread = _blocks(x, (1, 32))
    scale = power_of_two_above(f32(np.maximum(amax, f32(1e-10)) / 448))
    exponent = (np.log2(scale).round() + 127).astype(np.uint8)
    return {"weight": to_e4m3(f32(x / spread(scale))), "weight_scale_inv": exponent}


def nvfp4(x: Array, fused: list[Array] | None = None, compressed: bool = False) -> Parts:
    """`fused` are all weights of the set that shares the global scale, x among them."""
    amax = max(np.abs(w).max() for w in fused or [x])
    amax = max(amax, float(f32(1e-10)))
    total = f32(f32(1 / amax) * 2688) if compressed else f32(amax / 2688)
    local, spread = _blocks(x, (1, 16))
    local = f32(local / 6)
    local = f32(local * total) if compressed else f32(local / total)
    codes = to_e4m3(np.clip(local, 2.0**-9, 448.0))
    stored = E4M3[codes]
    scale = f32(stored / total) if compressed else f32(stored * total)
    values = np.clip(f32(x / spread(scale)), -6, 6)
    nibbles = (nearest(np.abs(values), E2M1) + 8 * (values < 0)).astype(np.uint8)
    packed = nibbles[:, 0::2] + 16 * nibbles[:, 1::2]
    if compressed:
        names = ("weight_packed", "weight_scale", "weight_global_scale")
        return dict(zip(names, (packed, codes, total.reshape(1).astype("<f4")), strict=True))
    return {"weight": packed, "weight_scale": codes, "weight_scale_2": total.astype("<f4")}


def int4(x: Array, group: int = 128, symmetric: bool = True) -> Parts:
    group = x.shape[1] if group == -1 else group
    rows, columns = x.shape
    grouped = x.reshape(rows, columns // group, group)
    zero = np.zeros((rows, columns // group))
    if symmetric:
        scale = f32(np.maximum(np.abs(grouped).max(-1), f32(1e-10)) / 7.5)
        quotient = f32(grouped / scale[..., None])
    else:
        low, high = np.minimum(grouped.min(-1), 0), np.maximum(grouped.max(-1), 0)
        scale = f32(np.maximum(f32(high - low), f32(1e-10)) / 15)
        zero = np.rint(np.clip(f32(-8 - f32(low / scale)), -8, 7))
        quotient = f32(f32(grouped / scale[..., None]) + zero[..., None])
    codes = np.rint(np.clip(quotient, -8, 7)).astype(int).reshape(rows, columns)
    parts: Parts = {
        "weight_packed": _nibbles(codes),
        "weight_scale": scale.astype("<f4"),
        "weight_shape": np.array([rows, columns], "<i8"),
    }
    if not symmetric:
        parts["weight_zero_point"] = np.ascontiguousarray(_nibbles(zero.astype(int).T).T)
    return parts


def _nibbles(codes: Array) -> Array:
    rows, columns = codes.shape
    words = np.zeros((rows, -(-columns // 8)), dtype=np.uint64)
    for place in range(8):
        column = (codes[:, place::8] + 8).astype(np.uint64) << np.uint64(4 * place)
        words[:, : column.shape[1]] |= column
    return words.astype("<u4").view("<i4")


def dequantize_block(codes: Array, scale: Array, block: tuple[int, int] = (128, 128)) -> Array:
    values = np.where(codes & 128, -1.0, 1.0) * E4M3[codes & 127]
    spread = np.repeat(np.repeat(scale.astype(np.float64), block[0], 0), block[1], 1)
    return values * spread[: codes.shape[0], : codes.shape[1]]
