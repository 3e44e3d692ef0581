"""Stage 2's scans: a state through the chunks, no outputs.

What scans are slow at is not the products but the arithmetic between them.  So the state is not multiplied by `total`
in every chunk: warps hold S/γ, γ the product of the totals so far, until γ gets small (`_behind`), and the score
warpgroup, which has no P to make, multiplies γ into what they multiply with (`scored` says that it is there).

With head dim 128 that is all that is between the products.  Of T the score warpgroup makes two matrices:

    N = Vᵀ Yᵀ + U Xᵀ      X = −diag(to_end) T diag(β from_start)      Y = diag(to_end) T diag(β)

With head dim 64 the rounding of X would cost too much accuracy: it makes the factors of each token alone.  So it does
with L2 norm in fp16: X has the norms' factors twice, 10⁶ for a key of zeros, which fp16 has no room for, and 10⁻⁶ for
one of length 1000.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from gdncp_kernels.hopper.common import (
    A64,
    BETA,
    C64,
    FROM_START,
    LOG_DECAY,
    M64,
    TO_END,
    load_gate,
    rows_layout,
    state_layout,
)
from gdncp_kernels.hopper.ring import LOCAL_STATE, TRANSITION, num_stages

TOKENS = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@gluon.constexpr_function
def makes_x(DIM, dtype, L2NORM):
    return DIM == 128 and not (L2NORM and dtype == gl.float16)


@gluon.jit
def _scalar(memory, position: gl.constexpr, LAYOUT: gl.constexpr):
    """One number of shared memory, the same for all threads."""
    return gl.sum(memory.slice(position, 1).load(LAYOUT), 0)


@gluon.jit
def _behind(ring, s, gamma):
    """γ behind a chunk, and what the state is multiplied by there: γ once it is below LEAST_GAMMA, else 1."""
    behind = gamma * gl.exp2(_scalar(ring.gates.index(s), LOG_DECAY * 64 + 63, TOKENS))
    small = behind < ring.LEAST_GAMMA
    return gl.where(small, 1.0, behind), gl.where(small, behind, 1.0)


@gluon.jit
def _store_carry(ring, s, behind, multiply):
    ring.carry.index(s).store(gl.where(gl.arange(0, 2, layout=TOKENS) == 0, multiply, behind))


@gluon.jit
def make_factors(ring, s, gamma):
    """What a chunk's products with S/γ are multiplied by, γ before and behind the chunk.  Returns the γ behind it."""
    gate = ring.gates.index(s)
    behind, multiply = _behind(ring, s, gamma)
    _store_carry(ring, s, behind, multiply)
    ring.factors.index(2 * s).store(load_gate(gate, FROM_START, TOKENS) * gamma)
    ring.factors.index(2 * s + 1).store(load_gate(gate, TO_END, TOKENS) * (1.0 / behind))
    return behind


@gluon.jit
def scale_solve(ring, s, gamma, KIND: gl.constexpr):
    """Makes X of a chunk's T, in its place, and for values Y, in P's, times γ before and over γ behind the chunk.
    Returns the latter."""
    LAYOUT: gl.constexpr = rows_layout(64, 4)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    dtype: gl.constexpr = ring.tiles.dtype
    gate = ring.gates.index(s)
    # all is read before anything is written, and both are written at once: Triton parts reads and writes of memory that
    # it cannot tell apart, and writes too, by barriers
    x = ring.solve(s, KIND).load(LAYOUT)
    to_end = load_gate(gate, TO_END, gl.SliceLayout(1, LAYOUT))
    beta = load_gate(gate, BETA, COLUMNS)
    from_start = load_gate(gate, FROM_START, COLUMNS)
    behind, multiply = _behind(ring, s, gamma)
    x = x.to(gl.float32) * (to_end * (1.0 / behind))[:, None]
    by_state = (x * (beta * from_start * -gamma)[None, :]).to(dtype)
    if KIND == LOCAL_STATE:
        by_value = (x * beta[None, :]).to(dtype)
        both = gl.join(by_state, by_value).permute((0, 2, 1)).reshape((64, 128))
        ring.pair(s, KIND).store(both)
    else:
        ring.solve(s, KIND).store(by_state)
    _store_carry(ring, s, behind, multiply)
    return behind


@gluon.jit
def scan(S, ring, item, SLAB: gl.constexpr, KIND: gl.constexpr):
    """The state after all chunks, nothing else."""
    if makes_x(ring.tiles.shape[2], ring.tiles.dtype, ring.L2NORM):
        return _scan_with_scaled(S, ring, item, SLAB, KIND)
    else:
        return _scan_with_factors(S, ring, item, SLAB, KIND)


@gluon.jit
def _carry(ring, s, which: gl.constexpr, STATE: gl.constexpr):
    return _scalar(ring.carry.index(s), which, gl.SliceLayout(0, STATE))


@gluon.jit
def _from_values(ring, item, i, SLAB: gl.constexpr, KIND: gl.constexpr):
    """Waits for chunk i, if there is one, and starts its Vᵀ Yᵀ, 0 without values."""
    STAGES: gl.constexpr = num_stages(128, KIND)
    s = i % STAGES
    mbarrier.wait(ring.scored.index(s), (i // STAGES) & 1, pred=i < item.num_chunks)  # which is after `full`
    zeros = gl.zeros([64, 64], gl.float32, M64)
    if KIND == TRANSITION:
        return zeros
    else:
        v = ring.values(s, KIND).slice(SLAB * 64, 64, 1).permute((1, 0))
        y = ring.scores(s, KIND).permute((1, 0))
        return warpgroup_mma(v, y, zeros, use_acc=False, is_async=True)


@gluon.jit
def _scan_with_scaled(S, ring, item, SLAB: gl.constexpr, KIND: gl.constexpr):
    """The values' product is a chunk ahead: it runs while N is rounded.  The barriers by which a stage is given back
    run beside the next chunk's U."""
    STAGES: gl.constexpr = num_stages(128, KIND)
    STATE: gl.constexpr = state_layout(128)
    WITH_VALUES: gl.constexpr = KIND == LOCAL_STATE
    dtype: gl.constexpr = ring.tiles.dtype
    zeros = gl.zeros([64, 64], gl.float32, M64)
    gamma = gl.to_tensor(1.0)
    N = _from_values(ring, item, 0, SLAB, KIND)
    if WITH_VALUES:
        N = warpgroup_mma_wait(num_outstanding=0, deps=(N,))
    for i in range(item.num_chunks):
        s = i % STAGES
        k = ring.keys(s, KIND)
        x = ring.solve(s, KIND).permute((1, 0))
        s16 = gl.convert_layout(S.to(dtype), A64)
        U = warpgroup_mma(s16, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
        mbarrier.arrive(ring.empty.index((i + STAGES - 1) % STAGES), count=1, pred=i > 0)
        multiply = _carry(ring, s, 0, STATE)
        gamma = _carry(ring, s, 1, STATE)
        U = warpgroup_mma_wait(num_outstanding=0, deps=(U,))
        u16 = gl.convert_layout(U.to(dtype), A64)
        N = warpgroup_mma(u16, x, N, use_acc=WITH_VALUES, is_async=True)
        ahead = _from_values(ring, item, i + 1, SLAB, KIND)
        if multiply != 1.0:
            S = S * multiply
        N = warpgroup_mma_wait(num_outstanding=1 if WITH_VALUES else 0, deps=(N,))
        n16 = gl.convert_layout(N.to(dtype), gl.DotOperandLayout(0, STATE, 2))
        S = warpgroup_mma(n16, k, S, is_async=True)
        if WITH_VALUES:
            S, N = warpgroup_mma_wait(num_outstanding=0, deps=(S, ahead))
        else:
            S = warpgroup_mma_wait(num_outstanding=0, deps=(S,))
            N = ahead
    return S * gamma


@gluon.jit
def _scan_with_factors(S, ring, item, SLAB: gl.constexpr, KIND: gl.constexpr):
    DIM: gl.constexpr = ring.tiles.shape[2]
    STAGES: gl.constexpr = num_stages(DIM, KIND)
    STATE: gl.constexpr = state_layout(DIM)
    WITH_VALUES: gl.constexpr = KIND == LOCAL_STATE
    dtype: gl.constexpr = ring.tiles.dtype
    zeros = gl.zeros([64, 64], gl.float32, M64)
    gamma = gl.to_tensor(1.0)
    for i in range(item.num_chunks):
        s = i % STAGES
        k = ring.keys(s, KIND)
        s16 = gl.convert_layout(S.to(dtype), A64)
        mbarrier.wait(ring.scored.index(s), (i // STAGES) & 1)  # which is after `full`
        pending_u = warpgroup_mma(s16, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
        if WITH_VALUES:
            v = ring.values(s, KIND).slice(SLAB * 64, 64, 1).permute((1, 0)).load(M64)
        from_start = ring.factors.index(2 * s).load(C64)
        beta = load_gate(ring.gates.index(s), BETA, C64)
        U = warpgroup_mma_wait(num_outstanding=0, deps=(pending_u,))
        if WITH_VALUES:
            w = ((v.to(gl.float32) - U * from_start[None, :]) * beta[None, :]).to(dtype)
        else:
            w = (U * -(from_start * beta)[None, :]).to(dtype)
        w = gl.convert_layout(w, A64)
        x = ring.solve(s, KIND).permute((1, 0))
        pending_n = warpgroup_mma(w, x, zeros, use_acc=False, is_async=True)
        multiply = _carry(ring, s, 0, STATE)
        if multiply != 1.0:
            S = S * multiply
        gamma = _carry(ring, s, 1, STATE)
        to_end = ring.factors.index(2 * s + 1).load(C64)
        N = warpgroup_mma_wait(num_outstanding=0, deps=(pending_n,))
        n16 = gl.convert_layout((N * to_end[None, :]).to(dtype), gl.DotOperandLayout(0, STATE, 2))
        pending_s = warpgroup_mma(n16, k, S, is_async=True)
        S = warpgroup_mma_wait(num_outstanding=0, deps=(pending_s,))
        mbarrier.arrive(ring.empty.index(s), count=1)
    return S * gamma
