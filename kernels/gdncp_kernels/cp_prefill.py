"""Stage 4: a CP chunk from its entry state: outputs, state checkpoints, exit state.

Per 64-token chunk and block of V rows, S the state that enters it, P_ij = exp(G_i − G_j) q_i·k_j for j <= i:

    U = solve (V − diag(from_start) K Sᵀ)                       [64, BV]
    O = scale (diag(from_start) Q Sᵀ + P U)                     [64, BV]
    state after p of its tokens, Sᵀ = exp(G_p) Sᵀ + Σ_{i <= p} exp(G_p − G_i) k_i u_iᵀ      [K, BV]
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from gdncp_kernels.common import CHUNK, dot, load_column, load_rows, pair_decay, row_scale, scan_config

if TYPE_CHECKING:
    from gdncp.backends.base import Sinks, TokenInputs
    from gdncp.work import WorkTable
    from gdncp_kernels.precompute_t import Tiles

NO_MORE = tl.constexpr(1 << 62)  # tokens of the checkpoint after the last


@triton.jit(do_not_specialize=["scale", "final_dump", "checkpoint_dump", "H", "HQ", "HK", "HV"])
def cp_prefill_kernel(
    q,
    k,
    v,
    solve,
    log_decay,
    from_start,
    to_end,
    key_scale,
    token_start,
    num_tokens,
    item_row,
    final_row,
    checkpoint_start,
    checkpoint_stop,
    checkpoint_tokens,
    checkpoint_row,
    entry_states,
    output,
    final_states,
    checkpoints,
    scale,
    final_dump,
    checkpoint_dump,
    H,
    HQ,
    HK,
    HV,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    L2NORM: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program per (item, state head, block of V rows)."""
    NUM_BLOCKS: tl.constexpr = V // BLOCK
    block = tl.program_id(0) % NUM_BLOCKS
    head = tl.program_id(0) // NUM_BLOCKS % H
    item = tl.program_id(0) // (NUM_BLOCKS * H)
    first_token = tl.load(token_start + item)
    tokens = tl.load(num_tokens + item)
    exit_row = tl.load(final_row + item)
    if (tokens == 0) & (exit_row == final_dump):
        return
    i = tl.arange(0, CHUNK)
    in_state = (block * BLOCK + tl.arange(0, BLOCK))[None, :] * K + tl.arange(0, K)[:, None]
    state = tl.load(entry_states + (tl.load(item_row + item) * H + head) * V * K + in_state)
    if checkpoints is not None:
        entry = tl.load(checkpoint_start + item)
        stop = tl.load(checkpoint_stop + item)
        position = tl.load(checkpoint_tokens + entry, mask=entry < stop, other=NO_MORE)

    q_head = q + (head * HQ // H) * K
    k_head = k + (head * HK // H) * K
    v_block = v + (head * HV // H) * V + block * BLOCK
    o_block = output + head * V + block * BLOCK
    for c in range(0, tl.cdiv(tokens, CHUNK).to(tl.int32)):
        token = first_token + c * CHUNK
        rows = tl.minimum(tokens - c * CHUNK, CHUNK)
        keys = load_rows(k_head, token, rows, HK * K, K)
        queries = load_rows(q_head, token, rows, HQ * K, K)
        values = load_rows(v_block, token, rows, HV * V, BLOCK).to(tl.float32)
        x = load_rows(solve + head * CHUNK, token, rows, H * CHUNK, CHUNK)
        g = load_column(log_decay + head, token, rows, H)
        k_scale = load_column(key_scale + head, token, rows, H)
        decay_in = load_column(from_start + head, token, rows, H)
        decay_out = load_column(to_end + head, token, rows, H)
        total = tl.load(from_start + (token + rows - 1) * H + head)

        keys32 = keys.to(tl.float32)
        rest = values - (decay_in * k_scale)[:, None] * dot(keys32, state, PRECISION)
        update = dot(x, rest, PRECISION)

        # products of unscaled queries and keys are exact in their own dtype
        seen = (i[:, None] >= i[None, :]) & (i < rows)[:, None]
        scores = dot(queries, tl.trans(keys), PRECISION) * k_scale[None, :] * pair_decay(g, seen)
        out = decay_in[:, None] * dot(queries.to(tl.float32), state, PRECISION) + dot(scores, update, PRECISION)
        out = out * (scale * row_scale(queries, L2NORM))[:, None]
        in_output = (token + i)[:, None] * (H * V) + tl.arange(0, BLOCK)[None, :]
        tl.store(o_block + in_output, out.to(output.dtype.element_ty), mask=(i < rows)[:, None])

        if checkpoints is not None:
            while position <= c * CHUNK + rows:
                p = position - c * CHUNK
                g_p = tl.load(log_decay + (token + p - 1) * H + head)
                decay_p = tl.exp(tl.where(i < p, g_p - g, float("-inf"))).to(tl.float32)
                added = dot(tl.trans(keys32), (decay_p * k_scale)[:, None] * update, PRECISION)
                row = tl.load(checkpoint_row + entry)
                if row != checkpoint_dump:
                    at = checkpoints + (row * H + head) * V * K + in_state
                    tl.store(at, tl.exp(g_p).to(tl.float32) * state + added)
                entry += 1
                position = tl.load(checkpoint_tokens + entry, mask=entry < stop, other=NO_MORE)
        state = total * state + dot(tl.trans(keys32), (decay_out * k_scale)[:, None] * update, PRECISION)

    if exit_row != final_dump:
        tl.store(final_states + (exit_row * H + head) * V * K + in_state, state)


def cp_prefill(
    inputs: TokenInputs, tiles: Tiles, table: WorkTable, entry_states: torch.Tensor, sinks: Sinks, precision: str
) -> None:
    """Launch stage 4 over the table's items."""
    if not table.num_items:
        return
    num_heads = inputs.num_state_heads
    k_dim, v_dim = inputs.k.shape[2], inputs.v.shape[2]
    config = scan_config(k_dim, v_dim)
    checkpoints = sinks.checkpoints if table.num_checkpoints else None
    checkpoint_start, checkpoint_stop = _checkpoint_ranges(table)
    cp_prefill_kernel[(table.num_items * num_heads * (v_dim // config.block),)](
        inputs.q,
        inputs.k,
        inputs.v,
        tiles.solve,
        tiles.log_decay,
        tiles.from_start,
        tiles.to_end,
        tiles.key_scale,
        table.token_start,
        table.num_tokens,
        table.item_row,
        table.final_row,
        checkpoint_start,
        checkpoint_stop,
        table.checkpoint_tokens,
        table.checkpoint_row,
        entry_states,
        sinks.output,
        sinks.final_states,
        checkpoints,
        inputs.scale,
        sinks.final_states.shape[0] - 1,
        checkpoints.shape[0] - 1 if checkpoints is not None else -1,
        num_heads,
        inputs.q.shape[1],
        inputs.k.shape[1],
        inputs.v.shape[1],
        K=k_dim,
        V=v_dim,
        BLOCK=config.block,
        L2NORM=inputs.use_qk_l2norm,
        PRECISION=precision,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def _checkpoint_ranges(table: WorkTable) -> tuple[torch.Tensor, torch.Tensor]:
    """Per item: its entries [start, stop) of the checkpoint table, without those of 0 tokens, which stand for none."""
    item = torch.arange(table.num_items, device=table.checkpoint_item.device)
    key = (table.checkpoint_item << 32) + table.checkpoint_tokens  # sorted, because the table is
    return torch.searchsorted(key, (item << 32) + 1), torch.searchsorted(key, (item + 1) << 32)
