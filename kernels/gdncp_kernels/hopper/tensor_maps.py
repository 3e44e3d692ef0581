"""Tensor maps, which tell the copy engine (TMA) how a tile lies in memory."""

from __future__ import annotations

import torch
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

SWIZZLED = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
FLAT = NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
TOKEN_BOX, SQUARE_BOX, GATE_BOX, KEY_BOX = [64, 128], [64, 64], [1, 256], [1, 64]


def _map(x: torch.Tensor, box: list[int], layout: NVMMASharedLayout) -> TensorDescriptor:
    return TensorDescriptor(x, list(x.shape), list(x.stride()), box, layout)


def tokens(x: torch.Tensor) -> TensorDescriptor:
    """q, k or v [T, heads, 128] bf16, contiguous: one head of 64 tokens at a time."""
    return _map(x.view(x.shape[0], -1), TOKEN_BOX, SWIZZLED)


def output(x: torch.Tensor) -> TensorDescriptor:
    """The output [T, H, 128]: half a head of 64 tokens at a time."""
    return _map(x.view(x.shape[0], -1), SQUARE_BOX, SWIZZLED)


def solve(x: torch.Tensor) -> TensorDescriptor:
    """`Tiles.solve` [.., 64]: one entry at a time."""
    return _map(x, SQUARE_BOX, SWIZZLED)


def gates(x: torch.Tensor) -> TensorDescriptor:
    """`Tiles.gates` [entries, 256] fp32: one entry at a time."""
    return _map(x, GATE_BOX, FLAT)


def keys(x: torch.Tensor) -> TensorDescriptor:
    """`Tiles.keys` [.., 64] fp32: one chunk of a key head at a time."""
    return _map(x, KEY_BOX, FLAT)
