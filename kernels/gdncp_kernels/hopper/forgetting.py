"""The bound on what a cut scan left out, `AffineMaps.dropped`; where scans are cut is decided in `recurrence`.

A token multiplies the state's norm by at most  a = α max(1, |1 − β‖k‖²|)  and adds at most  b = |β| ‖v‖ ‖k‖.  So what
lies before chunk `start` adds at most  Σ b_t Π_{u > t} a_u  (+ gain ‖S_0‖ where S_0 was the initial state) at the end.
Rounded up wherever it is rounded; a chunk without a cut costs a program that ends at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from gdncp.backends.base import AffineMaps, TokenInputs
    from gdncp.work import WorkTable
    from gdncp_kernels.hopper.precompute_t import Tiles

DIM = tl.constexpr(128)
L2NORM_EPS = tl.constexpr(1e-6)
SLACK = tl.constexpr(1e-4)  # of fp32 sums, roots and exponentials, with room
AT_ONCE = tl.constexpr(128)
NORM_ROWS = tl.constexpr(16)


@triton.jit(do_not_specialize=["H", "HV", "max_chunks"])
def _reach_kernel(
    v,
    gates,
    reach,
    start_chunk,
    token_start,
    num_tokens,
    first_chunk,
    map_item,
    H,
    HV,
    max_chunks,
    L2NORM: tl.constexpr,
):
    """One program per (map, chunk, state head): Σ b_t Π_{u > t} a_u over the chunk, into reach [chunks · H]."""
    head = tl.program_id(0) % H
    ordinal = tl.program_id(0) // H % max_chunks
    map_ = tl.program_id(0) // (H * max_chunks)
    if ordinal >= tl.load(start_chunk + map_ * H + head):
        return
    item = tl.load(map_item + map_)
    entry = (tl.load(first_chunk + item) + ordinal) * H + head
    rows = tl.minimum(tl.load(num_tokens + item) - ordinal * 64, 64)
    token = tl.load(token_start + item) + ordinal * 64
    i = tl.arange(0, 64)
    at = v + ((token + i)[:, None] * HV + head * HV // H) * DIM + tl.arange(0, DIM)[None, :]
    values = tl.load(at, mask=(i < rows)[:, None], other=0.0).to(tl.float32)

    gate = gates + entry * 384 + i
    to_end = tl.load(gate + 2 * 64)
    beta = tl.load(gate + 3 * 64)
    square = tl.load(gate + 5 * 64)
    if L2NORM:
        square = tl.maximum(1.0 - L2NORM_EPS * square * square, 0.0) + 1e-5
    along = beta * square
    stretch = tl.maximum(tl.abs(1.0 - along) + 2e-5 * tl.abs(along), 1.0)
    growth = tl.log2(stretch)
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
    if tl.load(map_is_first + map_) != 0:
        state = entry_states + (tl.load(item_row + item) * H + head) * DIM * DIM
        tile = tl.arange(0, NORM_ROWS)[:, None] * DIM + tl.arange(0, DIM)[None, :]
        square = tl.zeros([], tl.float64)
        for v0 in range(0, DIM, NORM_ROWS):
            s = tl.load(state + v0 * DIM + tile).to(tl.float64)
            square += tl.sum(tl.sum(s * s, 1), 0)
        bound += tl.exp(after * 0.6931471805599453) * tl.sqrt(square)
    # fp32, never below: what is not 0 is not rounded to 0
    up = tl.maximum((bound * (1.0 + 1e-6)).to(tl.float32), 1.1754944e-38)
    tl.store(dropped + row * H + head, tl.where(bound > 0, up, 0.0))


def fill_dropped(
    inputs: TokenInputs,
    tiles: Tiles,
    table: WorkTable,
    entry_states: torch.Tensor,
    maps: AffineMaps,
    start_chunk: torch.Tensor,
    dump_row: int,
) -> None:
    """Write `maps.dropped` of the maps whose scan was cut at start_chunk [num_maps, H]; the others' is 0 already."""
    num_heads = inputs.num_state_heads
    reach = torch.empty_like(tiles.growth)
    _reach_kernel[(table.num_maps * table.max_chunks * num_heads,)](
        inputs.v,
        tiles.gates,
        reach,
        start_chunk,
        table.token_start,
        table.num_tokens,
        table.first_chunk,
        table.map_item,
        num_heads,
        inputs.v.shape[1],
        table.max_chunks,
        L2NORM=inputs.use_qk_l2norm,
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
        maps.dropped,
        num_heads,
        dump_row,
        num_warps=1,
    )
