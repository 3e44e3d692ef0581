"""Stage 1: what a chunk of 64 tokens needs to know about itself, whatever state enters it.

Per chunk and state head, i and j counting tokens from the chunk's start, G the cumulative log gates:

    A_ij = β_i exp(G_i − G_j) k_i·k_j  for j < i, else 0        [64, 64]
    solve = (I + A)⁻¹ diag(β)                                   [64, 64]

so that the tokens' updates are  U = solve (V − diag(exp G) K S0ᵀ)  for an entry state S0.
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
    load_beta,
    load_log_gate,
    load_rows,
    pair_decay,
    row_scale,
)

if TYPE_CHECKING:
    from gdncp.backends.base import TokenInputs
    from gdncp.work import WorkTable


@dataclass(frozen=True, eq=False)
class Tiles:
    """One row per token; rows that no chunk covers are never written and never read."""

    solve: torch.Tensor  # [T, H, 64] fp32: the token's row of its chunk's matrix
    log_decay: torch.Tensor  # [T, H] float64: G, with RESET for each reset
    from_start: torch.Tensor  # [T, H] fp32: exp G, the decay from the chunk's entry through this token
    to_end: torch.Tensor  # [T, H] fp32: the decay from this token through the chunk's last
    key_scale: torch.Tensor  # [T, H] fp32: what the L2 norm multiplies the token's key by


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


@triton.jit(do_not_specialize=["H", "HK"])
def precompute_t_kernel(
    k,
    gate,
    beta,
    token_start,
    num_tokens,
    chunk_item,
    chunk_ordinal,
    solve,
    log_decay,
    from_start,
    to_end,
    key_scale,
    H,
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

    log_alpha = load_log_gate(gate, head, token, rows, H, LOG_SPACE)
    cumulative = tl.cumsum(log_alpha, 0)
    remaining = tl.sum(log_alpha, 0) - cumulative  # rows past the chunk have log gate 0
    keys = load_rows(k + (head * HK // H) * K, token, rows, HK * K, K)
    scale = row_scale(keys, L2NORM)
    beta_ = load_beta(beta, head, token, rows, H)

    # products of unscaled keys are exact in the keys' own dtype
    products = dot(keys, tl.trans(keys), PRECISION) * (beta_ * scale)[:, None] * scale[None, :]
    a = products * pair_decay(cumulative, (i[:, None] > i[None, :]) & live[:, None])
    x = inverse(a, "tf32x3") * beta_[None, :]

    per_token = (token + i) * H + head
    tl.store(solve + per_token[:, None] * CHUNK + i[None, :], x, mask=live[:, None])
    tl.store(log_decay + per_token, cumulative, mask=live)
    tl.store(from_start + per_token, tl.exp(cumulative).to(tl.float32), mask=live)
    tl.store(to_end + per_token, tl.exp(remaining).to(tl.float32), mask=live)
    tl.store(key_scale + per_token, scale, mask=live)


def precompute_t(inputs: TokenInputs, table: WorkTable, precision: str) -> Tiles:
    """Launch stage 1 over the table's chunks."""
    num_tokens, num_k_heads, k_dim = inputs.k.shape
    shape = (num_tokens, inputs.num_state_heads)

    def new(*more: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(*shape, *more, dtype=dtype, device=inputs.k.device)

    tiles = Tiles(
        solve=new(CHUNK.value), log_decay=new(dtype=torch.float64), from_start=new(), to_end=new(), key_scale=new()
    )
    if table.num_chunks:
        precompute_t_kernel[(table.num_chunks * shape[1],)](
            inputs.k,
            inputs.gate,
            inputs.beta,
            table.token_start,
            table.num_tokens,
            table.chunk_item,
            table.chunk_ordinal,
            tiles.solve,
            tiles.log_decay,
            tiles.from_start,
            tiles.to_end,
            tiles.key_scale,
            shape[1],
            num_k_heads,
            K=k_dim,
            LOG_SPACE=inputs.gate_space == "log",
            L2NORM=inputs.use_qk_l2norm,
            PRECISION=precision,
            num_warps=4,
            num_stages=1,
        )
    return tiles
