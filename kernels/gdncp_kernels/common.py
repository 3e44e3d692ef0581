"""What the stages share: which tokens a program works on, gates, norms, dots, and how a scan is launched.

Shapes: 64 tokens a chunk, K and V the head dims, H state heads.  A state S [V, K] is held as its transpose [K, BLOCK].
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

CHUNK = tl.constexpr(64)
RESET = tl.constexpr(-1024.0)  # log gate of a reset: exp of any sum that holds one is 0, and 64 of them add exactly
SMALLEST_LOG_GATE = tl.constexpr(-87.0)  # anything below is a reset; exp(-87) is about fp32's smallest normal number
L2NORM_EPS = tl.constexpr(1e-6)


class ScanConfig(NamedTuple):
    """Frozen launch choice of the two scans (stages 2 and 4): never tuned at run time, ranks must not differ."""

    block: int  # state rows per program
    num_warps: int
    num_stages: int

    @property
    def options(self) -> dict[str, Any]:
        return launch_options(self.num_warps, self.num_stages)


def launch_options(num_warps: int, num_stages: int = 1) -> dict[str, Any]:
    """Compiler options of a launch.  Fused multiply-adds are asked for because Triton's default differs by release."""
    return {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": True}


# By dot precision and K, chosen from offline compiles (compile_report.py): few or no spills, and shared memory within
# the 99 KiB that every GPU from sm_80 has.  Four warps wherever wgmma may be used: with eight, Triton 3.6 gave wrong
# products of register operands at K = 128 on an H200 (tf32x3, BLOCK = 16; right with four, and without wgmma).
_SCAN_CONFIGS = {
    "tf32": {
        16: ScanConfig(block=16, num_warps=4, num_stages=1),
        32: ScanConfig(block=32, num_warps=4, num_stages=1),
        64: ScanConfig(block=32, num_warps=4, num_stages=1),
        128: ScanConfig(block=32, num_warps=4, num_stages=1),
        256: ScanConfig(block=16, num_warps=4, num_stages=1),
    },
    # IEEE products and sums, on the ordinary cores: tensor cores truncate what they add, and over 65536 tokens that
    # forget nothing the drift is 3e-4 in tf32x3 (measured on an H200, beta = 2) where 2e-5 is promised
    "ieee": {
        16: ScanConfig(block=16, num_warps=4, num_stages=1),
        32: ScanConfig(block=32, num_warps=4, num_stages=1),
        64: ScanConfig(block=16, num_warps=8, num_stages=1),
        128: ScanConfig(block=16, num_warps=8, num_stages=1),
        256: ScanConfig(block=16, num_warps=8, num_stages=1),
    },
}


def scan_config(k_dim: int, v_dim: int, precision: str) -> ScanConfig:
    """Launch choice for K × V.  The block divides both, because transitions are scanned in blocks of K rows."""
    config = _SCAN_CONFIGS[precision][k_dim]
    return config._replace(block=min(config.block, v_dim))


@triton.jit
def chunk_span(item, ordinal, token_start, num_tokens):
    """First token (int64) of chunk `ordinal` of an item and how many it has: 1 ... 64, or <= 0 past the item's end."""
    before = ordinal.to(tl.int64) * CHUNK
    rows = tl.minimum(tl.load(num_tokens + item) - before, CHUNK)
    return tl.load(token_start + item) + before, rows


@triton.jit
def load_rows(ptr, first_token, rows, stride, WIDTH: tl.constexpr):
    """[64, WIDTH] rows of a token tensor whose `ptr` stands at the head; rows past the chunk read as zero."""
    i = tl.arange(0, CHUNK)
    offsets = (first_token + i)[:, None] * stride + tl.arange(0, WIDTH)[None, :]
    return tl.load(ptr + offsets, mask=(i < rows)[:, None], other=0.0)


@triton.jit
def load_column(ptr, first_token, rows, stride):
    """[64] one number per token; zero past the chunk."""
    i = tl.arange(0, CHUNK)
    return tl.load(ptr + (first_token + i) * stride, mask=i < rows, other=0.0)


@triton.jit
def load_log_gate(gate, head, first_token, rows, H, LOG_SPACE: tl.constexpr):
    """[64] float64 natural log gates; RESET for resets, 0 past the chunk and without gates.

    float64 throughout: near 1 a float32 log is off by 1e-7, which thousands of tokens add up.
    """
    i = tl.arange(0, CHUNK)
    if gate is None:  # branches, not early returns: Triton 3.6 goes on compiling what follows a return
        log_alpha = tl.zeros([CHUNK], tl.float64)
    else:
        at = gate + (first_token * H + head) + i * H
        if LOG_SPACE:
            log_alpha = tl.load(at, mask=i < rows, other=0.0).to(tl.float64)
        else:
            alpha = tl.load(at, mask=i < rows, other=1.0).to(tl.float64)
            log_alpha = tl.log(tl.where(alpha == 0.0, 1e-300, alpha))  # 0 becomes a reset below
    return tl.where(log_alpha < SMALLEST_LOG_GATE, RESET, log_alpha)


@triton.jit
def load_beta(beta, head, first_token, rows, H):
    """[64] fp32 beta, ones without one; 0 past the chunk."""
    i = tl.arange(0, CHUNK)
    if beta is None:
        values = tl.where(i < rows, 1.0, 0.0)
    else:
        values = tl.load(beta + (first_token * H + head) + i * H, mask=i < rows, other=0.0)
    return values


@triton.jit
def row_scale(x, L2NORM: tl.constexpr):
    """[64] fp32 factor that the L2 norm multiplies each row of x by; ones without the norm.

    Kept apart from x, which stays exact in the dot's operand type.
    """
    if L2NORM:
        x32 = x.to(tl.float32)
        scale = tl.rsqrt(tl.sum(x32 * x32, 1) + L2NORM_EPS)
    else:
        scale = tl.full([CHUNK], 1.0, tl.float32)
    return scale


@triton.jit
def pair_decay(log_decay, keep):
    """[64, 64] fp32 decay from token j to token i, exp(G_i − G_j), where `keep`; 0 elsewhere.

    The float64 G goes as two fp32 halves: subtracting halves is exact enough and cheap on any GPU.
    """
    high = log_decay.to(tl.float32)
    low = (log_decay - high.to(tl.float64)).to(tl.float32)
    difference = (high[:, None] - high[None, :]) + (low[:, None] - low[None, :])
    return tl.exp(tl.where(keep, difference, float("-inf")))


@triton.jit
def row_products(a, b, first_token, rows, a_stride, b_stride, WIDTH: tl.constexpr, PRECISION: tl.constexpr):
    """[64, 64] fp32 products a_i · b_j of two heads' rows, from memory in slices: whole rows would fill the registers.

    Unscaled rows are multiplied, so that the products of bf16 and fp16 are exact.
    """
    SLICE: tl.constexpr = 32 if WIDTH > 32 else WIDTH
    acc = tl.zeros([CHUNK, CHUNK], tl.float32)
    for d in range(0, WIDTH, SLICE):
        x = load_rows(a + d, first_token, rows, a_stride, SLICE)
        y = load_rows(b + d, first_token, rows, b_stride, SLICE)
        acc = tl.dot(x, tl.trans(y), acc, input_precision=PRECISION)
    return acc


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
