"""Stage 3's arithmetic, the fold  out [V', K] = state [V', K] · transition [K, K] + local_state [V', K].

fp32 operands as three products of tf32 halves, 16 rows to a program, one order of summation whatever else is in the
call: a fixup may cut V at multiples of 16 rows, and fold maps one at a time or many in one launch, for the same bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from gdncp_kernels.hopper.launch import Launcher

if TYPE_CHECKING:
    from gdncp.backends.base import AffineMaps, FoldRuns

DIM = tl.constexpr(128)
ROWS = tl.constexpr(16)
WARPS = 8  # with four, registers spill
SMS = 132  # one program of eight warps each: its registers fill an SM
RING = 3  # maps on their way while one is folded


@triton.jit
def _fold(state, transition, local_state):
    """[16, 128] state · transition + local_state of one map; transition and local_state are pointers to the tiles."""
    return tl.dot(state, tl.load(transition), tl.load(local_state), input_precision="tf32x3")


@triton.jit(do_not_specialize=["state_batch", "transition_batch", "local_batch", "NUM_BLOCKS"])
def _fold_kernel(state, transition, local_state, out, state_batch, transition_batch, local_batch, NUM_BLOCKS):
    """One program per (batch, 16 rows)."""
    block = tl.program_id(0) % NUM_BLOCKS
    batch = (tl.program_id(0) // NUM_BLOCKS).to(tl.int64)
    column = tl.arange(0, DIM)[None, :]
    rows = (block * ROWS + tl.arange(0, ROWS))[:, None] * DIM + column
    square = tl.arange(0, DIM)[:, None] * DIM + column
    s = tl.load(state + batch * state_batch + rows)
    s = _fold(s, transition + batch * transition_batch + square, local_state + batch * local_batch + rows)
    tl.store(out + batch * NUM_BLOCKS * ROWS * DIM + rows, s)


@triton.jit(do_not_specialize=["H"])
def _fold_runs_kernel(
    transition, local_state, entry_states, entry_row, map_row, num_steps, starts, H, ROWS: tl.constexpr
):
    """One program per (run, head, ROWS rows); a row's bits are the same with 16 and 32."""
    block = tl.program_id(0) % (DIM // ROWS)
    head = tl.program_id(0) // (DIM // ROWS) % H
    run = tl.program_id(0) // (DIM // ROWS * H)
    steps = tl.load(num_steps + run)
    if steps > 0:
        stride = H.to(tl.int64) * DIM * DIM
        column = tl.arange(0, DIM)[None, :]
        rows = (block * ROWS + tl.arange(0, ROWS))[:, None] * DIM + column
        square = tl.arange(0, DIM)[:, None] * DIM + column
        entry = entry_states + tl.load(entry_row + run) * stride + head * DIM * DIM + rows
        at = tl.load(map_row + run) * stride + head * DIM * DIM
        if tl.load(starts + run) != 0:  # the first map begins its sequence: its local state is its exit state
            s = tl.load(local_state + at + rows)
            tl.store(entry + stride, s)
            done = 1
        else:
            s = tl.load(entry)
            done = 0
        for step in range(done, steps):
            s = _fold(s, transition + at + step * stride + square, local_state + at + step * stride + rows)
            tl.store(entry + (step + 1) * stride, s)


_launch_runs = Launcher(_fold_runs_kernel, num_warps=WARPS, num_stages=RING)


class StateFold:
    """`gdncp.backends.base.Fold` and `RunFold` for K = 128."""

    block_rows: int = ROWS.value

    def __call__(self, state: torch.Tensor, transition: torch.Tensor, local_state: torch.Tensor) -> torch.Tensor:
        num_rows = state.shape[-2]
        if num_rows % self.block_rows:
            raise ValueError(f"state has {num_rows} rows; the fold takes multiples of {self.block_rows}")
        out = torch.empty(state.shape, dtype=torch.float32, device=state.device)
        if out.numel():
            s, m, n = (_as_batch(x) for x in (state, transition, local_state))
            num_blocks = num_rows // self.block_rows
            with torch.cuda.device_of(out):
                _fold_kernel[(s.shape[0] * num_blocks,)](
                    s, m, n, out, s.stride(0), m.stride(0), n.stride(0), num_blocks, num_warps=WARPS
                )
        return out

    def fold_runs(self, maps: AffineMaps, entry_states: torch.Tensor, runs: FoldRuns) -> None:
        num_heads = entry_states.shape[1]
        num_rows = runs.num_runs * num_heads * DIM.value
        # one wave where that is possible: a map's operands are split in halves once per program
        rows = ROWS.value if num_rows <= SMS * ROWS.value else 2 * ROWS.value
        if runs.num_runs:
            with torch.cuda.device_of(entry_states):
                _launch_runs(
                    num_rows // rows,
                    maps.transition,
                    maps.local_state,
                    entry_states,
                    runs.entry_row,
                    runs.map_row,
                    runs.num_steps,
                    runs.starts,
                    num_heads,
                    rows,
                )


def _as_batch(x: torch.Tensor) -> torch.Tensor:
    """[B, rows, 128], each matrix dense; a view where possible."""
    x = x.reshape(-1, *x.shape[-2:])
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()
