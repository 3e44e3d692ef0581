"""What the Hopper kernels share: constants, and the layout of the per-token numbers that stage 1 leaves."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

CHUNK = 64
LOG2E = gl.constexpr(1.4426950408889634)
L2NORM_EPS = gl.constexpr(1e-6)

# Stage 1 leaves four numbers per token and state head, [chunks · H, NUM_GATES, 64] fp32, in this order.  With L2 norm
# the second and third, which multiply keys, have the keys' factors in them.
LOG_DECAY = gl.constexpr(0)  # G: log2 of the gates summed from the chunk's start, RESET for each reset
FROM_START = gl.constexpr(1)  # decay from the chunk's entry through the token, exp2 G
TO_END = gl.constexpr(2)  # decay from behind the token through the chunk's last
BETA = gl.constexpr(3)
NUM_GATES = 4

# log2 gate of a reset: exp2 of a difference of sums that holds one is exactly 0 (fp32 ends at 2^-149), and 64 of them
# leave the sum's fp32 rounding at 1e-3.
RESET = gl.constexpr(-160.0)

# Names that Gluon changed after triton 3.6: the barrier among a partition's threads, TMA copies, shared memory views.
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
load_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
store_tile = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global

_Memory = gl.shared_memory_descriptor
reinterpret = _Memory.reinterpret if hasattr(_Memory, "reinterpret") else _Memory._reinterpret


@gluon.constexpr_function
def state_layout(DIM):
    """Of a warpgroup's rows of the state [64, DIM]."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])


@gluon.constexpr_function
def rows_layout(DIM, num_warps):
    """Of rows of DIM 16-bit elements: 16 bytes a thread, whole rows in a warp."""
    return gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [num_warps, 1], [1, 0])


# 64 rows of the state by 64 tokens: as accumulators, as the left operand of the next product, a number per token.
M64 = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
A64 = gl.constexpr(gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]), 2))
C64 = gl.constexpr(gl.SliceLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])))


@gluon.jit
def load_gate(gate, which: gl.constexpr, layout: gl.constexpr):
    """[64] one of the four numbers per token of a chunk's `gate` [256]."""
    return gate.slice(which * 64, 64).load(layout)


@gluon.jit
def add(x, y):
    return x + y


@gluon.jit
def larger(x, y):
    return gl.maximum(x, y)


@gluon.jit
def zero_tail(tile, rows, LAYOUT: gl.constexpr):
    """Zero the rows of a tile [64, DIM] from `rows` on: they are a neighbour's, and may be NaN."""
    for u in gl.static_range(4):
        position = 16 * u + gl.arange(0, 16, layout=gl.SliceLayout(1, LAYOUT))
        block = tile.slice(16 * u, 16)
        block.store(gl.where((position < rows)[:, None], block.load(LAYOUT), 0.0))
