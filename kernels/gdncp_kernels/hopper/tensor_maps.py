"""Tensor maps, which tell the copy engine (TMA) how a tile lies in memory."""

from __future__ import annotations

from functools import lru_cache

import torch
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

SWIZZLED = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
SWIZZLED_FP32 = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
FLAT = NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
TOKEN_BOX, SQUARE_BOX, TRANSITION_BOX, GATE_BOX, KEY_BOX = (64, 128), (64, 64), (128, 128), (1, 256), (1, 64)


@lru_cache(maxsize=256)
def _checked(
    shape: torch.Size, dtype: torch.dtype, box: tuple[int, int], layout: NVMMASharedLayout
) -> TensorDescriptor:
    """A map of such a tensor, contiguous, whose fields are those of any other: checking them takes a while."""
    x = torch.empty(shape, dtype=dtype, device="meta")
    return TensorDescriptor(x, list(shape), list(x.stride()), list(box), layout)


def _map(x: torch.Tensor, box: tuple[int, int], layout: NVMMASharedLayout) -> TensorDescriptor:
    """x [rows, columns] contiguous, starting at a multiple of 16 bytes."""
    made = object.__new__(TensorDescriptor)
    made.__dict__.update(_checked(x.shape, x.dtype, box, layout).__dict__)
    made.base = x
    return made


def tokens(x: torch.Tensor) -> TensorDescriptor:
    """q, k or v [T, heads, 128] bf16 or fp16, contiguous: one head of 64 tokens at a time."""
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


def transitions(x: torch.Tensor) -> TensorDescriptor:
    """`AffineMaps.transition` [m, H, 128, 128] fp32: one head of a map at a time."""
    return _map(x.view(-1, x.shape[-1]), TRANSITION_BOX, SWIZZLED_FP32)
