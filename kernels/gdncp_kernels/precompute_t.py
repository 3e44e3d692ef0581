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
    launch_options,
    load_beta,
    load_log_gate,
    load_rows,
    operand,
    pair_decay,
    row_products,
    row_scale,
)

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


@triton.jit
def inverse(a, PRECISION: tl.constexpr):
    """(I + A)⁻¹ of a strictly lower triangular A [64, 64].

    The inverse of a diagonal block of 2s rows is that of its two halves and −X₂ A₂₁ X₁ below them, so all blocks of a
    size go at once: X − X·(A where it joins two halves)·X.  No powers of A, which would cancel.
    """
    i = tl.arange(0, CHUNK)[:, None]
    j = tl.arange(0, CHUNK)[None, :]
    x = tl.where(i == j, 1.0, 0.0)
    x = x - tl.where((i >> 1) == (j >> 1), a, 0.0)
    for level in range(1, 6):
        joins = ((i >> (level + 1)) == (j >> (level + 1))) & ((i >> level) != (j >> level))
        below = dot(tl.where(joins, a, 0.0), x, PRECISION)
        x = x - dot(x, below, PRECISION)
    return x


@triton.jit(do_not_specialize=["scale", "H", "HQ", "HK"])
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
    i = tl.arange(0, CHUNK)
    live = i < rows
    per_token = (token + i) * H + head
    per_pair = per_token[:, None] * CHUNK + i[None, :]
    q_head = q + (head * HQ // H) * K
    k_head = k + (head * HK // H) * K

    log_alpha = load_log_gate(gate, head, token, rows, H, LOG_SPACE)
    cumulative = tl.cumsum(log_alpha, 0)
    entered = tl.exp(cumulative).to(tl.float32)
    left = tl.exp(tl.sum(log_alpha, 0) - cumulative).to(tl.float32)  # rows past the chunk have log gate 0
    k_scale = row_scale(load_rows(k_head, token, rows, HK * K, K), L2NORM)
    q_scale = scale * row_scale(load_rows(q_head, token, rows, HQ * K, K), L2NORM)
    tl.store(log_decay + per_token, cumulative, mask=live)
    tl.store(from_start + per_token, entered, mask=live)
    tl.store(key_in + per_token, entered * k_scale, mask=live)
    tl.store(key_out + per_token, left * k_scale, mask=live)
    tl.store(key_scale + per_token, k_scale, mask=live)
    tl.store(query_in + per_token, entered * q_scale, mask=live)

    seen = (i[:, None] >= i[None, :]) & live[:, None]
    qk = row_products(q_head, k_head, token, rows, HQ * K, HK * K, K, PRECISION)
    qk = qk * q_scale[:, None] * k_scale[None, :] * pair_decay(cumulative, seen)
    tl.store(scores + per_pair, operand(qk, PRECISION), mask=live[:, None])

    beta_ = load_beta(beta, head, token, rows, H)
    before = (i[:, None] > i[None, :]) & live[:, None]
    kk = row_products(k_head, k_head, token, rows, HK * K, HK * K, K, PRECISION)
    kk = kk * (beta_ * k_scale)[:, None] * k_scale[None, :] * pair_decay(cumulative, before)
    x = inverse(kk, "ieee" if PRECISION == "ieee" else "tf32x3") * beta_[None, :]
    tl.store(solve + per_pair, operand(x, PRECISION), mask=live[:, None])


def stage_1_warps(precision: str) -> int:
    """Frozen launch choice: IEEE products hold their operands in registers, which four warps do not have enough of."""
    return 8 if precision == "ieee" else 4


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
            K=k_dim,
            LOG_SPACE=inputs.gate_space == "log",
            L2NORM=inputs.use_qk_l2norm,
            PRECISION=precision,
            **launch_options(stage_1_warps(precision)),
        )
    return tiles
