"""What stage 2 may leave out: a bound per CP chunk and head on what survives its gates, decided on the device.

A token multiplies the state's norm by at most  a = α max(1, |1 − β‖k‖²|)  and adds at most  b = |β| ‖v‖ ‖k‖.  Then

    gain = Π a                                              over the CP chunk: ‖S_in · M‖ <= gain ‖S_in‖
    start = the latest chunk boundary that is left out by the product of a after it being below `forget_below`
    dropped = Σ b_t Π_{u > t} a_u  over what comes before start  (+ gain ‖S_0‖ where S_0 was the initial state)

All in float64, rounded up wherever it is rounded.  Nothing is cut unless gain < forget_below.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from gdncp_kernels.common import CHUNK, L2NORM_EPS, chunk_span, heads_in_rows, load_beta, load_log_gate, load_rows
from gdncp_kernels.launch_table import choose

if TYPE_CHECKING:
    from gdncp.backends.base import AffineMaps, TokenInputs
    from gdncp.work import WorkTable

CHUNKS_AT_ONCE = tl.constexpr(64)
NORM_ROWS = tl.constexpr(16)
FP32_SLACK = tl.constexpr(1e-6)  # of a sum of at most 256 squares in fp32
FP64_SLACK = tl.constexpr(1e-10)  # of sums and exponentials in float64
SMALLEST_NORMAL = tl.constexpr(1.1754944e-38)


@triton.jit
def round_up(x):
    """float64 -> fp32, never below x."""
    y = x.to(tl.float32)
    return tl.where(y.to(tl.float64) < x, tl.maximum(y * 1.0000003, SMALLEST_NORMAL), y)


@triton.jit(do_not_specialize=["H", "HK", "HV", "K_ROW", "V_ROW", "GATE_ROW", "BETA_ROW"])
def chunk_bounds_kernel(
    k,
    v,
    gate,
    beta,
    token_start,
    num_tokens,
    chunk_item,
    chunk_ordinal,
    log_growth,
    reach,
    H,
    HK,
    HV,
    K_ROW,
    V_ROW,
    GATE_ROW,
    BETA_ROW,
    K: tl.constexpr,
    V: tl.constexpr,
    LOG_SPACE: tl.constexpr,
    L2NORM: tl.constexpr,
):
    """One program per (flat chunk, state head): log Π a and Σ b_t Π_{u > t} a_u of the chunk."""
    head = tl.program_id(0) % H
    chunk = tl.program_id(0) // H
    token, rows = chunk_span(tl.load(chunk_item + chunk), tl.load(chunk_ordinal + chunk), token_start, num_tokens)
    if rows <= 0:
        return
    keys = load_rows(k + (head * HK // H) * K, token, rows, K_ROW * K, K).to(tl.float32)
    values = load_rows(v + (head * HV // H) * V, token, rows, V_ROW * V, V).to(tl.float32)
    beta_ = load_beta(beta, head, token, rows, BETA_ROW).to(tl.float64)
    log_alpha = load_log_gate(gate, head, token, rows, GATE_ROW, LOG_SPACE)

    key_square = tl.sum(keys * keys, 1).to(tl.float64)
    value_square = tl.sum(values * values, 1).to(tl.float64)
    if L2NORM:
        key_square = key_square / (key_square + L2NORM_EPS)
    along_key = beta_ * key_square
    stretch = tl.maximum(tl.abs(1.0 - along_key) + FP32_SLACK * tl.abs(along_key), 1.0)
    log_a = log_alpha * (1.0 - FP64_SLACK) + tl.log(stretch)
    b = tl.abs(beta_) * tl.sqrt(key_square * value_square) * (1.0 + 4 * FP32_SLACK)

    total = tl.sum(log_a, 0)
    tl.store(log_growth + chunk * H + head, total)
    tl.store(reach + chunk * H + head, tl.sum(b * tl.exp(total - tl.cumsum(log_a, 0)), 0))


@triton.jit(do_not_specialize=["H", "dump_row"])
def cut_kernel(
    log_growth,
    reach,
    num_tokens,
    item_row,
    first_chunk,
    map_item,
    map_row,
    map_is_first,
    entry_states,
    gain,
    dropped,
    forgot,
    scanned,
    start_chunk,
    forget_below,
    dump_row,
    H,
    K: tl.constexpr,
    V: tl.constexpr,
):
    """One program per (map, state head): walks its chunks backwards, 64 at a time."""
    head = tl.program_id(0) % H
    map_ = tl.program_id(0) // H
    row = tl.load(map_row + map_)
    if row == dump_row:
        return
    item = tl.load(map_item + map_)
    tokens = tl.load(num_tokens + item)
    num_chunks = tl.cdiv(tokens, CHUNK).to(tl.int32)
    summary = tl.load(first_chunk + item) * H + head

    log_after = tl.zeros([], tl.float64)  # log Π a over the chunks that have been walked
    bound = tl.zeros([], tl.float64)
    start = tl.zeros([], tl.int32)
    for block in range(tl.cdiv(num_chunks, CHUNKS_AT_ONCE)):
        c = num_chunks - (block + 1) * CHUNKS_AT_ONCE + tl.arange(0, CHUNKS_AT_ONCE)
        log_a = tl.load(log_growth + summary + c * H, mask=c >= 0, other=0.0)
        b = tl.load(reach + summary + c * H, mask=c >= 0, other=0.0)
        total = tl.sum(log_a, 0)
        survives = tl.exp(log_after + total - tl.cumsum(log_a, 0))  # Π a after chunk c
        may_start = (survives < forget_below) & (c >= 0) & (c + 1 < num_chunks)
        start = tl.maximum(start, tl.max(tl.where(may_start, c + 1, 0), 0))
        bound += tl.sum(tl.where((c >= 0) & (c < start), b * survives, 0.0), 0)
        log_after += total

    product = tl.exp(log_after)
    forgets = product < forget_below
    start = tl.where(forgets, start, 0)
    entry_row = tl.load(item_row + item)
    if (start > 0) & (tl.load(map_is_first + map_) != 0) & (entry_row >= 0):
        state = entry_states + (entry_row * H + head) * V * K
        tile = tl.arange(0, NORM_ROWS)[:, None] * K + tl.arange(0, K)[None, :]
        square = tl.zeros([], tl.float64)
        for v0 in range(0, V, NORM_ROWS):
            s = tl.load(state + v0 * K + tile).to(tl.float64)
            square += tl.sum(tl.sum(s * s, 1), 0)
        bound += product * tl.sqrt(square)

    out = row * H + head
    tl.store(gain + out, round_up(product))
    tl.store(dropped + out, tl.where(start > 0, round_up(bound * (1.0 + FP64_SLACK)), 0.0))
    tl.store(forgot + out, forgets.to(tl.uint8))
    tl.store(scanned + out, (tokens - start * CHUNK).to(tl.int32))
    tl.store(start_chunk + map_ * H + head, start)


def decide(
    inputs: TokenInputs,
    table: WorkTable,
    entry_states: torch.Tensor,
    maps: AffineMaps,
    forget_below: float,
    dump: int,
    precision: str,
) -> torch.Tensor:
    """Fill the bounds of `maps` and return the chunk each scan starts from, [num_maps, H] int32."""
    num_heads, device = inputs.num_state_heads, inputs.k.device
    k_dim, v_dim = inputs.k.shape[2], inputs.v.shape[2]
    log_growth = torch.empty(table.num_chunks, num_heads, dtype=torch.float64, device=device)
    reach = torch.empty_like(log_growth)
    start_chunk = torch.empty(table.num_maps, num_heads, dtype=torch.int32, device=device)
    if table.num_chunks:
        chunk_bounds_kernel[(table.num_chunks * num_heads,)](
            inputs.k,
            inputs.v,
            inputs.gate,
            inputs.beta,
            table.token_start,
            table.num_tokens,
            table.chunk_item,
            table.chunk_ordinal,
            log_growth,
            reach,
            num_heads,
            inputs.k.shape[1],
            inputs.v.shape[1],
            *heads_in_rows(inputs.k, inputs.v, inputs.gate, inputs.beta),
            K=k_dim,
            V=v_dim,
            LOG_SPACE=inputs.gate_space == "log",
            L2NORM=inputs.use_qk_l2norm,
            **choose("chunk_bounds", k_dim, v_dim, precision).options,
        )
    # chunks lie item after item, so an item's first one is where its number first appears
    first_chunk = torch.searchsorted(table.chunk_item, torch.arange(table.num_items, device=device))
    cut_kernel[(table.num_maps * num_heads,)](
        log_growth,
        reach,
        table.num_tokens,
        table.item_row,
        first_chunk,
        table.map_item,
        table.map_row,
        table.map_is_first.view(torch.uint8),
        entry_states,
        maps.gain,
        maps.dropped_rows,
        maps.forgot.view(torch.uint8),
        maps.scanned,
        start_chunk,
        forget_below,
        dump,
        num_heads,
        K=k_dim,
        V=v_dim,
        **choose("cut", k_dim, v_dim, precision).options,
    )
    return start_chunk
