"""The warps of the recurrent kernel: state warpgroups, a score warpgroup and a loader warp, joined by mbarriers.

A CTA moves one state S [DIM rows, DIM keys] through the chunks of a CP chunk.  What it does with it is its `kind`:

    OUTPUTS (stage 4)       o and state checkpoints, from an entry state
    LOCAL_STATE (stage 2)   N, from zero or the initial state
    TRANSITION (stage 2)    M, from the identity, with values 0

The DIM / 64 state warpgroups hold 64 rows each in wgmma accumulators and work on transposes, tokens along the columns:

    U = S Kᵀ    W = (V − U diag(from_start)) diag(β)    N = W Tᵀ    S ← total S + N diag(to_end) K
    out = scale S Qᵀ diag(from_start) + N Pᵀ              P_ij = scale decay(i, j) q_i·k_j for j <= i

The score warpgroup makes P ahead of them.  What it and they do in a scan: `scans`.  Where a ring stage's tiles lie:
`ring`.  `full` says that they have landed, `scored` that P is there, `empty` that the state warpgroups are done with
the stage, which they are after the score warpgroup.  `clean` fires once, in an item with outputs and a tail: the score
warpgroup has zeroed the rows past it, which are a neighbour's and may be NaN.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from gdncp_kernels.hopper.common import (
    A64,
    BETA,
    C64,
    FROM_START,
    L2NORM_EPS,
    LOG_DECAY,
    M64,
    TO_END,
    barrier,
    load_gate,
    load_tile,
    rows_layout,
    state_layout,
    store_tile,
    zero_tail,
)
from gdncp_kernels.hopper.ring import LOCAL_STATE, OUTPUTS, TRANSITION, num_stages
from gdncp_kernels.hopper.scans import make_factors, makes_x, scale_solve, scan

M32 = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16]))
C32 = gl.constexpr(gl.SliceLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16])))
R32 = gl.constexpr(gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16])))
OUT_ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))

SOLVE_AND_GATE_BYTES = gl.constexpr(64 * 64 * 2 + 4 * 64 * 4)
KEY_BYTES = gl.constexpr(64 * 4)
NO_MORE = gl.constexpr(1 << 30)  # position of the checkpoint after the last


@gluon.jit
def load_partition(ring, item, maps, entry, key_entry, HQ, HK, HV, WITH_MAPS: gl.constexpr, WITH_OUTPUTS: gl.constexpr):
    if WITH_OUTPUTS:
        if item.kind == OUTPUTS:
            _load(ring, item, maps, entry, key_entry, HQ, HK, HV, OUTPUTS)
    if WITH_MAPS:
        if item.kind == LOCAL_STATE:
            _load(ring, item, maps, entry, key_entry, HQ, HK, HV, LOCAL_STATE)
        if item.kind == TRANSITION:
            _load(ring, item, maps, entry, key_entry, HQ, HK, HV, TRANSITION)


@gluon.jit
def _load(ring, item, maps, entry, key_entry, HQ, HK, HV, KIND: gl.constexpr):
    """Keys, T and gates for all kinds, values unless TRANSITION, queries for OUTPUTS alone."""
    q_map, k_map, v_map, solve_map, gates_map, keys_map = maps
    H = item.H
    DIM: gl.constexpr = ring.tiles.shape[2]
    STAGES: gl.constexpr = num_stages(DIM, KIND)
    small: gl.constexpr = SOLVE_AND_GATE_BYTES if keys_map is None else SOLVE_AND_GATE_BYTES + KEY_BYTES
    num_token_tiles: gl.constexpr = 3 if KIND == OUTPUTS else (2 if KIND == LOCAL_STATE else 1)
    for i in range(item.num_chunks):
        s = i % STAGES
        at = item.token + i * 64
        row = entry + i * H
        mbarrier.wait(ring.empty.index(s), ((i // STAGES) & 1) ^ 1)
        bar = ring.full.index(s)
        mbarrier.expect(bar, num_token_tiles * 64 * DIM * 2 + small)
        load_tile(solve_map, [row * 64, 0], bar, ring.solve(s, KIND))
        load_tile(gates_map, [row, 0], bar, ring.gate_tiles.index(s))
        if keys_map is not None:
            load_tile(keys_map, [key_entry + i * HK, 0], bar, ring.key_tiles.index(s))
        load_tile(k_map, [at, item.head * HK // H * DIM], bar, ring.keys(s, KIND))
        if KIND == OUTPUTS:
            load_tile(q_map, [at, item.head * HQ // H * DIM], bar, ring.queries(s, KIND))
        if KIND != TRANSITION:
            load_tile(v_map, [at, item.head * HV // H * DIM], bar, ring.values(s, KIND))


@gluon.jit
def _query_scale(query, gate, out, from_entry, scale):
    """out [64] = scale · the L2 norm's factor of each query row; from_entry [64]: times the decay since the entry."""
    LAYOUT: gl.constexpr = rows_layout(query.shape[1], 4)
    for u in gl.static_range(4):
        x = query.slice(16 * u, 16).load(LAYOUT).to(gl.float32)
        factor = scale / gl.sqrt(gl.sum(x * x, 1) + L2NORM_EPS)
        out.slice(16 * u, 16).store(factor)
        log_decay = gate.slice(LOG_DECAY * 64 + 16 * u, 16).load(gl.SliceLayout(1, LAYOUT))
        from_entry.slice(16 * u, 16).store(factor * gl.exp2(log_decay))


@gluon.jit
def score_partition(ring, item, WITH_MAPS: gl.constexpr, WITH_OUTPUTS: gl.constexpr):
    if WITH_OUTPUTS:
        if item.kind == OUTPUTS:
            _prepare(ring, item, OUTPUTS)
    if WITH_MAPS:
        if item.kind == LOCAL_STATE:
            _prepare(ring, item, LOCAL_STATE)
        if item.kind == TRANSITION:
            _prepare(ring, item, TRANSITION)


@gluon.jit
def _prepare(ring, item, KIND: gl.constexpr):
    """Zeroes the tail, and of every chunk makes P, or what a scan multiplies with.

    They need no barrier of their own against being overwritten: `full` follows `empty` of the chunk that used it.
    """
    DIM: gl.constexpr = ring.tiles.shape[2]
    STAGES: gl.constexpr = num_stages(DIM, KIND)
    gamma = gl.to_tensor(1.0)
    for i in range(item.num_chunks):
        s = i % STAGES
        mbarrier.wait(ring.full.index(s), (i // STAGES) & 1)
        if (item.tail_rows > 0) & (i == item.num_chunks - 1):
            zero_tail(ring.keys(s, KIND), item.tail_rows, rows_layout(DIM, 4))
            if KIND != TRANSITION:
                zero_tail(ring.values(s, KIND), item.tail_rows, rows_layout(DIM, 4))
            fence_async_shared()
            barrier()
            if KIND == OUTPUTS:
                mbarrier.arrive(ring.clean, count=1)
        if KIND == OUTPUTS:
            _make_scores(ring, item, s)
        elif makes_x(DIM, ring.tiles.dtype, ring.L2NORM):
            gamma = scale_solve(ring, s, gamma, KIND)
        else:
            gamma = make_factors(ring, s, gamma)
        fence_async_shared()
        mbarrier.arrive(ring.scored.index(s), count=1)


@gluon.jit
def _make_scores(ring, item, s):
    """P [64 queries, 64 keys] in the tokens' dtype."""
    gate = ring.gates.index(s)
    if ring.L2NORM:
        _query_scale(
            ring.queries(s, OUTPUTS),
            gate,
            ring.query_scales.index(2 * s),
            ring.query_scales.index(2 * s + 1),
            item.scale,
        )
        barrier()
    _half_of_scores(ring, item, s, 0)
    _half_of_scores(ring, item, s, 1)


@gluon.jit
def _half_of_scores(ring, item, s, half: gl.constexpr):
    """32 keys at a time: fits this warpgroup's small share of registers."""
    gate = ring.gates.index(s)
    k = ring.keys(s, OUTPUTS).slice(32 * half, 32)
    zeros = gl.zeros([64, 32], gl.float32, M32)
    pending = warpgroup_mma(ring.queries(s, OUTPUTS), k.permute((1, 0)), zeros, use_acc=False, is_async=True)
    g_i = load_gate(gate, LOG_DECAY, R32)
    g_j = gate.slice(LOG_DECAY * 64 + 32 * half, 32).load(C32)
    i_row = gl.arange(0, 64, layout=R32)[:, None]
    j_col = gl.arange(32 * half, 32 * half + 32, layout=C32)[None, :]
    decay = gl.exp2(g_i[:, None] - g_j[None, :])
    if ring.L2NORM:
        decay = decay * ring.query_scales.index(2 * s).load(R32)[:, None]
        decay = decay * ring.key_scales.index(s).slice(32 * half, 32).load(C32)[None, :]
    else:
        decay = decay * item.scale
    p = warpgroup_mma_wait(num_outstanding=0, deps=(pending,))
    p = gl.where(i_row >= j_col, p * decay, 0.0)
    ring.scores(s, OUTPUTS).slice(32 * half, 32, 1).store(p.to(ring.tiles.dtype))


@gluon.jit
def _halve(x):
    """Left and right half of the columns, by renaming registers."""
    return x.reshape((x.shape[0], 2, x.shape[1] // 2)).permute((0, 2, 1)).split()


@gluon.jit
def _quarters(x):
    a, b = _halve(x)
    a0, a1 = _halve(a)
    b0, b1 = _halve(b)
    return a0, a1, b0, b1


@gluon.jit
def _store_columns(x, at, DIM: gl.constexpr):
    layout: gl.constexpr = x.type.layout
    row = gl.arange(0, x.shape[0], layout=gl.SliceLayout(1, layout))[:, None]
    column = gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, layout))[None, :]
    gl.store(at + row * DIM + column, x)


@gluon.jit
def _store_32_columns(x, at, DIM: gl.constexpr):
    a, b, c, d = _quarters(x)
    _store_columns(a, at, DIM)
    _store_columns(b, at + 8, DIM)
    _store_columns(c, at + 16, DIM)
    _store_columns(d, at + 24, DIM)


@gluon.jit
def _store_state(S, at):
    """Store S [64, DIM], fp32, 8 columns at a time: the addresses differ by constants from one that all threads share.

    Stored whole, each group of 8 columns gets an offset of its own, and those stay in registers through the loop.
    """
    DIM: gl.constexpr = S.shape[1]
    if DIM == 128:
        a, b, c, d = _quarters(S)
        _store_32_columns(a, at, DIM)
        _store_32_columns(b, at + 32, DIM)
        _store_32_columns(c, at + 64, DIM)
        _store_32_columns(d, at + 96, DIM)
    else:
        a, b = _halve(S)
        _store_32_columns(a, at, DIM)
        _store_32_columns(b, at + 32, DIM)


@gluon.jit
def _position(checkpoints, number):
    """Tokens of the item before a checkpoint."""
    return gl.load(checkpoints.tokens + number, mask=number < checkpoints.stop, other=NO_MORE).to(gl.int32)


@gluon.jit
def _store_checkpoints(S, checkpoints, item, SLAB: gl.constexpr, number, position, chunks_done):
    """Store S where a checkpoint stands in the chunk that follows: right there if on its first token, else the state
    from which `checkpoints.finish` reaches it.  Returns the next one's number and position."""
    DIM: gl.constexpr = S.shape[1]
    while position // 64 == chunks_done:
        row = gl.load(checkpoints.rows + number)
        if row != checkpoints.dump:
            _store_state(S, checkpoints.at + (row * item.H + item.head) * (DIM * DIM) + SLAB * (64 * DIM))
        number += 1
        position = _position(checkpoints, number)
    return number, position


@gluon.jit
def _prefill(S, ring, item, checkpoints, output_map, output, output_row, SLAB: gl.constexpr):
    """Outputs of all chunks, checkpoints, and the state after them."""
    DIM: gl.constexpr = ring.tiles.shape[2]
    STATE: gl.constexpr = state_layout(DIM)
    dtype: gl.constexpr = ring.tiles.dtype
    STAGES: gl.constexpr = num_stages(DIM, OUTPUTS)
    zeros = gl.zeros([64, 64], gl.float32, M64)
    if checkpoints.at is not None:
        number = checkpoints.first
        position = _position(checkpoints, number)
        number, position = _store_checkpoints(S, checkpoints, item, SLAB, number, position, 0)
    s16 = gl.convert_layout(S.to(dtype), A64)
    for i in range(item.num_chunks):
        s = i % STAGES
        gate = ring.gates.index(s)
        k = ring.keys(s, OUTPUTS)
        mbarrier.wait(ring.full.index(s), (i // STAGES) & 1)
        mbarrier.wait(ring.clean, 0, pred=(item.tail_rows > 0) & (i == item.num_chunks - 1))
        pending_u = warpgroup_mma(s16, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
        pending_q = warpgroup_mma(s16, ring.queries(s, OUTPUTS).permute((1, 0)), zeros, use_acc=False, is_async=True)
        v = ring.values(s, OUTPUTS).slice(SLAB * 64, 64, 1).permute((1, 0)).load(M64)
        from_start = load_gate(gate, FROM_START, C64)
        U = warpgroup_mma_wait(num_outstanding=1, deps=(pending_u,))
        w = (v.to(gl.float32) - U * from_start[None, :]) * load_gate(gate, BETA, C64)[None, :]
        w = gl.convert_layout(w.to(dtype), A64)
        pending_n = warpgroup_mma(w, ring.solve(s, OUTPUTS).permute((1, 0)), zeros, use_acc=False, is_async=True)
        S = S * gl.exp2(gate.slice(LOG_DECAY * 64 + 63, 1).load(gl.SliceLayout(0, STATE)))[None, :]
        if ring.L2NORM:
            mbarrier.wait(ring.scored.index(s), (i // STAGES) & 1)
            from_entry = ring.query_scales.index(2 * s + 1).load(C64)
        else:
            from_entry = load_gate(gate, FROM_START, C64) * item.scale
        out = warpgroup_mma_wait(num_outstanding=1, deps=(pending_q,))
        out = out * from_entry[None, :]
        to_end = load_gate(gate, TO_END, C64)
        N = warpgroup_mma_wait(num_outstanding=0, deps=(pending_n,))
        n16 = gl.convert_layout((N * to_end[None, :]).to(dtype), gl.DotOperandLayout(0, STATE, 2))
        pending_s = warpgroup_mma(n16, k, S, is_async=True)
        mbarrier.wait(ring.scored.index(s), (i // STAGES) & 1)
        n16 = gl.convert_layout(N.to(dtype), A64)
        pending_o = warpgroup_mma(n16, ring.scores(s, OUTPUTS).permute((1, 0)), out, is_async=True)
        S = warpgroup_mma_wait(num_outstanding=1, deps=(pending_s,))
        s16 = gl.convert_layout(S.to(dtype), A64)
        tma.store_wait(pendings=0)
        out = warpgroup_mma_wait(num_outstanding=0, deps=(pending_o,))
        barrier()
        mbarrier.arrive(ring.empty.index(s), count=1)
        at = item.token + i * 64
        stage = ring.staged.index(SLAB)
        stage.permute((1, 0)).store(out.to(dtype))
        if (item.tail_rows == 0) | (i < item.num_chunks - 1):
            fence_async_shared()
            barrier()
            store_tile(output_map, [at, item.head * DIM + SLAB * 64], stage)
        else:
            barrier()
            row = gl.arange(0, 16, layout=gl.SliceLayout(1, OUT_ROWS))[:, None]
            heads = item.H if output_row is None else output_row
            offset = row * (heads * DIM) + gl.arange(0, 64, layout=gl.SliceLayout(0, OUT_ROWS))[None, :]
            base = output + (at.to(gl.int64) * heads + item.head) * DIM + SLAB * 64
            for u in gl.static_range(4):
                x = stage.slice(16 * u, 16).load(OUT_ROWS)
                gl.store(base + offset, x, mask=row < item.tail_rows - 16 * u)
                base += heads * (16 * DIM)
        if checkpoints.at is not None:
            number, position = _store_checkpoints(S, checkpoints, item, SLAB, number, position, i + 1)
    tma.store_wait(pendings=0)
    return S


@gluon.jit
def state_partition(
    ring,
    item,
    states,
    checkpoints,
    output_map,
    output,
    output_row,
    SLAB: gl.constexpr,
    WITH_MAPS: gl.constexpr,
    WITH_OUTPUTS: gl.constexpr,
):
    """State rows SLAB · 64 ... + 63, from where `states` says to where it says."""
    DIM: gl.constexpr = ring.tiles.shape[2]
    STATE: gl.constexpr = state_layout(DIM)
    row = (SLAB * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, STATE)))[:, None]
    column = gl.arange(0, DIM, layout=gl.SliceLayout(0, STATE))[None, :]
    offset = row * DIM + column
    S = gl.where(row == column, states.diagonal, 0.0)
    S = S + gl.load(states.entry + offset, mask=offset < states.from_entry * (DIM * DIM), other=0.0)
    if WITH_OUTPUTS:
        if item.kind == OUTPUTS:
            S = _prefill(S, ring, item, checkpoints, output_map, output, output_row, SLAB)
    if WITH_MAPS:
        if item.kind == LOCAL_STATE:
            S = scan(S, ring, item, SLAB, LOCAL_STATE)
        if item.kind == TRANSITION:
            S = scan(S, ring, item, SLAB, TRANSITION)
    if states.leaves != 0:
        _store_state(S, states.exit + SLAB * (64 * DIM))
