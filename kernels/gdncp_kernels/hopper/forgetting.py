"""The bound on what a cut scan left out, `AffineMaps.dropped`; where scans are cut is decided in `recurrence`.

A token multiplies the state's norm by at most  a = α max(1, |1 − β‖k‖²|)  and adds at most  b = |β| ‖v‖ ‖k‖.  So what
lies before chunk `start` adds at most  Σ b_t Π_{u > t} a_u  (+ gain ‖S_0‖ where S_0 was the initial state) at the end.
Rounded up wherever it is rounded; where nothing was cut programs end at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from gdncp_kernels.common import heads_in_rows

if TYPE_CHECKING:
    from gdncp.scratch import Scratch
    from gdncp.work import WorkTable
    from gdncp_kernels.hopper.tiles import Tiles

L2NORM_EPS = tl.constexpr(1e-6)
SLACK = tl.constexpr(1e-4)  # of fp32 sums, roots and exponentials, with room
AT_ONCE = tl.constexpr(128)
NORM_ROWS = tl.constexpr(16)
SLICES = 16


@triton.jit(do_not_specialize=["H", "HK", "HV", "V_ROW"])
def _reach_kernel(
    v,
    gates,
    keys,
    reach,
    start_chunk,
    token_start,
    num_tokens,
    first_chunk,
    map_item,
    H,
    HK,
    HV,
    V_ROW,
    DIM: tl.constexpr,
    L2NORM: tl.constexpr,
    SLICES: tl.constexpr,
):
    """One program per (map, slice, state head): Σ b_t Π_{u > t} a_u of every SLICES-th chunk before the start, into
    reach [chunks · H]."""
    head = tl.program_id(0) % H
    slice_ = tl.program_id(0) // H % SLICES
    map_ = tl.program_id(0) // (H * SLICES)
    start = tl.load(start_chunk + map_ * H + head)
    item = tl.load(map_item + map_)
    first = tl.load(first_chunk + item)
    tokens = tl.load(num_tokens + item)
    first_token = tl.load(token_start + item)
    i = tl.arange(0, 64)
    column = tl.arange(0, DIM)[None, :]
    for ordinal in range(slice_, start, SLICES):
        token = first_token + ordinal * 64
        live = i < tokens - ordinal * 64
        at = v + ((token + i)[:, None] * V_ROW + head * HV // H) * DIM + column
        values = tl.load(at, mask=live[:, None], other=0.0).to(tl.float32)

        entry = (first + ordinal) * H + head
        to_end = tl.exp2(tl.load(gates + entry * 256 + 63) - tl.load(gates + entry * 256 + i))
        beta = tl.load(gates + entry * 256 + 3 * 64 + i)
        square = tl.load(keys + ((first + ordinal) * HK + head * HK // H) * 64 + i)
        if L2NORM:  # s = rsqrt(‖k‖² + ε), so that the normalised key's square is 1 − ε s²
            square = tl.maximum(1.0 - L2NORM_EPS * square * square, 0.0) + 1e-5
        along = beta * square
        growth = tl.log2(tl.maximum(tl.abs(1.0 - along) + 2e-5 * tl.abs(along), 1.0))
        after = tl.sum(growth, 0) - tl.cumsum(growth, 0)
        b = tl.abs(beta) * tl.sqrt(tl.sum(values * values, 1)) * tl.sqrt(square) * (1.0 + SLACK)
        tl.store(reach + entry, tl.sum(b * to_end * tl.exp2(after + SLACK), 0) * (1.0 + SLACK))


@triton.jit(do_not_specialize=["H", "map_dump"])
def _dropped_kernel(
    growth,
    reach,
    start_chunk,
    num_tokens,
    first_chunk,
    item_row,
    map_item,
    map_row,
    map_is_first,
    entry_states,
    dropped,
    H,
    map_dump,
    DIM: tl.constexpr,
):
    """One program per (map, state head): sums the chunks that were left out, walking backwards 128 at a time."""
    head = tl.program_id(0) % H
    map_ = tl.program_id(0) // H
    start = tl.load(start_chunk + map_ * H + head)
    row = tl.load(map_row + map_)
    if (start == 0) | (row == map_dump):
        return
    item = tl.load(map_item + map_)
    num_chunks = tl.cdiv(tl.load(num_tokens + item), 64).to(tl.int32)
    first = tl.load(first_chunk + item) * H + head
    after = tl.zeros([], tl.float64)  # log2 of Π a over the chunks that have been walked
    bound = tl.zeros([], tl.float64)
    for block in range(tl.cdiv(num_chunks, AT_ONCE)):
        c = num_chunks - (block + 1) * AT_ONCE + tl.arange(0, AT_ONCE)
        x = tl.load(growth + first + c * H, mask=c >= 0, other=0.0).to(tl.float64)
        left_out = tl.load(reach + first + c * H, mask=(c >= 0) & (c < start), other=0.0).to(tl.float64)
        total = tl.sum(x, 0)
        survives = tl.exp((after + total - tl.cumsum(x, 0)) * 0.6931471805599453)  # Π a after chunk c
        bound += tl.sum(tl.where(left_out > 0, left_out * survives, 0.0), 0)
        after += total
    entry_row = tl.load(item_row + item)
    if (tl.load(map_is_first + map_) != 0) & (entry_row >= 0):
        state = entry_states + (entry_row * H + head) * DIM * DIM
        tile = tl.arange(0, NORM_ROWS)[:, None] * DIM + tl.arange(0, DIM)[None, :]
        square = tl.zeros([], tl.float64)
        for v0 in range(0, DIM, NORM_ROWS):
            s = tl.load(state + v0 * DIM + tile).to(tl.float64)
            square += tl.sum(tl.sum(s * s, 1), 0)
        bound += tl.exp(after * 0.6931471805599453) * tl.sqrt(square)
    # fp32, never below: what is not 0 is not rounded to 0
    up = tl.maximum((bound * (1.0 + 1e-6)).to(tl.float32), 1.1754944e-38)
    tl.store(dropped + row * H + head, tl.where(bound > 0, up, 0.0))


def fill_dropped(tiles: Tiles, table: WorkTable, entry_states: torch.Tensor, maps: Scratch, dump_row: int) -> None:
    """Write `dropped` of the maps where the scan was cut at `Tiles.start_chunk`; elsewhere it is 0 already.

    Only for who asks: it reads all values that were left out.
    """
    inputs, start_chunk = tiles.inputs, tiles.start_chunk
    num_heads, reach = inputs.num_state_heads, torch.empty_like(tiles.growth)
    with torch.cuda.device_of(entry_states):
        _reach_kernel[(table.num_maps * SLICES * num_heads,)](
            inputs.v,
            tiles.gates,
            tiles.keys,
            reach,
            start_chunk,
            table.token_start,
            table.num_tokens,
            table.first_chunk,
            table.map_item,
            num_heads,
            inputs.k.shape[1],
            inputs.v.shape[1],
            *heads_in_rows(inputs.v),
            DIM=inputs.k.shape[2],
            L2NORM=inputs.use_qk_l2norm,
            SLICES=SLICES,
            num_warps=4,
        )
        _dropped_kernel[(table.num_maps * num_heads,)](
            tiles.growth,
            reach,
            start_chunk,
            table.num_tokens,
            table.first_chunk,
            table.item_row,
            table.map_item,
            table.map_row,
            table.map_is_first.view(torch.uint8),
            entry_states,
            maps.tensor("dropped"),
            num_heads,
            dump_row,
            DIM=inputs.k.shape[2],
            num_warps=1,
        )
