"""Stages 2 and 4: one kernel that moves states through the chunks of CP chunks.  What its warps do: `partitions`;
its launches: `recurrence_launches`."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from gdncp_kernels.hopper.common import add, reinterpret
from gdncp_kernels.hopper.partitions import load_partition, score_partition, state_partition
from gdncp_kernels.hopper.ring import (
    LOCAL_STATE,
    OUTPUTS,
    TRANSITION,
    Checkpoints,
    Item,
    Ring,
    States,
    num_stages,
    num_tiles,
)
from gdncp_kernels.hopper.scans import makes_x

# By head dim: registers of a state, a score and a load thread.  One CTA of 128 fills an SM, 2 · 208 + 72 + 24 <= 512.
# Of 64 an SM has room for two, in registers, 2 · (160 + 56 + 24) <= 512, and in shared memory, 2 · 99 KiB.  With fewer
# than 208, or 160, for the state ptxas waits for every wgmma before it issues the next.
RESOURCES = {
    128: {"STATE_REGISTERS": 208, "SCORE_REGISTERS": 72, "LOAD_REGISTERS": 24},
    64: {"STATE_REGISTERS": 160, "SCORE_REGISTERS": 56, "LOAD_REGISTERS": 24},
}
REGISTER_CAPS: dict[int, dict[str, int]] = {128: {}, 64: {"maxnreg": 80}}  # a thread at launch; else all of the SM's
GROWTH = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@gluon.jit
def _cut(growth, num_chunks, H, log2_forget_below):
    """log2 of the product of a_t over the item, float64, and the chunk its scan may start from: the latest one from
    which the product is below the threshold, if it is so from the item's start; else 0."""
    lane = gl.arange(0, 128, layout=GROWTH)
    after = gl.to_tensor(0.0).to(gl.float64)
    start = gl.to_tensor(0)
    for block in range((num_chunks + 127) // 128):
        c = num_chunks - (block + 1) * 128 + lane
        x = gl.load(growth + c.to(gl.int64) * H, mask=c >= 0, other=0.0).to(gl.float64)
        total = gl.sum(x, 0)
        from_here = after + total - gl.associative_scan(x, 0, add) + x
        below = (c >= 0) & (from_here < log2_forget_below)
        start = gl.maximum(start, gl.max(gl.where(below, c, 0), 0))
        after = after + total
    return after, gl.where(after < log2_forget_below, start, 0)


@gluon.jit
def _is_known(forgot, maps_start, maps_stop, item, head, H):
    """1 where an item's entry state does not depend on other ranks, see `EarlyTable`; else 0."""
    start = gl.load(maps_start + item).to(gl.int32)
    stop = gl.load(maps_stop + item).to(gl.int32)
    known = (start < 0).to(gl.int32)
    for block in range((stop - start + 127) // 128):
        row = start + block * 128 + gl.arange(0, 128, layout=GROWTH)
        dropped = gl.load(forgot + row.to(gl.int64) * H + head, mask=row < stop, other=0).to(gl.int32)
        known = gl.maximum(known, gl.max(dropped, 0))
    return known


@gluon.jit
def _exp2_up(x):
    """fp32, not below 2^x of a float64 scalar x, nor below fp32's smallest normal number."""
    near = x.to(gl.float32)
    return gl.maximum(gl.exp2(near + gl.abs(near) * 1.2e-7) * 1.000001, 1.1754944e-38)


@gluon.jit(
    do_not_specialize=[
        "scale",
        "log2_forget_below",
        "map_dump",
        "final_dump",
        "checkpoint_dump",
        "H",
        "HQ",
        "HK",
        "HV",
        "early",
        "output_row",
    ]
)
def recurrence_kernel(
    q_map,
    k_map,
    v_map,
    solve_map,
    gates_map,
    keys_map,
    output_map,
    output,
    token_start,
    num_tokens,
    first_chunk,
    item_row,
    entry_states,
    final_row,
    final_states,
    opens,
    maps_start,
    maps_stop,
    checkpoint_start,
    checkpoint_tokens,
    checkpoint_row,
    checkpoints,
    map_item,
    map_row,
    map_is_first,
    growth,
    transition,
    local_state,
    gain,
    dropped,
    forgot,
    scanned,
    start_chunk,
    scale,
    log2_forget_below,
    map_dump,
    final_dump,
    checkpoint_dump,
    H,
    HQ,
    HK,
    HV,
    early,
    output_row,
    WITH_MAPS: gl.constexpr,
    WITH_OUTPUTS: gl.constexpr,
    L2NORM: gl.constexpr,
    STATE_REGISTERS: gl.constexpr,
    SCORE_REGISTERS: gl.constexpr,
    LOAD_REGISTERS: gl.constexpr,
):
    """Grid (items · H,), or with maps (maps · 2 · H,): first N, then M, of each map; num_warps = 4.

    With maps and outputs, stage 4 of a sequence's first CP chunk gives its N.  `opens` [num_items], where given: the
    items of which stage 4 is done.  `maps_start` and `maps_stop`, where given: stage 4 of pairs whose entry state is
    known before the exchange (`early`), or is not.  `output_row`: heads from one token's output to the next one's, H
    where not given.
    """
    DIM: gl.constexpr = k_map.block_shape[1]
    SLABS: gl.constexpr = DIM // 64
    head = gl.program_id(0) % H
    unit = gl.program_id(0) // H
    diagonal = gl.to_tensor(0.0)
    checkpoint_entry = gl.to_tensor(0)
    checkpoint_stop = gl.to_tensor(0)
    if WITH_MAPS:
        map_ = unit // 2
        item = gl.load(map_item + map_)
        is_first = gl.load(map_is_first + map_).to(gl.int32)
        kind = 1 + unit % 2
        if WITH_OUTPUTS:
            kind = gl.where((is_first != 0) & (kind == LOCAL_STATE), OUTPUTS, kind)
    else:
        item = unit.to(gl.int64)
        kind = gl.to_tensor(0)
    tokens = gl.load(num_tokens + item).to(gl.int32)
    token = gl.load(token_start + item).to(gl.int32)
    chunk = gl.load(first_chunk + item)
    num_chunks = (tokens + 63) // 64
    tail_rows = tokens % 64
    entry_row = gl.load(item_row + item)
    has_entry = (entry_row >= 0).to(gl.int32)
    entry_at = entry_states + (gl.maximum(entry_row, 0) * H + head) * (DIM * DIM)
    if WITH_MAPS:
        row = gl.load(map_row + map_)
        leaves = (row != map_dump).to(gl.int32)
        log2_gain, start = _cut(growth + chunk * H + head, num_chunks, H, log2_forget_below)
        forgets = log2_gain < log2_forget_below
        start = gl.where(kind == OUTPUTS, 0, start)
        if kind != TRANSITION:
            if leaves != 0:
                at = row * H + head
                gl.store(gain + at, _exp2_up(log2_gain))
                gl.store(forgot + at, forgets.to(gl.uint8))
                gl.store(scanned + at, tokens - start * 64)
                gl.store(dropped + at, 0.0)
            gl.store(start_chunk + map_ * H + head, gl.where(leaves != 0, start, 0))
        exit_at = local_state + (row * H + head) * (DIM * DIM)
        from_entry = has_entry * is_first * (start == 0).to(gl.int32)
        if kind == TRANSITION:  # of a first CP chunk, or one that forgets all of its entry state: zero
            exit_at = transition + (row * H + head) * (DIM * DIM)
            from_entry = 0
            vanishes = (is_first != 0) | forgets
            start = gl.where(vanishes, num_chunks, 0)
            diagonal = gl.where(vanishes, 0.0, 1.0)
        skipped = gl.where(leaves != 0, start, num_chunks)
    else:
        row = gl.load(final_row + item)
        exit_at = final_states + (row * H + head) * (DIM * DIM)
        from_entry = has_entry
        leaves = (row != final_dump).to(gl.int32)
        skipped = gl.to_tensor(0)
        if opens is not None:  # stage 2 has done these
            skipped = gl.where(gl.load(opens + item) != 0, num_chunks, 0)
        if maps_start is not None:  # another launch does those of the other part
            if _is_known(forgot, maps_start, maps_stop, item, head, H) != early:
                skipped = num_chunks
                leaves = gl.to_tensor(0)
                from_entry = gl.to_tensor(0)
    token += skipped * 64
    chunk += skipped
    num_chunks -= skipped
    tail_rows = gl.where(num_chunks > 0, tail_rows, 0)
    if checkpoints is not None:
        checkpoint_entry = gl.load(checkpoint_start + item).to(gl.int32)
        checkpoint_stop = gl.load(checkpoint_start + item + 1).to(gl.int32)
    if num_chunks == 0:
        checkpoint_stop = checkpoint_entry

    dtype: gl.constexpr = k_map.dtype
    tile: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    flat: gl.constexpr = gl.NVMMASharedLayout(0, 32)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    signal: gl.constexpr = mbarrier.MBarrierLayout()
    STAGES: gl.constexpr = num_stages(DIM, TRANSITION)  # no kind has more
    tiles = gl.allocate_shared_memory(dtype, [num_tiles(DIM), 64, DIM], tile)
    gate_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, 1, 256], flat)
    gates = reinterpret(gate_tiles, gl.float32, [STAGES, 256], plain)
    if L2NORM:
        key_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, 1, 64], flat)
        key_scales = reinterpret(key_tiles, gl.float32, [STAGES, 64], plain)
    else:
        key_tiles = gate_tiles
        key_scales = gates
    if WITH_OUTPUTS:
        staged = gl.allocate_shared_memory(dtype, [SLABS, 64, 64], tile)
        query_scales = gl.allocate_shared_memory(gl.float32, [2 * num_stages(DIM, OUTPUTS), 64], plain)
    else:
        staged = tiles
        query_scales = gates
    if WITH_MAPS:
        if makes_x(DIM, dtype, L2NORM):
            factors = gates
        else:
            factors = gl.allocate_shared_memory(gl.float32, [2 * STAGES, 64], plain)
        carry = gl.allocate_shared_memory(gl.float32, [STAGES, 2], plain)
    else:
        factors = gates
        carry = gates
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], signal)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], signal)
    scored = gl.allocate_shared_memory(gl.int64, [STAGES, 1], signal)
    clean = gl.allocate_shared_memory(gl.int64, [1], signal)
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=SLABS)
        mbarrier.init(scored.index(s), count=1)
    mbarrier.init(clean, count=1)

    # fp16 has no room for a state that is not multiplied at once
    LEAST_GAMMA: gl.constexpr = 9.313225746154785e-10 if dtype == gl.bfloat16 else 1.0  # 2⁻³⁰
    ring = Ring(
        tiles,
        gates,
        key_scales,
        gate_tiles,
        key_tiles,
        query_scales,
        factors,
        carry,
        staged,
        full,
        empty,
        scored,
        clean,
        L2NORM,
        LEAST_GAMMA,
    )
    scanned_item = Item(token, num_chunks, tail_rows, head, H, kind, scale)
    states = States(entry_at, exit_at, from_entry, diagonal, leaves)
    inner = Checkpoints(
        checkpoints, checkpoint_tokens, checkpoint_row, checkpoint_dump, checkpoint_entry, checkpoint_stop
    )
    entry = (chunk * H + head).to(gl.int32)
    key_entry = (chunk * HK + head * HK // H).to(gl.int32)
    maps = (q_map, k_map, v_map, solve_map, gates_map, keys_map)
    if SLABS == 2:
        gl.warp_specialize(
            [
                (
                    state_partition,
                    (ring, scanned_item, states, inner, output_map, output, output_row, 0, WITH_MAPS, WITH_OUTPUTS),
                ),
                (
                    state_partition,
                    (ring, scanned_item, states, inner, output_map, output, output_row, 1, WITH_MAPS, WITH_OUTPUTS),
                ),
                (score_partition, (ring, scanned_item, WITH_MAPS, WITH_OUTPUTS)),
                (
                    load_partition,
                    (ring, scanned_item, maps, entry, key_entry, HQ, HK, HV, WITH_MAPS, WITH_OUTPUTS),
                ),
            ],
            [4, 4, 1],
            [STATE_REGISTERS, SCORE_REGISTERS, LOAD_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (
                    state_partition,
                    (ring, scanned_item, states, inner, output_map, output, output_row, 0, WITH_MAPS, WITH_OUTPUTS),
                ),
                (score_partition, (ring, scanned_item, WITH_MAPS, WITH_OUTPUTS)),
                (
                    load_partition,
                    (ring, scanned_item, maps, entry, key_entry, HQ, HK, HV, WITH_MAPS, WITH_OUTPUTS),
                ),
            ],
            [4, 1],
            [SCORE_REGISTERS, LOAD_REGISTERS],  # STATE_REGISTERS is what is left
        )
