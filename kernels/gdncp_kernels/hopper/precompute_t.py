"""Stage 1: what a chunk of 64 tokens needs to know about itself, whatever state enters it.

Per chunk and state head, i and j counting tokens from the chunk's start, G the cumulative log2 gates:

    A_ij = β_i exp2(G_i − G_j) k_i·k_j  for j < i, else 0
    T = (I + A)⁻¹   [64, 64]

so that the tokens' updates are  U = T diag(β) (V − diag(from_start) K S0ᵀ)  for an entry state S0.  β stays out of T:
its diagonal is then exactly 1, which takes half of bf16's rounding out of a chunk whose keys are nearly orthogonal.

One warp per (chunk, key head), everything in 16 × 16 register blocks: K Kᵀ comes from mma.m16n8k16 on a TMA tile and
is shared by the key head's state heads.  The inverse is built by doubling blocks, X ← X − X A X where two halves join,
which is a forward substitution and safe for equal keys with β = 1.  A transposed 16 × 16 accumulator is, register for
register, a right-hand operand, so X and Xᵀ are carried side by side and nothing moves between lanes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, mma_v2, tma

from gdncp.scratch import Scratch
from gdncp_kernels.hopper import tensor_maps
from gdncp_kernels.hopper.common import (
    BETA,
    FROM_START,
    L2NORM_EPS,
    LOG2E,
    LOG_DECAY,
    RESET,
    TO_END,
    add,
    barrier,
    load_tile,
    reinterpret,
    rows_layout,
    store_tile,
    zero_tail,
)
from gdncp_kernels.hopper.launch import Launch, Launcher, Launches, Pointer
from gdncp_kernels.hopper.tiles import Tiles, tiles_of

if TYPE_CHECKING:
    from gdncp.backends.base import TokenInputs
    from gdncp.work import WorkTable

SMALLEST_LOG_GATE = gl.constexpr(-87.0)  # natural; anything below is a reset
SMALLEST_GATE = gl.constexpr(1.6458115e-38)  # exp of it

MMA = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8]))
LEFT = gl.constexpr(gl.DotOperandLayout(0, gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8]), 2))
RIGHT = gl.constexpr(gl.DotOperandLayout(1, gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8]), 2))
ROW = gl.constexpr(gl.SliceLayout(1, gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8])))
COL = gl.constexpr(gl.SliceLayout(0, gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8])))
TOKENS = gl.constexpr(gl.BlockedLayout([2], [32], [1], [0]))


@gluon.jit
def _accurate_log2(x):
    """log2 of fp32 x > 0 to fp32's relative precision, also near 1, where the hardware's is off by 2e-7 absolute."""
    bits = x.to(gl.int32, bitcast=True)
    exponent = (bits - 0x3F3504F3) >> 23  # so that the mantissa lies in [√½, √2)
    mantissa = (bits - (exponent << 23)).to(gl.float32, bitcast=True)
    t = (mantissa - 1.0) / (mantissa + 1.0)
    s = t * t
    series = 2.8853900817779268 + s * (0.9617966939259756 + s * (0.5770780163555854 + s * (0.4121986 + s * 0.32059893)))
    return exponent.to(gl.float32) + t * series


@gluon.jit
def _load_gates(gate, beta, token, rows, H, head, LOG_SPACE: gl.constexpr):
    """[64] gates as given (no decay past the chunk) and betas (0 past the chunk) of a chunk's tokens."""
    i = gl.arange(0, 64, layout=TOKENS)
    at = (token + i) * H + head
    alpha = gl.full([64], 0.0 if LOG_SPACE else 1.0, gl.float32, TOKENS)
    if gate is not None:
        alpha = gl.load(gate + at, mask=i < rows, other=0.0 if LOG_SPACE else 1.0)
    if beta is not None:
        b = gl.load(beta + at, mask=i < rows, other=0.0)
    else:
        b = gl.where(i < rows, 1.0, 0.0)
    return alpha, b


@gluon.jit
def _log2_gates(alpha, LOG_SPACE: gl.constexpr):
    """log2 of gates as given, RESET for resets."""
    if LOG_SPACE:
        return gl.where(alpha < SMALLEST_LOG_GATE, RESET, alpha * LOG2E)
    else:
        return gl.where(alpha < SMALLEST_GATE, RESET, _accurate_log2(alpha))


@gluon.jit
def _times_transposed(a, b, acc):
    """acc + a bᵀ of 16 × 16 fp16 blocks in accumulator layout: both conversions are register renames."""
    return mma_v2(gl.convert_layout(a, LEFT), gl.convert_layout(b.permute((1, 0)), RIGHT), acc)


@gluon.jit
def _key_products(keys, i: gl.constexpr, j: gl.constexpr):
    """K_i K_jᵀ of 16-row blocks of the tile [64, DIM] -> fp32 [16, 16]."""
    a = keys.slice(16 * i, 16).load(LEFT)
    b = keys.slice(16 * j, 16).permute((1, 0)).load(RIGHT)
    return mma_v2(a, b, gl.zeros([16, 16], gl.float32, MMA))


@gluon.jit
def _store_diagonal(out, products, i: gl.constexpr, row, col):
    out.slice(16 * i, 16).store(gl.sum(gl.where(row == col, products, 0.0), 1))


@gluon.jit
def _row_factor(g, w, i: gl.constexpr):
    """−β_i exp2(G_i − G_ref), ref the first row of block i."""
    g_i = g.slice(16 * i, 16).load(ROW)
    return -w.slice(16 * i, 16).load(ROW) * gl.exp2(g_i - g.slice(16 * i, 1).load(ROW))


@gluon.jit
def _below_diagonal(products, row_factor, g, norm, i: gl.constexpr, j: gl.constexpr, L2NORM: gl.constexpr):
    """−A_ij of blocks i > j, fp16: row factor times exp2(G_ref − G_j)."""
    factor = gl.exp2(g.slice(16 * i, 1).load(COL) - g.slice(16 * j, 16).load(COL))
    if L2NORM:
        factor = factor * norm.slice(16 * j, 16).load(COL)
    return (products * row_factor[:, None] * factor[None, :]).to(gl.float16)


@gluon.jit
def _invert_diagonal(products, g, w, norm, i: gl.constexpr, row, col, eye, zeros, L2NORM: gl.constexpr):
    """Inverse X of the unit lower 16 × 16 diagonal block i: X (fp32), X and Xᵀ (fp16)."""
    difference = g.slice(16 * i, 16).load(ROW)[:, None] - g.slice(16 * i, 16).load(COL)[None, :]
    weight = -w.slice(16 * i, 16).load(ROW)
    a = products * weight[:, None] * gl.exp2(difference)
    if L2NORM:
        a = a * norm.slice(16 * i, 16).load(COL)[None, :]
    a = gl.where(row > col, a, 0.0)  # −A
    X = gl.where((row // 2) == (col // 2), a, 0.0) + eye
    x = X.to(gl.float16)
    XT = _times_transposed(eye.to(gl.float16), x, zeros)
    for level in gl.static_range(1, 4):
        joins = ((row // (2 * 2**level)) == (col // (2 * 2**level))) & ((row // (2**level)) != (col // (2**level)))
        xt = XT.to(gl.float16)
        y = _times_transposed(xt, gl.where(joins, a, 0.0).to(gl.float16), zeros).to(gl.float16)  # (−A X)ᵀ
        X = _times_transposed(x, y, X)  # X − X A X
        XT = _times_transposed(y, x, XT)
        x = X.to(gl.float16)
    return X, x, XT.to(gl.float16)


@gluon.jit
def _put(out, x, i: gl.constexpr, j: gl.constexpr):
    out.slice(16 * i, 16).slice(16 * j, 16, 1).store(x.to(out.dtype))


@gluon.jit(do_not_specialize=["H", "HK", "gate_row"])
def precompute_t_kernel(
    k_map,
    solve_map,
    gate,
    beta,
    gates,
    key_out,
    growth,
    chunk_token,
    chunk_rows,
    H,
    HK,
    gate_row,
    LOG_SPACE: gl.constexpr,
    L2NORM: gl.constexpr,
):
    """Grid (chunks · HK,), one warp each.  Maps: see `tensor_maps`; solve, gates and growth: see `Tiles`.

    gate_row: from one token's gates to the next one's; None: H.
    """
    chunk = gl.program_id(0) // HK
    key_head = gl.program_id(0) % HK
    token = gl.load(chunk_token + chunk)
    rows = gl.load(chunk_rows + chunk).to(gl.int32)
    if rows <= 0:
        return
    dtype: gl.constexpr = k_map.dtype
    DIM: gl.constexpr = k_map.block_shape[1]
    tile: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    if DIM == 128:  # T is staged where the keys were: when the first is made they are used up
        keys = gl.allocate_shared_memory(dtype, [64, 128], tile)
        staged = reinterpret(keys, dtype, [2, 64, 64], tile)
    else:
        staged = gl.allocate_shared_memory(dtype, [2, 64, 64], tile)
        keys = staged.index(0)
    g = gl.allocate_shared_memory(gl.float32, [64], plain)
    w = gl.allocate_shared_memory(gl.float32, [64], plain)  # what A's rows are weighed by: beta, times the key's norm
    norm = gl.allocate_shared_memory(gl.float32, [64], plain)
    arrived = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(arrived, count=1)
    mbarrier.expect(arrived, 64 * DIM * 2)
    load_tile(k_map, [token.to(gl.int32), key_head * DIM], arrived, keys)

    group = H // HK
    first_head = key_head * group
    if gate_row is None:
        gate_row = H
    alpha, b = _load_gates(gate, beta, token, rows, gate_row, first_head, LOG_SPACE)
    i64 = gl.arange(0, 64, layout=TOKENS)
    row = gl.arange(0, 16, layout=ROW)[:, None]
    col = gl.arange(0, 16, layout=COL)[None, :]
    eye = gl.where(row == col, 1.0, 0.0)
    zeros = gl.zeros([16, 16], gl.float32, MMA)
    mbarrier.wait(arrived, 0)
    if rows < 64:  # what follows the item is a neighbour's, and may be NaN
        zero_tail(keys, rows, rows_layout(DIM, 1))
    k00 = _key_products(keys, 0, 0)
    k10 = _key_products(keys, 1, 0)
    k11 = _key_products(keys, 1, 1)
    k20 = _key_products(keys, 2, 0)
    k21 = _key_products(keys, 2, 1)
    k22 = _key_products(keys, 2, 2)
    k30 = _key_products(keys, 3, 0)
    k31 = _key_products(keys, 3, 1)
    k32 = _key_products(keys, 3, 2)
    k33 = _key_products(keys, 3, 3)
    _store_diagonal(norm, k00, 0, row, col)
    _store_diagonal(norm, k11, 1, row, col)
    _store_diagonal(norm, k22, 2, row, col)
    _store_diagonal(norm, k33, 3, row, col)
    barrier()
    square = norm.load(TOKENS)  # ‖k‖²
    key = square
    if L2NORM:
        key = 1.0 / gl.sqrt(square + L2NORM_EPS)
        square = square * key * key
        barrier()
        norm.store(key)
    gl.store(key_out + gl.program_id(0).to(gl.int64) * 64 + i64, key)
    barrier()
    zeros16 = gl.zeros([16, 16], dtype, MMA)
    for u in gl.static_range(2):
        half = staged.index(u)
        half.slice(0, 16).slice(16, 16, 1).store(zeros16)
        half.slice(0, 16).slice(32, 16, 1).store(zeros16)
        half.slice(0, 16).slice(48, 16, 1).store(zeros16)
        half.slice(16, 16).slice(32, 16, 1).store(zeros16)
        half.slice(16, 16).slice(48, 16, 1).store(zeros16)
        half.slice(32, 16).slice(48, 16, 1).store(zeros16)

    for n in range(group):
        entry = chunk * H + first_head + n
        log64 = gl.associative_scan(_log2_gates(alpha, LOG_SPACE).to(gl.float64), 0, add)
        log_decay = log64.to(gl.float32)
        g.store(log_decay)
        w.store(b * key if L2NORM else b)
        barrier()
        total = g.slice(63, 1).load(TOKENS)

        out = gates + entry.to(gl.int64) * (4 * 64) + i64
        gl.store(out + LOG_DECAY * 64, log_decay)
        from_start = gl.exp2(log_decay)
        to_end = gl.exp2(total - log_decay)
        if L2NORM:  # both multiply keys
            from_start = from_start * key
            to_end = to_end * key
        gl.store(out + FROM_START * 64, from_start)
        gl.store(out + TO_END * 64, to_end)
        gl.store(out + BETA * 64, b)
        # a_t = α_t max(1, |1 − β_t ‖k_t‖²|), rounded up: 128 fp32 additions at most made ‖k‖², log2 is off by 2e-7
        along = b * square
        stretch = gl.abs(1.0 - along) + 2e-5 * gl.abs(along)
        stretch_log = gl.sum(gl.where(stretch > 1.0, gl.log2(stretch) + 5e-7, 0.0), 0)
        slack = 1e-6 * (gl.abs(total) + stretch_log)
        gl.store(growth + entry + gl.arange(0, 1, layout=TOKENS), total + stretch_log + slack)

        following = first_head + gl.minimum(n + 1, group - 1)  # its gates travel while this head is inverted
        alpha, b = _load_gates(gate, beta, token, rows, gate_row, following, LOG_SPACE)

        X0, _, t0 = _invert_diagonal(k00, g, w, norm, 0, row, col, eye, zeros, L2NORM)
        X1, x1, t1 = _invert_diagonal(k11, g, w, norm, 1, row, col, eye, zeros, L2NORM)
        f1 = _row_factor(g, w, 1)
        s = _times_transposed(t0, _below_diagonal(k10, f1, g, norm, 1, 0, L2NORM), zeros).to(gl.float16)
        Y10 = _times_transposed(x1, s, zeros)
        y10t = _times_transposed(s, x1, zeros).to(gl.float16)
        f2 = _row_factor(g, w, 2)
        a20 = _below_diagonal(k20, f2, g, norm, 2, 0, L2NORM)
        a21 = _below_diagonal(k21, f2, g, norm, 2, 1, L2NORM)
        f3 = _row_factor(g, w, 3)
        a30 = _below_diagonal(k30, f3, g, norm, 3, 0, L2NORM)
        a31 = _below_diagonal(k31, f3, g, norm, 3, 1, L2NORM)
        b00 = _times_transposed(y10t, a21, _times_transposed(t0, a20, zeros)).to(gl.float16)
        b01 = _times_transposed(y10t, a31, _times_transposed(t0, a30, zeros)).to(gl.float16)
        b10 = _times_transposed(t1, a21, zeros).to(gl.float16)
        b11 = _times_transposed(t1, a31, zeros).to(gl.float16)
        tma.store_wait(pendings=1)
        half = staged.index(n & 1)
        _put(half, X0, 0, 0)
        _put(half, X1, 1, 1)
        _put(half, Y10, 1, 0)
        X2, x2, t2 = _invert_diagonal(k22, g, w, norm, 2, row, col, eye, zeros, L2NORM)
        X3, x3, _ = _invert_diagonal(k33, g, w, norm, 3, row, col, eye, zeros, L2NORM)
        s2 = _times_transposed(t2, _below_diagonal(k32, f3, g, norm, 3, 2, L2NORM), zeros).to(gl.float16)
        Y32 = _times_transposed(x3, s2, zeros)
        y32 = Y32.to(gl.float16)
        _put(half, X2, 2, 2)
        _put(half, X3, 3, 3)
        _put(half, Y32, 3, 2)
        _put(half, _times_transposed(x2, b00, zeros), 2, 0)
        _put(half, _times_transposed(x2, b10, zeros), 2, 1)
        _put(half, _times_transposed(x3, b01, _times_transposed(y32, b00, zeros)), 3, 0)
        _put(half, _times_transposed(x3, b11, _times_transposed(y32, b10, zeros)), 3, 1)
        fence_async_shared()
        barrier()
        store_tile(solve_map, [entry * 64, 0], half)
    tma.store_wait(pendings=0)


_launcher = Launcher(precompute_t_kernel, num_warps=1)
_CHANGING = ("k", "gate", "beta", "tiles")


def precompute_t(inputs: TokenInputs, table: WorkTable) -> Tiles:
    """Launch stage 1 over the table's chunks."""
    key = (precompute_t, inputs.kind)
    prepared = table.prepared.get(key)
    if prepared is None:
        prepared = table.prepared[key] = tiles_of(inputs, table), Launches(_CHANGING, *prepare(inputs, table))
    layout, launches = prepared
    gate, beta, scratch = inputs.gate, inputs.beta, Scratch(layout, inputs.k.device)
    launches(
        inputs.k.data_ptr(),
        None if gate is None else gate.data_ptr(),
        None if beta is None else beta.data_ptr(),
        scratch.address,
    )
    return Tiles(inputs, scratch)


def prepare(inputs: TokenInputs, table: WorkTable) -> list[Launch]:
    """The launch of stage 1, if there is anything to make."""
    num_heads, num_k_heads, layout = inputs.num_state_heads, inputs.k.shape[1], tiles_of(inputs, table)
    if not (table.num_chunks and inputs.k.shape[0]):
        return []
    some_gate = inputs.beta if inputs.gate is None else inputs.gate
    arguments = {
        "k_map": tensor_maps.tokens("k", inputs.k),
        "solve_map": tensor_maps.solve("tiles", table.num_chunks * num_heads, inputs.k.dtype, layout.offset("solve")),
        "gate": None if inputs.gate is None else Pointer("gate", torch.float32),
        "beta": None if inputs.beta is None else Pointer("beta", torch.float32),
        "gates": Pointer("tiles", torch.float32, layout.offset("gates")),
        "key_out": Pointer("tiles", torch.float32, layout.offset("keys")),
        "growth": Pointer("tiles", torch.float32, layout.offset("growth")),
        "chunk_token": table.chunk_token,
        "chunk_rows": table.chunk_rows,
        "H": num_heads,
        "HK": num_k_heads,
        "gate_row": None if some_gate is None else tensor_maps.heads_in_row(some_gate, num_heads),
        "LOG_SPACE": inputs.gate_space == "log",
        "L2NORM": inputs.use_qk_l2norm,
    }
    return [_launcher.prepare(table.num_chunks * num_k_heads, arguments)]
