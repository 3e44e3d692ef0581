"""Stage 3's arithmetic, the fold  out [B, V', K] = state [B, V', K] · transition [B, K, K] + local_state [B, V', K].

IEEE fp32 and one order of summation, whatever else is in the call: a fixup may cut V at multiples of 16 rows, and B
anywhere, and gets the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gdncp_kernels.launch_table import choose

FOLD_ROWS = tl.constexpr(16)


@triton.jit(do_not_specialize=["NUM_BLOCKS"])
def fold_kernel(
    state,
    transition,
    local_state,
    out,
    state_batch,
    state_row,
    transition_batch,
    transition_row,
    local_batch,
    local_row,
    NUM_BLOCKS,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program per (batch, 16 rows, BLOCK_N columns)."""
    COLUMNS: tl.constexpr = K // BLOCK_N
    column = tl.program_id(0) % COLUMNS * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    block = tl.program_id(0) // COLUMNS % NUM_BLOCKS
    batch = (tl.program_id(0) // COLUMNS // NUM_BLOCKS).to(tl.int64)
    row = block * FOLD_ROWS + tl.arange(0, FOLD_ROWS)[:, None]
    inner = tl.arange(0, BLOCK_K)

    acc = tl.zeros([FOLD_ROWS, BLOCK_N], tl.float32)
    for k0 in range(0, K, BLOCK_K):
        s = tl.load(state + batch * state_batch + row * state_row + (k0 + inner)[None, :])
        m = tl.load(transition + batch * transition_batch + (k0 + inner)[:, None] * transition_row + column)
        acc = tl.dot(s, m, acc, input_precision="ieee")
    n = tl.load(local_state + batch * local_batch + row * local_row + column)
    tl.store(out + (batch * NUM_BLOCKS * FOLD_ROWS + row) * K + column, acc + n)


class StateFold:
    """`gdncp.backends.base.Fold` in Triton."""

    block_rows: int = FOLD_ROWS.value

    def __call__(self, state: torch.Tensor, transition: torch.Tensor, local_state: torch.Tensor) -> torch.Tensor:
        num_rows, k_dim = state.shape[-2:]
        if num_rows % self.block_rows:
            raise ValueError(f"state has {num_rows} rows; the fold takes multiples of {self.block_rows}")
        out = torch.empty(state.shape, dtype=torch.float32, device=state.device)
        if not out.numel():
            return out
        s, m, n = (_as_batch(x) for x in (state, transition, local_state))
        num_blocks = num_rows // self.block_rows
        with torch.cuda.device_of(out):
            choice = choose("fold", k_dim, k_dim, "ieee")
            fold_kernel[(s.shape[0] * num_blocks * (k_dim // choice.block),)](
                s,
                m,
                n,
                out,
                *s.stride()[:2],
                *m.stride()[:2],
                *n.stride()[:2],
                num_blocks,
                K=k_dim,
                BLOCK_N=choice.block,
                BLOCK_K=choice.block,
                **choice.options,
            )
        return out


def _as_batch(x: torch.Tensor) -> torch.Tensor:
    """[B, rows, columns] with dense rows, a view where possible."""
    x = x.reshape(-1, *x.shape[-2:])
    return x if x.stride(-1) == 1 else x.contiguous()
