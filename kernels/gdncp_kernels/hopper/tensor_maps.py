"""Tensor maps, which tell the copy engine (TMA) how a tile lies in memory.

Here are their shapes; a map is encoded when the address is known, see `launch`.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from gdncp_kernels.hopper.launch import Tile

SWIZZLED = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
SWIZZLED_FP32 = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
FLAT = NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
SQUARE_BOX, GATE_BOX, KEY_BOX = (64, 64), (1, 256), (1, 64)


@lru_cache(maxsize=1024)  # Triton checks a descriptor for longer than a launch takes
def _tile(
    name: str,
    rows: int,
    columns: int,
    dtype: torch.dtype,
    box: tuple[int, int],
    layout: NVMMASharedLayout,
    offset: int,
    stride: int | None = None,
) -> Tile:
    """[rows, columns], dense rows `stride` elements (None: `columns`) apart, starting at a multiple of 16 bytes."""
    x = torch.empty_strided((rows, columns), (stride or columns, 1), dtype=dtype, device="meta")
    return Tile(name, TensorDescriptor(x, list(x.shape), list(x.stride()), list(box), layout), offset)


def tokens(name: str, x: torch.Tensor) -> Tile:
    """q, k or v [T, heads, D] bf16 or fp16, dense tokens: one head of 64 tokens at a time."""
    return _tile(name, x.shape[0], x.shape[1] * x.shape[2], x.dtype, (64, x.shape[2]), SWIZZLED, 0, _stride(x))


def output(name: str, x: torch.Tensor) -> Tile:
    """The output [T, H, D]: 64 elements of a head of 64 tokens at a time."""
    return _tile(name, x.shape[0], x.shape[1] * x.shape[2], x.dtype, SQUARE_BOX, SWIZZLED, 0, _stride(x))


def _stride(x: torch.Tensor) -> int | None:
    return x.stride(0) if x.shape[0] > 1 else None


def heads_in_row(x: torch.Tensor, num_heads: int) -> int | None:
    """Of tokens [T, heads, D] or gates [T, heads] that are some heads of a tensor's: how many that has; else None."""
    heads = x.stride(0) // (x.shape[2] if x.dim() == 3 else 1)
    return None if x.shape[0] == 1 or heads == num_heads else heads


def solve(name: str, entries: int, dtype: torch.dtype, offset: int) -> Tile:
    """`Tiles.solve` [entries · 64, 64]: one entry at a time."""
    return _tile(name, entries * 64, 64, dtype, SQUARE_BOX, SWIZZLED, offset)


def gates(name: str, entries: int, offset: int) -> Tile:
    """`Tiles.gates` [entries, 256] fp32: one entry at a time."""
    return _tile(name, entries, 256, torch.float32, GATE_BOX, FLAT, offset)


def keys(name: str, entries: int, offset: int) -> Tile:
    """`Tiles.keys` [entries, 64] fp32: one chunk of a key head at a time."""
    return _tile(name, entries, 64, torch.float32, KEY_BOX, FLAT, offset)


def transitions(name: str, num_maps: int, k_dim: int, offset: int) -> Tile:
    """`AffineMaps.transition` [maps · H · K, K] fp32: one head of a map at a time; `num_maps` counts those."""
    return _tile(name, num_maps * k_dim, k_dim, torch.float32, (k_dim, k_dim), SWIZZLED_FP32, offset)
