"""Stages 2 and 4: one kernel that moves states through the chunks of CP chunks.  What its warps do: `partitions`."""

from __future__ import annotations

import math
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from gdncp_kernels.hopper import checkpoints as inner_checkpoints
from gdncp_kernels.hopper import forgetting, tensor_maps
from gdncp_kernels.hopper.common import add, reinterpret
from gdncp_kernels.hopper.launch import Launch, Launcher, Number, Pointer
from gdncp_kernels.hopper.partitions import load_partition, score_partition, state_partition
from gdncp_kernels.hopper.ring import LOCAL_STATE, OUTPUTS, TRANSITION, Checkpoints, Item, Ring, States

if TYPE_CHECKING:
    from gdncp.backends.base import AffineMaps, Sinks, TokenInputs
    from gdncp.work import WorkTable
    from gdncp_kernels.hopper.precompute_t import Tiles

# Ring stages, and registers of a state and of a score thread: 2 · 208 + 72 + 24 <= 512.  With fewer than 208 for the
# state ptxas waits for every wgmma before it issues the next.
STAGES, STATE_REGISTERS, SCORE_REGISTERS, LOAD_REGISTERS = 3, 208, 72, 24
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
    WITH_MAPS: gl.constexpr,
    WITH_OUTPUTS: gl.constexpr,
    L2NORM: gl.constexpr,
    STAGES: gl.constexpr,
    STATE_REGISTERS: gl.constexpr,
    SCORE_REGISTERS: gl.constexpr,
    LOAD_REGISTERS: gl.constexpr,
):
    """Grid (items · H,), or with maps (maps · 2 · H,): first N, then M, of each map; num_warps = 4.

    With maps and outputs, stage 4 of a sequence's first CP chunk gives its N.  `opens` [num_items], where given: the
    items of which stage 4 is done.
    """
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
    entry_at = entry_states + (gl.maximum(entry_row, 0) * H + head) * 16384
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
        exit_at = local_state + (row * H + head) * 16384
        from_entry = has_entry * is_first * (start == 0).to(gl.int32)
        if kind == TRANSITION:  # of a first CP chunk, or one that forgets all of its entry state: zero
            exit_at = transition + (row * H + head) * 16384
            from_entry = 0
            vanishes = (is_first != 0) | forgets
            start = gl.where(vanishes, num_chunks, 0)
            diagonal = gl.where(vanishes, 0.0, 1.0)
        skipped = gl.where(leaves != 0, start, num_chunks)
    else:
        row = gl.load(final_row + item)
        exit_at = final_states + (row * H + head) * 16384
        from_entry = has_entry
        leaves = (row != final_dump).to(gl.int32)
        skipped = gl.to_tensor(0)
        if opens is not None:  # stage 2 has done these
            skipped = gl.where(gl.load(opens + item) != 0, num_chunks, 0)
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
    keys = gl.allocate_shared_memory(dtype, [STAGES, 64, 128], tile)
    values = gl.allocate_shared_memory(dtype, [STAGES, 64, 128], tile)
    solves = gl.allocate_shared_memory(dtype, [STAGES, 64, 64], tile)
    gate_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, 1, 256], flat)
    gates = reinterpret(gate_tiles, gl.float32, [STAGES, 256], plain)
    if L2NORM:
        key_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, 1, 64], flat)
        key_scales = reinterpret(key_tiles, gl.float32, [STAGES, 64], plain)
    else:
        key_tiles = gate_tiles
        key_scales = gates
    if WITH_OUTPUTS:
        queries = gl.allocate_shared_memory(dtype, [STAGES, 64, 128], tile)
        scores = gl.allocate_shared_memory(dtype, [STAGES, 64, 64], tile)
        staged = gl.allocate_shared_memory(dtype, [2, 64, 64], tile)
        query_scales = gl.allocate_shared_memory(gl.float32, [2 * STAGES, 64], plain)
    else:
        queries = keys
        scores = solves
        staged = solves
        query_scales = gates
    if WITH_MAPS:
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
        mbarrier.init(empty.index(s), count=3)
        mbarrier.init(scored.index(s), count=1)
    mbarrier.init(clean, count=1)

    # fp16 has no room for a state that is not multiplied at once
    LEAST_GAMMA: gl.constexpr = 9.313225746154785e-10 if dtype == gl.bfloat16 else 1.0  # 2⁻³⁰
    ring = Ring(
        queries,
        keys,
        values,
        solves,
        gates,
        key_scales,
        gate_tiles,
        key_tiles,
        scores,
        query_scales,
        factors,
        carry,
        staged,
        full,
        empty,
        scored,
        clean,
        STAGES,
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
    gl.warp_specialize(
        [
            (state_partition, (ring, scanned_item, states, inner, output_map, output, 0, WITH_MAPS, WITH_OUTPUTS)),
            (state_partition, (ring, scanned_item, states, inner, output_map, output, 1, WITH_MAPS, WITH_OUTPUTS)),
            (score_partition, (ring, scanned_item, WITH_MAPS, WITH_OUTPUTS)),
            (load_partition, (ring, scanned_item, maps, entry, key_entry, HQ, HK, HV)),
        ],
        [4, 4, 1],
        [STATE_REGISTERS, SCORE_REGISTERS, LOAD_REGISTERS],
    )


_launcher = Launcher(recurrence_kernel, num_warps=4)
_CHANGING = (
    *("q", "k", "v", "output", "tiles", "entry_states", "checkpoints", "final_states", "maps"),  # addresses
    *("scale", "log2_forget_below", "map_dump", "final_dump", "checkpoint_dump"),
)


def precompute_mn(
    inputs: TokenInputs,
    tiles: Tiles,
    table: WorkTable,
    entry_states: torch.Tensor,
    maps: AffineMaps,
    forget_below: float,
    sinks: Sinks | None = None,
) -> None:
    """Launch stage 2 over the table's maps; with `sinks` also stage 4 of the items in `table.opens`."""
    if not table.num_maps or not inputs.k.shape[0]:
        return
    num_rows = maps.scratch.layout.fields["gain"].shape[0]
    key = (precompute_mn, inputs.kind, num_rows, sinks is not None, _has_checkpoints(table, sinks))
    launch = table.prepared.get(key)
    if launch is None:
        arguments = {**_everywhere(inputs, tiles, table), **_outputs(inputs, table, sinks), **_maps(tiles, table, maps)}
        launch = table.prepared[key] = _prepare(table.num_maps * 2 * inputs.num_state_heads, arguments)
    # a table built on the device pads with maps that go to the last row, which nobody reads
    map_dump = num_rows - 1 if table.host is None else -1
    _enqueue(launch, inputs, tiles, entry_states, sinks, maps, _threshold(forget_below), map_dump)
    if forget_below > 0:
        # not of `maps`, which would then keep itself alive
        fill = partial(forgetting.fill_dropped, inputs, tiles, table, entry_states, maps.scratch, map_dump)
        maps.deferred.append(fill)


def cp_prefill(
    inputs: TokenInputs,
    tiles: Tiles,
    table: WorkTable,
    entry_states: torch.Tensor,
    sinks: Sinks,
    opened: bool = False,
) -> None:
    """Launch stage 4 over the table's items; with `opened` without those in `table.opens`, which stage 2 has done."""
    if not table.num_items:
        return
    has_checkpoints = _has_checkpoints(table, sinks)
    key = (cp_prefill, inputs.kind, opened, has_checkpoints)
    launch = table.prepared.get(key)
    if launch is None:
        arguments = {
            **_everywhere(inputs, tiles, table),
            **_outputs(inputs, table, sinks),
            "final_row": table.final_row,
            "final_states": Pointer("final_states", torch.float32),
            "final_dump": Number("final_dump", -1),
            "opens": table.opens.view(torch.uint8) if opened else None,
        }
        launch = table.prepared[key] = _prepare(table.num_items * inputs.num_state_heads, arguments)
    _enqueue(launch, inputs, tiles, entry_states, sinks)
    if has_checkpoints:
        inner_checkpoints.finish(inputs, tiles, table, sinks)


def _has_checkpoints(table: WorkTable, sinks: Sinks | None) -> bool:
    return sinks is not None and sinks.checkpoints is not None and table.num_checkpoints > 0


def _prepare(num_programs: int, arguments: dict[str, Any]) -> Launch:
    """Arguments that are not given are None; those that say what a launch does follow from them."""
    arguments["WITH_MAPS"] = "map_item" in arguments
    arguments["WITH_OUTPUTS"] = "output" in arguments
    return _launcher.prepare(num_programs, _CHANGING, dict.fromkeys(recurrence_kernel.arg_names) | arguments)


def _enqueue(
    launch: Launch,
    inputs: TokenInputs,
    tiles: Tiles,
    entry_states: torch.Tensor,
    sinks: Sinks | None,
    maps: AffineMaps | None = None,
    log2_forget_below: float = 0.0,
    map_dump: int = -1,
) -> None:
    """The values of `_CHANGING`; 0 where a launch has no use for them."""
    output = checkpoints = final_states = 0
    final_dump = checkpoint_dump = -1
    if sinks is not None:
        output, final_states, final_dump = sinks.output.data_ptr(), sinks.final_states.data_ptr(), sinks.final_dump
        if sinks.checkpoints is not None:
            checkpoints, checkpoint_dump = sinks.checkpoints.data_ptr(), sinks.checkpoint_dump
    launch(
        inputs.q.data_ptr(),
        inputs.k.data_ptr(),
        inputs.v.data_ptr(),
        output,
        tiles.scratch.data_ptr(),
        entry_states.data_ptr(),
        checkpoints,
        final_states,
        0 if maps is None else maps.scratch.data_ptr(),
        inputs.scale,
        log2_forget_below,
        map_dump,
        final_dump,
        checkpoint_dump,
    )


@lru_cache(maxsize=256)
def _threshold(forget_below: float) -> float:
    """Its log2, rounded down; below any product, resets too, where nothing is to be forgotten."""
    if forget_below <= 0:
        return -1e30
    threshold = math.log2(forget_below)
    return threshold - 1e-6 * max(abs(threshold), 1.0)


def _everywhere(inputs: TokenInputs, tiles: Tiles, table: WorkTable) -> dict[str, Any]:
    """The kernel's arguments in every launch."""
    layout, num_heads = tiles.scratch.layout, inputs.num_state_heads
    entries, key_entries = table.num_chunks * num_heads, table.num_chunks * inputs.k.shape[1]
    return {
        "k_map": tensor_maps.tokens("k", inputs.k),
        "v_map": tensor_maps.tokens("v", inputs.v),
        "solve_map": tensor_maps.solve("tiles", entries, inputs.k.dtype, layout.offset("solve")),
        "gates_map": tensor_maps.gates("tiles", entries, layout.offset("gates")),
        "keys_map": tensor_maps.keys("tiles", key_entries, layout.offset("keys")) if inputs.use_qk_l2norm else None,
        "token_start": table.token_start,
        "num_tokens": table.num_tokens,
        "first_chunk": table.first_chunk,
        "item_row": table.item_row,
        "entry_states": Pointer("entry_states", torch.float32),
        "scale": Number("scale", 1.0),
        "H": num_heads,
        "HQ": inputs.q.shape[1],
        "HK": inputs.k.shape[1],
        "HV": inputs.v.shape[1],
        "L2NORM": inputs.use_qk_l2norm,
        "STAGES": STAGES,
        "STATE_REGISTERS": STATE_REGISTERS,
        "SCORE_REGISTERS": SCORE_REGISTERS,
        "LOAD_REGISTERS": LOAD_REGISTERS,
    }


def _outputs(inputs: TokenInputs, table: WorkTable, sinks: Sinks | None) -> dict[str, Any]:
    """The kernel's arguments where it makes outputs."""
    if sinks is None:
        return {}
    arguments: dict[str, Any] = {
        "q_map": tensor_maps.tokens("q", inputs.q),
        "output_map": tensor_maps.output("output", sinks.output),
        "output": Pointer("output", sinks.output.dtype),
    }
    if _has_checkpoints(table, sinks):
        arguments |= {
            "checkpoint_start": table.checkpoint_start,
            "checkpoint_tokens": table.checkpoint_tokens,
            "checkpoint_row": table.checkpoint_row,
            "checkpoints": Pointer("checkpoints", torch.float32),
            "checkpoint_dump": Number("checkpoint_dump", -1),
        }
    return arguments


def _maps(tiles: Tiles, table: WorkTable, maps: AffineMaps) -> dict[str, Any]:
    """The kernel's arguments where it makes maps."""
    at, tiles_at = maps.scratch.layout.offset, tiles.scratch.layout.offset
    return {
        "map_item": table.map_item,
        "map_row": table.map_row,
        "map_is_first": table.map_is_first.view(torch.uint8),
        "growth": Pointer("tiles", torch.float32, tiles_at("growth")),
        "transition": Pointer("maps", torch.float32, at("transition")),
        "local_state": Pointer("maps", torch.float32, at("local_state")),
        "gain": Pointer("maps", torch.float32, at("gain")),
        "dropped": Pointer("maps", torch.float32, at("dropped")),
        "forgot": Pointer("maps", torch.uint8, at("forgot")),
        "scanned": Pointer("maps", torch.int32, at("scanned")),
        "start_chunk": Pointer("tiles", torch.int32, tiles_at("start_chunk")),
        "log2_forget_below": Number("log2_forget_below", -16.0),
        "map_dump": Number("map_dump", -1),
    }
