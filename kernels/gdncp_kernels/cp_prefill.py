"""Stage 4: a CP chunk from its entry state: outputs, state checkpoints, exit state.

Per 64-token chunk and block of V rows, S the state that enters it (names as in stage 1):

    U = solve (V − diag(key_in) K Sᵀ)                           [64, BLOCK]
    O = diag(query_in) Q Sᵀ + scores U                          [64, BLOCK]
    state after p of its tokens, Sᵀ = exp(G_p) Sᵀ + Σ_{i <= p} exp(G_p − G_i) k_i u_iᵀ      [K, BLOCK]
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from gdncp_kernels.common import (
    CHUNK,
    add_outer,
    appended,
    dot,
    heads_in_rows,
    is_known,
    load_column,
    load_rows,
    operand,
    slice_of,
)
from gdncp_kernels.launch_table import choose

if TYPE_CHECKING:
    from gdncp.backends.base import Part, Sinks, TokenInputs
    from gdncp.work import WorkTable
    from gdncp_kernels.precompute_t import Tiles

NO_MORE = tl.constexpr(1 << 62)  # tokens of the checkpoint after the last


@triton.jit(do_not_specialize=["final_dump", "H", "HQ", "HK", "HV", "Q_ROW", "K_ROW", "V_ROW", "O_ROW", "early"])
def cp_prefill_kernel(
    q,
    k,
    v,
    solve,
    scores,
    log_decay,
    from_start,
    key_in,
    key_out,
    key_scale,
    query_in,
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
    forgot,
    maps_start,
    maps_stop,
    final_dump,
    H,
    HQ,
    HK,
    HV,
    Q_ROW,
    K_ROW,
    V_ROW,
    O_ROW,
    early,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    SLICE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program per (item, state head, block of V rows).

    `forgot`, where given: only of pairs whose entry state is known before the exchange (`early`), or is not.
    """
    NUM_BLOCKS: tl.constexpr = V // BLOCK
    block = tl.program_id(0) % NUM_BLOCKS
    head = tl.program_id(0) // NUM_BLOCKS % H
    item = tl.program_id(0) // (NUM_BLOCKS * H)
    first_token = tl.load(token_start + item)
    tokens = tl.load(num_tokens + item)
    exit_row = tl.load(final_row + item)
    if (tokens == 0) & (exit_row == final_dump):
        return
    if forgot is not None:
        if is_known(forgot, maps_start, maps_stop, item, head, H) != early:
            return
    i = tl.arange(0, CHUNK)
    in_state = (block * BLOCK + tl.arange(0, BLOCK))[None, :] * K + tl.arange(0, SLICE)[:, None]  # of the first slice
    entry_row = tl.load(item_row + item)
    entry_state = entry_states + (entry_row * H + head) * V * K + in_state
    state = ()
    for j in tl.static_range(K // SLICE):
        entered = tl.load(entry_state + j * SLICE, mask=in_state < V * K * (entry_row >= 0), other=0.0)
        state = appended(state, entered)
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
        live = i < rows

        out = tl.zeros([CHUNK, BLOCK], tl.float32)
        read = tl.zeros([CHUNK, BLOCK], tl.float32)
        for n in range(K // SLICE):
            entering = operand(slice_of(state, n), PRECISION)
            queries = load_rows(q_head + n * SLICE, token, rows, Q_ROW * K, SLICE).to(tl.float32)
            out = tl.dot(queries, entering, out, input_precision=PRECISION)
            keys = load_rows(k_head + n * SLICE, token, rows, K_ROW * K, SLICE).to(tl.float32)
            read = tl.dot(keys, entering, read, input_precision=PRECISION)
        out = load_column(query_in + head, token, rows, H)[:, None] * out

        values = load_rows(v_block, token, rows, V_ROW * V, BLOCK).to(tl.float32)
        x = load_rows(solve + head * CHUNK, token, rows, H * CHUNK, CHUNK)
        scale_in = load_column(key_in + head, token, rows, H)
        rest = values - scale_in[:, None] * read
        update = dot(x, operand(rest, PRECISION), PRECISION)

        qk = load_rows(scores + head * CHUNK, token, rows, H * CHUNK, CHUNK)
        out += dot(qk, operand(update, PRECISION), PRECISION)
        in_output = (token + i)[:, None] * (O_ROW * V) + tl.arange(0, BLOCK)[None, :]
        tl.store(o_block + in_output, out.to(output.dtype.element_ty), mask=live[:, None])

        if checkpoints is not None:
            while position <= c * CHUNK + rows:
                p = position - c * CHUNK
                g = load_column(log_decay + head, token, rows, H)
                g_p = tl.load(log_decay + (token + p - 1) * H + head)
                decay = tl.exp(tl.where(i < p, g_p - g, float("-inf"))).to(tl.float32)
                scale_p = decay * load_column(key_scale + head, token, rows, H)
                reached = operand(scale_p[:, None] * update, PRECISION)
                total_p = tl.exp(g_p).to(tl.float32)
                kept = add_outer(state, total_p, k_head, token, rows, K_ROW * K, reached, PRECISION)
                at = checkpoints + (tl.load(checkpoint_row + entry) * H + head) * V * K + in_state
                for j in tl.static_range(K // SLICE):
                    tl.store(at + j * SLICE, kept[j])
                entry += 1
                position = tl.load(checkpoint_tokens + entry, mask=entry < stop, other=NO_MORE)

        scale_out = load_column(key_out + head, token, rows, H)
        total = tl.load(from_start + (token + rows - 1) * H + head)
        leaving = operand(scale_out[:, None] * update, PRECISION)
        state = add_outer(state, total, k_head, token, rows, K_ROW * K, leaving, PRECISION)

    if exit_row != final_dump:
        final = final_states + (exit_row * H + head) * V * K + in_state
        for j in tl.static_range(K // SLICE):
            tl.store(final + j * SLICE, state[j])


def cp_prefill(
    inputs: TokenInputs,
    tiles: Tiles,
    table: WorkTable,
    entry_states: torch.Tensor,
    sinks: Sinks,
    precision: str,
    part: Part | None = None,
) -> None:
    """Launch stage 4 over the table's items, or a part of their heads."""
    if not table.num_items:
        return
    num_heads = inputs.num_state_heads
    k_dim, v_dim = inputs.k.shape[2], inputs.v.shape[2]
    choice = choose("cp_prefill", k_dim, v_dim, precision)
    checkpoints = sinks.checkpoints if table.num_checkpoints else None
    checkpoint_start, checkpoint_stop = _checkpoint_ranges(table)
    cp_prefill_kernel[(table.num_items * num_heads * (v_dim // choice.block),)](
        inputs.q,
        inputs.k,
        inputs.v,
        tiles.solve,
        tiles.scores,
        tiles.log_decay,
        tiles.from_start,
        tiles.key_in,
        tiles.key_out,
        tiles.key_scale,
        tiles.query_in,
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
        None if part is None else part.maps.forgot.view(torch.uint8),
        None if part is None or table.early is None else table.early.maps_start,
        None if part is None or table.early is None else table.early.maps_stop,
        sinks.final_dump,
        num_heads,
        inputs.q.shape[1],
        inputs.k.shape[1],
        inputs.v.shape[1],
        *heads_in_rows(inputs.q, inputs.k, inputs.v, sinks.output),
        None if part is None else int(part.early),
        K=k_dim,
        V=v_dim,
        BLOCK=choice.block,
        SLICE=choice.slice,
        PRECISION=precision,
        **choice.options,
    )


def _checkpoint_ranges(table: WorkTable) -> tuple[torch.Tensor, torch.Tensor]:
    """Per item: its entries [start, stop) of the checkpoint table, without those of 0 tokens, which stand for none."""
    item = torch.arange(table.num_items, device=table.checkpoint_item.device)
    key = (table.checkpoint_item << 32) + table.checkpoint_tokens  # sorted, because the table is
    return torch.searchsorted(key, (item << 32) + 1), torch.searchsorted(key, (item + 1) << 32)
