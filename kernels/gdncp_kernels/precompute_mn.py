"""Stage 2: what a CP chunk does to the state that enters it,  S_out = S_in · transition + local_state.

Both are the same scan over the CP chunk's 64-token chunks, in blocks of state rows:

    local_state N [V, K]: from S = 0 with the values (from the initial state in a sequence's first CP chunk)
    transition  M [K, K]: from S = I with values 0; zero where nothing of S_in is needed or survives

    U = solve (V − diag(key_in) K Sᵀ)            [64, rows]
    Sᵀ ← total Sᵀ + Kᵀ diag(key_out) U           [K, rows]
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
    load_column,
    load_rows,
    operand,
    slices_times_state,
)
from gdncp_kernels.forgetting import decide
from gdncp_kernels.launch_table import choose

if TYPE_CHECKING:
    from gdncp.backends.base import AffineMaps, TokenInputs
    from gdncp.work import WorkTable
    from gdncp_kernels.precompute_t import Tiles


@triton.jit(do_not_specialize=["dump_row", "H", "HK", "HV", "K_ROW", "V_ROW"])
def scan_kernel(
    k,
    v,
    solve,
    from_start,
    key_in,
    key_out,
    token_start,
    num_tokens,
    item_row,
    map_item,
    map_row,
    map_is_first,
    start_chunk,
    forgot,
    entry_states,
    transition,
    local_state,
    dump_row,
    H,
    HK,
    HV,
    K_ROW,
    V_ROW,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    SLICE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program per (map, state head, block of rows of N or M)."""
    NUM_BLOCKS: tl.constexpr = (V + K) // BLOCK
    block = tl.program_id(0) % NUM_BLOCKS
    head = tl.program_id(0) // NUM_BLOCKS % H
    map_ = tl.program_id(0) // (NUM_BLOCKS * H)
    row = tl.load(map_row + map_)
    if row == dump_row:
        return
    item = tl.load(map_item + map_)
    is_first = tl.load(map_is_first + map_) != 0
    is_transition = block >= V // BLOCK
    start = tl.load(start_chunk + map_ * H + head)

    key = tl.arange(0, SLICE)[:, None]
    state_row = (tl.where(is_transition, block - V // BLOCK, block) * BLOCK + tl.arange(0, BLOCK))[None, :]
    in_state = state_row * K + key  # of the first slice
    if is_transition:
        out = transition + (row * H + head) * K * K
    else:
        out = local_state + (row * H + head) * V * K
    if is_transition & (is_first | (tl.load(forgot + row * H + head) != 0)):
        for j in tl.static_range(K // SLICE):
            tl.store(out + j * SLICE + in_state, tl.zeros([SLICE, BLOCK], tl.float32))
        return
    entry_row = tl.load(item_row + item)
    from_entry = is_first & (start == 0) & (entry_row >= 0)  # of a transition never: a first one ended above
    entry = entry_states + (tl.maximum(entry_row, 0) * H + head) * V * K
    state = ()
    for j in tl.static_range(K // SLICE):
        identity = tl.where(is_transition & (key + j * SLICE == state_row), 1.0, 0.0)
        entered = tl.load(entry + j * SLICE + in_state, mask=in_state < V * K * from_entry, other=0.0)
        state = appended(state, identity + entered)

    tokens = tl.load(num_tokens + item)
    first_token = tl.load(token_start + item)
    k_head = k + (head * HK // H) * K
    v_block = v + (head * HV // H) * V + tl.minimum(block, V // BLOCK - 1) * BLOCK
    for c in range(start, tl.cdiv(tokens, CHUNK).to(tl.int32)):
        token = first_token + c * CHUNK
        rows = tl.minimum(tokens - c * CHUNK, CHUNK)
        values = load_rows(v_block, token, tl.where(is_transition, 0, rows), V_ROW * V, BLOCK).to(tl.float32)
        x = load_rows(solve + head * CHUNK, token, rows, H * CHUNK, CHUNK)
        scale_in = load_column(key_in + head, token, rows, H)
        scale_out = load_column(key_out + head, token, rows, H)
        total = tl.load(from_start + (token + rows - 1) * H + head)

        rest = values - scale_in[:, None] * slices_times_state(k_head, token, rows, K_ROW * K, state, PRECISION)
        update = scale_out[:, None] * dot(x, operand(rest, PRECISION), PRECISION)
        state = add_outer(state, total, k_head, token, rows, K_ROW * K, operand(update, PRECISION), PRECISION)
    for j in tl.static_range(K // SLICE):
        tl.store(out + j * SLICE + in_state, state[j])


def precompute_mn(
    inputs: TokenInputs,
    tiles: Tiles,
    table: WorkTable,
    entry_states: torch.Tensor,
    maps: AffineMaps,
    forget_below: float,
    precision: str,
) -> None:
    """Launch stage 2 over the table's maps."""
    if not table.num_maps:
        return
    # a table built on the device pads with maps that go to the last row, which nobody reads
    dump_row = maps.transition.shape[0] - 1 if table.host is None else -1
    start_chunk = decide(inputs, table, entry_states, maps, forget_below, dump_row, precision)
    num_heads = inputs.num_state_heads
    k_dim, v_dim = inputs.k.shape[2], inputs.v.shape[2]
    choice = choose("scan", k_dim, v_dim, precision)
    scan_kernel[(table.num_maps * num_heads * (v_dim + k_dim) // choice.block,)](
        inputs.k,
        inputs.v,
        tiles.solve,
        tiles.from_start,
        tiles.key_in,
        tiles.key_out,
        table.token_start,
        table.num_tokens,
        table.item_row,
        table.map_item,
        table.map_row,
        table.map_is_first.view(torch.uint8),
        start_chunk,
        maps.forgot.view(torch.uint8),
        entry_states,
        maps.transition,
        maps.local_state,
        dump_row,
        num_heads,
        inputs.k.shape[1],
        inputs.v.shape[1],
        *heads_in_rows(inputs.k, inputs.v),
        K=k_dim,
        V=v_dim,
        BLOCK=choice.block,
        SLICE=choice.slice,
        PRECISION=precision,
        **choice.options,
    )
