"""State checkpoints.  The recurrence stores the state that enters a checkpoint's chunk; `finish` moves it on.

Most checkpoints stand on a chunk's first token, and need no more.  The others are p tokens further, 1 <= p <= 63:

    U = T diag(β) (V − diag(from_start) K Sᵀ)      S_p = decay(p) S + Σ_{i <= p} decay(i, p) u_i k_iᵀ
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from gdncp_kernels.common import heads_in_rows, is_known

if TYPE_CHECKING:
    from gdncp.backends.base import Part, Sinks
    from gdncp.work import WorkTable
    from gdncp_kernels.hopper.tiles import Tiles

BLOCK = tl.constexpr(32)  # state rows per program


@triton.jit(do_not_specialize=["H", "HK", "HV", "K_ROW", "V_ROW", "dump", "early"])
def _finish_kernel(
    k,
    v,
    solve,
    gates,
    key_scales,
    token_start,
    num_tokens,
    first_chunk,
    checkpoint_item,
    checkpoint_tokens,
    checkpoint_row,
    checkpoints,
    forgot,
    maps_start,
    maps_stop,
    early,
    dump,
    H,
    HK,
    HV,
    K_ROW,
    V_ROW,
    DIM: tl.constexpr,
    L2NORM: tl.constexpr,
):
    """One program per (checkpoint, state head, block of V rows), in place."""
    block = tl.program_id(0) % (DIM // BLOCK)
    head = tl.program_id(0) // (DIM // BLOCK) % H
    checkpoint = tl.program_id(0) // (DIM // BLOCK * H)
    position = tl.load(checkpoint_tokens + checkpoint)
    row = tl.load(checkpoint_row + checkpoint)
    p = position % 64
    if (p == 0) | (row == dump):
        return
    item = tl.load(checkpoint_item + checkpoint)
    if forgot is not None:  # of the pairs of one part, as in `recurrence_kernel`
        if is_known(forgot, maps_start, maps_stop, item, head, H) != early:
            return
    ordinal = position // 64
    token = tl.load(token_start + item) + ordinal * 64
    rows = tl.minimum(tl.load(num_tokens + item) - ordinal * 64, 64)
    chunk = tl.load(first_chunk + item) + ordinal
    entry = chunk * H + head
    i = tl.arange(0, 64)
    d = tl.arange(0, DIM)
    in_block = block * BLOCK + tl.arange(0, BLOCK)
    keys = tl.load(
        k + ((token + i)[:, None] * K_ROW + head * HK // H) * DIM + d[None, :], mask=(i < rows)[:, None], other=0.0
    ).to(tl.float32)
    values = tl.load(
        v + ((token + i)[:, None] * V_ROW + head * HV // H) * DIM + in_block[None, :],
        mask=(i < rows)[:, None],
        other=0.0,
    ).to(tl.float32)
    gate = gates + entry * 256
    log_decay = tl.load(gate + i)
    from_start = tl.load(gate + 64 + i)
    beta = tl.load(gate + 3 * 64 + i)
    factor = tl.full([64], 1.0, tl.float32)
    if L2NORM:  # of the keys; from_start has it already
        factor = tl.load(key_scales + (chunk * HK + head * HK // H) * 64 + i)
    t = tl.load(solve + (entry * 64 + i)[:, None] * 64 + i[None, :]).to(tl.float32)

    at = checkpoints + (row * H + head) * DIM * DIM + in_block[None, :] * DIM + d[:, None]
    state = tl.load(at)  # [K, BLOCK]
    rest = beta[:, None] * (values - from_start[:, None] * tl.dot(keys, state, input_precision="tf32x3"))
    update = tl.dot(t, rest, input_precision="tf32x3")
    last = tl.load(gate + p - 1)
    decay = tl.exp2(tl.where(i < p, last - log_decay, float("-inf")))
    state = tl.exp2(last) * state + tl.dot(tl.trans(keys), (decay * factor)[:, None] * update, input_precision="tf32x3")
    tl.store(at, state)


def finish(tiles: Tiles, table: WorkTable, sinks: Sinks, part: Part | None = None) -> None:
    """Move the stored states of checkpoints inside a chunk on to where they stand.

    Tables built on the device have none: there checkpoints and CP chunks stand at multiples of 64 tokens.
    """
    if table.host is None or not table.host.checkpoints_inside_chunks:
        return
    inputs, num_heads, dim = tiles.inputs, tiles.inputs.num_state_heads, tiles.inputs.k.shape[2]
    _finish_kernel[(table.num_checkpoints * num_heads * (dim // BLOCK.value),)](
        inputs.k,
        inputs.v,
        tiles.solve,
        tiles.gates,
        tiles.keys,
        table.token_start,
        table.num_tokens,
        table.first_chunk,
        table.checkpoint_item,
        table.checkpoint_tokens,
        table.checkpoint_row,
        sinks.checkpoints,
        None if part is None else part.maps.forgot.view(torch.uint8),
        None if part is None or table.early is None else table.early.maps_start,
        None if part is None or table.early is None else table.early.maps_stop,
        None if part is None else int(part.early),
        sinks.checkpoint_dump,
        num_heads,
        inputs.k.shape[1],
        inputs.v.shape[1],
        *heads_in_rows(inputs.k, inputs.v),
        DIM=dim,
        L2NORM=inputs.use_qk_l2norm,
        num_warps=4,
    )
