"""What the stages share: which tokens a program works on, gates, norms, dots.

Shapes: 64 tokens a chunk, K and V the head dims, H state heads.  A state S [V, K] is held as its transpose [K, BLOCK].
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

CHUNK = tl.constexpr(64)
RESET = tl.constexpr(-1024.0)  # log gate of a reset: exp of any sum that holds one is 0, and 64 of them add exactly
SMALLEST_LOG_GATE = tl.constexpr(-87.0)  # anything below is a reset; exp(-87) is about fp32's smallest normal number
L2NORM_EPS = tl.constexpr(1e-6)
MAPS_AT_ONCE = tl.constexpr(128)


@triton.jit
def chunk_span(item, ordinal, token_start, num_tokens):
    """First token (int64) of chunk `ordinal` of an item and how many it has: 1 ... 64, or <= 0 past the item's end."""
    before = ordinal.to(tl.int64) * CHUNK
    rows = tl.minimum(tl.load(num_tokens + item) - before, CHUNK)
    return tl.load(token_start + item) + before, rows


@triton.jit
def load_rows(ptr, first_token, rows, stride, WIDTH: tl.constexpr, LENGTH: tl.constexpr = CHUNK):
    """[LENGTH, WIDTH] rows of a token tensor whose `ptr` stands at the head; those from `rows` on read as zero."""
    i = tl.arange(0, LENGTH)
    offsets = (first_token + i)[:, None] * stride + tl.arange(0, WIDTH)[None, :]
    return tl.load(ptr + offsets, mask=(i < rows)[:, None], other=0.0)


@triton.jit
def load_column(ptr, first_token, rows, stride):
    """[64] one number per token; zero past the chunk."""
    i = tl.arange(0, CHUNK)
    return tl.load(ptr + (first_token + i) * stride, mask=i < rows, other=0.0)


@triton.jit
def load_log_gate(gate, head, first_token, rows, H, LOG_SPACE: tl.constexpr, LENGTH: tl.constexpr = CHUNK):
    """[LENGTH] float64 natural log gates; RESET for resets, 0 past the chunk and without gates.

    float64 throughout: near 1 a float32 log is off by 1e-7, which thousands of tokens add up.
    """
    i = tl.arange(0, LENGTH)
    if gate is None:  # branches, not early returns: Triton 3.6 goes on compiling what follows a return
        log_alpha = tl.zeros([LENGTH], tl.float64)
    else:
        at = gate + (first_token * H + head) + i * H
        if LOG_SPACE:
            log_alpha = tl.load(at, mask=i < rows, other=0.0).to(tl.float64)
        else:
            alpha = tl.load(at, mask=i < rows, other=1.0).to(tl.float64)
            log_alpha = tl.log(tl.where(alpha == 0.0, 1e-300, alpha))  # 0 becomes a reset below
    return tl.where(log_alpha < SMALLEST_LOG_GATE, RESET, log_alpha)


@triton.jit
def load_beta(beta, head, first_token, rows, H, LENGTH: tl.constexpr = CHUNK):
    """[LENGTH] fp32 beta, ones without one; 0 past the chunk."""
    i = tl.arange(0, LENGTH)
    if beta is None:
        values = tl.where(i < rows, 1.0, 0.0)
    else:
        values = tl.load(beta + (first_token * H + head) + i * H, mask=i < rows, other=0.0)
    return values


@triton.jit
def row_scale(x, L2NORM: tl.constexpr):
    """[rows of x] fp32 factor that the L2 norm multiplies each row of x by; ones without the norm.

    Kept apart from x, which stays exact in the dot's operand type.
    """
    if L2NORM:
        x32 = x.to(tl.float32)
        scale = tl.rsqrt(tl.sum(x32 * x32, 1) + L2NORM_EPS)
    else:
        scale = tl.full([x.shape[0]], 1.0, tl.float32)
    return scale


@triton.jit
def operand(x, PRECISION: tl.constexpr):
    """x as a dot takes it.  For "tf32" it is rounded to tf32's 11 bits, to nearest (Veltkamp's split).

    The tensor core itself cuts the other bits off, always towards zero, and a state that loses a little of everything
    in every chunk drifts.  Values that came in as bf16 or fp16 are exact as they are.
    """
    if PRECISION == "tf32":
        scaled = x * 8192.0 + x  # (2**13 + 1) x, written so that a fused multiply-add gives the same bits
        return scaled - (scaled - x)
    return x


@triton.jit
def dot(a, b, PRECISION: tl.constexpr):
    """fp32 a · b of such operands: "tf32", "tf32x3", which keeps 22 bits of them, or "ieee"."""
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def appended(slices, x):
    return slices + (x,)  # noqa: RUF005  # Triton has no starred expressions


@triton.jit
def slice_of(state, j):
    """Slice j of a state [K, BLOCK] that is a tuple of slices of K.

    j is not known to the compiler: where it unrolls the loops over slices it loads all of them ahead, and spills.
    """
    found = state[0]
    for i in tl.static_range(1, len(state)):
        found = tl.where(j == i, state[i], found)
    return found


@triton.jit
def slices_times_state(ptr, first_token, rows, stride, state, PRECISION: tl.constexpr):
    """[64, BLOCK] fp32 rows of a token tensor [.., K], from memory, times a state [K, BLOCK] in slices of K."""
    SLICE: tl.constexpr = state[0].shape[0]
    acc = tl.zeros([CHUNK, state[0].shape[1]], tl.float32)
    for j in range(len(state)):
        x = load_rows(ptr + j * SLICE, first_token, rows, stride, SLICE).to(tl.float32)
        acc = tl.dot(x, operand(slice_of(state, j), PRECISION), acc, input_precision=PRECISION)
    return acc


@triton.jit
def add_outer(state, decay, ptr, first_token, rows, stride, update, PRECISION: tl.constexpr):
    """decay · state + keysᵀ update, for a state [K, BLOCK] in slices and an update [64, BLOCK] as a dot takes it."""
    SLICE: tl.constexpr = state[0].shape[0]
    for j in range(len(state)):
        keys = load_rows(ptr + j * SLICE, first_token, rows, stride, SLICE).to(tl.float32)
        new = decay * slice_of(state, j) + dot(tl.trans(keys), update, PRECISION)
        replaced = ()
        for i in tl.static_range(len(state)):
            replaced = appended(replaced, tl.where(j == i, new, state[i]))
        state = replaced
    return state


@triton.jit
def is_known(forgot, maps_start, maps_stop, item, head, H):
    """1 where an item's entry state does not depend on other ranks, see `EarlyTable`; else 0."""
    start = tl.load(maps_start + item)
    stop = tl.load(maps_stop + item)
    known = (start < 0).to(tl.int32)
    for first in range(start, stop, MAPS_AT_ONCE):
        row = first + tl.arange(0, MAPS_AT_ONCE)
        known = tl.maximum(known, tl.max(tl.load(forgot + row * H + head, mask=row < stop, other=0).to(tl.int32), 0))
    return known


def heads_in_rows(*tensors: torch.Tensor | None) -> list[int]:
    """Of tokens [T, heads, D], or gates [T, heads]: heads from one token to the next; more than it has for a view."""
    return [0 if x is None else x.stride(0) // (x.shape[2] if x.dim() == 3 else 1) for x in tensors]
