"""Stage 1: what a chunk of 64 tokens knows about itself, whatever state enters it.

Per chunk and state head, i and j counting tokens from the chunk's start, G the cumulative log gates:

    A_ij = β_i exp(G_i − G_j) k_i·k_j  for j < i, else 0             [64, 64]
    solve = (I + A)⁻¹ diag(β)                                        [64, 64]
    scores_ij = scale exp(G_i − G_j) q_i·k_j  for j <= i, else 0     [64, 64]

so that for an entry state S, with the rows of U what the tokens add:

    U = solve (V − diag(key_in) K Sᵀ)    O = diag(query_in) Q Sᵀ + scores U    S_exit = total S + Uᵀ diag(key_out) K
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from gdncp_kernels.common import (
    CHUNK,
    chunk_span,
    dot,
    heads_in_rows,
    load_beta,
    load_log_gate,
    load_rows,
    operand,
    row_scale,
)
from gdncp_kernels.launch_table import choose

if TYPE_CHECKING:
    from gdncp.backends.base import TokenInputs
    from gdncp.work import WorkTable


@dataclass(frozen=True, eq=False)
class Tiles:
    """One row per token; rows that no chunk covers are never written and never read."""

    solve: torch.Tensor  # [T, H, 64] fp32: the token's row of its chunk's matrix, as dots take it
    scores: torch.Tensor  # [T, H, 64] fp32: likewise
    log_decay: torch.Tensor  # [T, H] float64: G, with RESET for each reset
    from_start: (
        torch.Tensor
    )  # [T, H] fp32: exp G, the decay from the chunk's entry through this token; the last is total
    # the factors of the tokens' raw keys and queries, L2 norm included
    key_in: torch.Tensor  # [T, H] fp32: decay from the chunk's entry
    key_out: torch.Tensor  # [T, H] fp32: decay to the chunk's end
    key_scale: torch.Tensor  # [T, H] fp32: no decay
    query_in: torch.Tensor  # [T, H] fp32: scale and decay from the chunk's entry


# Pairs of tokens go in blocks of half a chunk a side: fewer registers than whole chunks, and none for what lies above
# the diagonal.
HALF = tl.constexpr(32)


@triton.jit
def inverse(a, PRECISION: tl.constexpr):
    """(I + A)⁻¹ of a strictly lower triangular A [32, 32].

    The inverse of a diagonal block of 2s rows is that of its two halves and −X₂ A₂₁ X₁ below them, so all blocks of a
    size go at once: X − X·(A where it joins two halves)·X.  No powers of A, which would cancel.
    """
    i = tl.arange(0, HALF)[:, None]
    j = tl.arange(0, HALF)[None, :]
    x = tl.where(i == j, 1.0, 0.0)
    x = x - tl.where((i >> 1) == (j >> 1), a, 0.0)
    for level in range(1, 5):
        joins = ((i >> (level + 1)) == (j >> (level + 1))) & ((i >> level) != (j >> level))
        below = dot(tl.where(joins, a, 0.0), x, PRECISION)
        x = x - dot(x, below, PRECISION)
    return x


@triton.jit
def pair_decay(log_decay, earlier_log_decay, keep):
    """[32, 32] fp32 decay from token j to token i, exp(G_i − G_j), where `keep`; 0 elsewhere.

    The float64 G goes as two fp32 halves: subtracting halves is exact enough and cheap on any GPU.
    """
    high, earlier_high = log_decay.to(tl.float32), earlier_log_decay.to(tl.float32)
    low = (log_decay - high.to(tl.float64)).to(tl.float32)
    earlier_low = (earlier_log_decay - earlier_high.to(tl.float64)).to(tl.float32)
    difference = (high[:, None] - earlier_high[None, :]) + (low[:, None] - earlier_low[None, :])
    return tl.exp(tl.where(keep, difference, float("-inf")))


@triton.jit
def row_products(
    a, b, token, rows, other_token, others, a_stride, b_stride, WIDTH: tl.constexpr, PRECISION: tl.constexpr
):
    """[32, 32] fp32 products a_i · b_j of two heads' rows, from memory in slices: whole rows would fill the registers.

    Unscaled rows are multiplied, so that the products of bf16 and fp16 are exact.
    """
    SLICE: tl.constexpr = 32 if WIDTH > 32 else WIDTH
    acc = tl.zeros([HALF, HALF], tl.float32)
    for d in range(0, WIDTH, SLICE):
        x = load_rows(a + d, token, rows, a_stride, SLICE, HALF)
        y = load_rows(b + d, other_token, others, b_stride, SLICE, HALF)
        acc = tl.dot(x, tl.trans(y), acc, input_precision=PRECISION)
    return acc


@triton.jit
def _store_factors(log_decay, from_start, key_in, key_out, key_scale, query_in, at, live, g, total, k_scale, q_scale):
    """What `Tiles` holds per token, for half a chunk; g the cumulative log gates, total that of the chunk's end."""
    entered = tl.exp(g).to(tl.float32)
    left = tl.exp(total - g).to(tl.float32)
    tl.store(log_decay + at, g, mask=live)
    tl.store(from_start + at, entered, mask=live)
    tl.store(key_in + at, entered * k_scale, mask=live)
    tl.store(key_out + at, left * k_scale, mask=live)
    tl.store(key_scale + at, k_scale, mask=live)
    tl.store(query_in + at, entered * q_scale, mask=live)


@triton.jit(do_not_specialize=["scale", "H", "HQ", "HK", "Q_ROW", "K_ROW", "GATE_ROW", "BETA_ROW"])
def precompute_t_kernel(
    q,
    k,
    gate,
    beta,
    token_start,
    num_tokens,
    chunk_item,
    chunk_ordinal,
    solve,
    scores,
    log_decay,
    from_start,
    key_in,
    key_out,
    key_scale,
    query_in,
    scale,
    H,
    HQ,
    HK,
    Q_ROW,
    K_ROW,
    GATE_ROW,
    BETA_ROW,
    K: tl.constexpr,
    LOG_SPACE: tl.constexpr,
    L2NORM: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program per (flat chunk, state head)."""
    head = tl.program_id(0) % H
    chunk = tl.program_id(0) // H
    token, rows = chunk_span(tl.load(chunk_item + chunk), tl.load(chunk_ordinal + chunk), token_start, num_tokens)
    if rows <= 0:
        return
    q_head = q + (head * HQ // H) * K
    k_head = k + (head * HK // H) * K

    token2, rows2 = token + HALF, rows - HALF  # of the second half, which may be empty
    log_alpha = load_log_gate(gate, head, token, rows, GATE_ROW, LOG_SPACE, HALF)
    log_alpha2 = load_log_gate(gate, head, token2, rows2, GATE_ROW, LOG_SPACE, HALF)
    first_half = tl.sum(log_alpha, 0)
    total = first_half + tl.sum(log_alpha2, 0)  # rows past the chunk have log gate 0
    decay = tl.cumsum(log_alpha, 0)
    decay2 = first_half + tl.cumsum(log_alpha2, 0)
    i = tl.arange(0, HALF)
    live, live2 = i < rows, i < rows2
    per_token, per_token2 = (token + i) * H + head, (token2 + i) * H + head
    k_scale = row_scale(load_rows(k_head, token, rows, K_ROW * K, K, HALF), L2NORM)
    k_scale2 = row_scale(load_rows(k_head, token2, rows2, K_ROW * K, K, HALF), L2NORM)
    q_scale = scale * row_scale(load_rows(q_head, token, rows, Q_ROW * K, K, HALF), L2NORM)
    q_scale2 = scale * row_scale(load_rows(q_head, token2, rows2, Q_ROW * K, K, HALF), L2NORM)
    # fmt: off
    _store_factors(log_decay, from_start, key_in, key_out, key_scale, query_in,
                   per_token, live, decay, total, k_scale, q_scale)
    _store_factors(log_decay, from_start, key_in, key_out, key_scale, query_in,
                   per_token2, live2, decay2, total, k_scale2, q_scale2)
    # fmt: on

    # 2 is of the second half, 12 from the first half to the second
    tril = i[:, None] >= i[None, :]
    below = i[:, None] > i[None, :]
    survives = pair_decay(decay, decay, tril & live[:, None])
    survives12 = pair_decay(decay2, decay, tl.broadcast_to(live2[:, None], [HALF, HALF]))
    survives2 = pair_decay(decay2, decay2, tril & live2[:, None])
    row, row2 = per_token[:, None] * CHUNK + i[None, :], per_token2[:, None] * CHUNK + i[None, :]
    zeros = tl.zeros([HALF, HALF], tl.float32)

    qk = row_products(q_head, k_head, token, rows, token, rows, Q_ROW * K, K_ROW * K, K, PRECISION)
    qk = operand(qk * q_scale[:, None] * k_scale[None, :] * survives, PRECISION)
    tl.store(scores + row, qk, mask=live[:, None])
    tl.store(scores + row + HALF, zeros, mask=live[:, None])
    qk = row_products(q_head, k_head, token2, rows2, token, rows, Q_ROW * K, K_ROW * K, K, PRECISION)
    qk = operand(qk * q_scale2[:, None] * k_scale[None, :] * survives12, PRECISION)
    tl.store(scores + row2, qk, mask=live2[:, None])
    qk = row_products(q_head, k_head, token2, rows2, token2, rows2, Q_ROW * K, K_ROW * K, K, PRECISION)
    qk = operand(qk * q_scale2[:, None] * k_scale2[None, :] * survives2, PRECISION)
    tl.store(scores + row2 + HALF, qk, mask=live2[:, None])

    SOLVE: tl.constexpr = "ieee" if PRECISION == "ieee" else "tf32x3"
    beta_ = load_beta(beta, head, token, rows, BETA_ROW, HALF)
    beta2 = load_beta(beta, head, token2, rows2, BETA_ROW, HALF)
    kk = row_products(k_head, k_head, token, rows, token, rows, K_ROW * K, K_ROW * K, K, PRECISION)
    x = inverse(tl.where(below, kk * (beta_ * k_scale)[:, None] * k_scale[None, :] * survives, 0.0), SOLVE)
    tl.store(solve + row, operand(x * beta_[None, :], PRECISION), mask=live[:, None])
    tl.store(solve + row + HALF, zeros, mask=live[:, None])
    kk = row_products(k_head, k_head, token2, rows2, token2, rows2, K_ROW * K, K_ROW * K, K, PRECISION)
    x2 = inverse(tl.where(below, kk * (beta2 * k_scale2)[:, None] * k_scale2[None, :] * survives2, 0.0), SOLVE)
    tl.store(solve + row2 + HALF, operand(x2 * beta2[None, :], PRECISION), mask=live2[:, None])
    kk = row_products(k_head, k_head, token2, rows2, token, rows, K_ROW * K, K_ROW * K, K, PRECISION)
    kk = kk * (beta2 * k_scale2)[:, None] * k_scale[None, :] * survives12
    x12 = -dot(x2, dot(kk, x, SOLVE), SOLVE)
    tl.store(solve + row2, operand(x12 * beta_[None, :], PRECISION), mask=live2[:, None])


def precompute_t(inputs: TokenInputs, table: WorkTable, precision: str) -> Tiles:
    """Launch stage 1 over the table's chunks."""
    num_tokens, num_k_heads, k_dim = inputs.k.shape
    num_heads = inputs.num_state_heads

    def new(*more: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(num_tokens, num_heads, *more, dtype=dtype, device=inputs.k.device)

    tiles = Tiles(
        solve=new(CHUNK.value),
        scores=new(CHUNK.value),
        log_decay=new(dtype=torch.float64),
        from_start=new(),
        key_in=new(),
        key_out=new(),
        key_scale=new(),
        query_in=new(),
    )
    if table.num_chunks:
        precompute_t_kernel[(table.num_chunks * num_heads,)](
            inputs.q,
            inputs.k,
            inputs.gate,
            inputs.beta,
            table.token_start,
            table.num_tokens,
            table.chunk_item,
            table.chunk_ordinal,
            tiles.solve,
            tiles.scores,
            tiles.log_decay,
            tiles.from_start,
            tiles.key_in,
            tiles.key_out,
            tiles.key_scale,
            tiles.query_in,
            inputs.scale,
            num_heads,
            inputs.q.shape[1],
            num_k_heads,
            *heads_in_rows(inputs.q, inputs.k, inputs.gate, inputs.beta),
            K=k_dim,
            LOG_SPACE=inputs.gate_space == "log",
            L2NORM=inputs.use_qk_l2norm,
            PRECISION=precision,
            **choose("precompute_t", k_dim, inputs.v.shape[2], precision).options,
        )
    return tiles
