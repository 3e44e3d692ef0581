"""What the warps of the recurrent kernel are given: shared memory, the item, states and checkpoints.

Ring stage s of a CTA holds chunk i = s mod its number of stages.  A stage is some of the pool `tiles` [·, 64, DIM], in
this order, and a kind of work takes as many as it reads:

    keys · T and P · values · queries        with head dim 128, where T and P [64, 64] share a tile
    keys · T · values · queries · P          with head dim 64

What scans leave out gives them more stages, which they need: the score warpgroup works on T before they use it.
"""

# mypy: disable-error-code="valid-type,attr-defined"
# (an aggregate's annotations are Gluon's types of values, which mypy takes for variables)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate  # `triton.aggregate` in later versions

# Kinds of work, see `partitions`.
OUTPUTS = gl.constexpr(0)
LOCAL_STATE = gl.constexpr(1)
TRANSITION = gl.constexpr(2)


@gluon.constexpr_function
def num_tiles(DIM):
    return 12 if DIM == 128 else 10


@gluon.constexpr_function
def tiles_in_stage(DIM, KIND):
    if KIND == OUTPUTS:
        return 4 if DIM == 128 else 5
    return 3 if KIND == LOCAL_STATE else 2


@gluon.constexpr_function
def num_stages(DIM, KIND):
    return num_tiles(DIM) // tiles_in_stage(DIM, KIND)


_Memory = gl.shared_memory_descriptor
_Optional = gl.tensor | gl.constexpr  # a pointer, or None


@aggregate
class Ring:
    """Shared memory; what a launch does without stands for something else, and is not used.

    MOST: stages of the kind that has most.
    """

    tiles: _Memory  # [num_tiles, 64, DIM]
    gates: _Memory  # [MOST, NUM_GATES · 64] fp32
    key_scales: _Memory  # [MOST, 64] fp32, with L2 norm
    gate_tiles: _Memory  # the last two once more, as the copy engine sees them
    key_tiles: _Memory
    query_scales: _Memory  # [2 · stages of OUTPUTS, 64] fp32, with L2 norm: see `_query_scale`
    factors: _Memory  # [2 · MOST, 64] fp32: a scan's from_start and to_end, see `scans.make_factors`
    carry: _Memory  # [MOST, 2] fp32, of a scan
    staged: _Memory  # [DIM / 64, 64, 64]: outputs on their way
    full: _Memory
    empty: _Memory
    scored: _Memory
    clean: _Memory
    L2NORM: gl.constexpr
    LEAST_GAMMA: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self,
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
    ):
        self.tiles = tiles
        self.gates = gates
        self.key_scales = key_scales
        self.gate_tiles = gate_tiles
        self.key_tiles = key_tiles
        self.query_scales = query_scales
        self.factors = factors
        self.carry = carry
        self.staged = staged
        self.full = full
        self.empty = empty
        self.scored = scored
        self.clean = clean
        self.L2NORM = gl.constexpr(L2NORM)
        self.LEAST_GAMMA = gl.constexpr(LEAST_GAMMA)

    @gluon.jit
    def _tile(self, s, which: gl.constexpr, KIND: gl.constexpr):
        return self.tiles.index(s * tiles_in_stage(self.tiles.shape[2], KIND) + which)

    @gluon.jit
    def keys(self, s, KIND: gl.constexpr):
        """[64, DIM]"""
        return self._tile(s, 0, KIND)

    @gluon.jit
    def solve(self, s, KIND: gl.constexpr):
        """T [64, 64]; X in its place where `scans.makes_x`."""
        return self._tile(s, 1, KIND).slice(0, 64, 1)

    @gluon.jit
    def pair(self, s, KIND: gl.constexpr):
        """`solve`, then `scores`, [64, 128]; with head dim 128."""
        return self._tile(s, 1, KIND)

    @gluon.jit
    def scores(self, s, KIND: gl.constexpr):
        """P [64, 64]; Y where `scans.makes_x`."""
        if self.tiles.shape[2] == 128:
            return self._tile(s, 1, KIND).slice(64, 64, 1)
        else:
            return self._tile(s, 4, KIND)

    @gluon.jit
    def values(self, s, KIND: gl.constexpr):
        """[64, DIM], unless TRANSITION."""
        return self._tile(s, 2, KIND)

    @gluon.jit
    def queries(self, s, KIND: gl.constexpr):
        """[64, DIM], of OUTPUTS."""
        return self._tile(s, 3, KIND)


@aggregate
class Item:
    """What a CTA scans, int32 scalars."""

    token: gl.tensor  # of its first chunk
    num_chunks: gl.tensor
    tail_rows: gl.tensor  # tokens of the last chunk, 0: 64
    head: gl.tensor
    H: gl.tensor
    kind: gl.tensor
    scale: gl.tensor  # fp32

    @gluon.constexpr_function
    def __init__(self, token, num_chunks, tail_rows, head, H, kind, scale):
        self.token = token
        self.num_chunks = num_chunks
        self.tail_rows = tail_rows
        self.head = head
        self.H = H
        self.kind = kind
        self.scale = scale


@aggregate
class States:
    """Where the state comes from and goes to; pointers to fp32 [DIM, DIM]."""

    entry: gl.tensor
    exit: gl.tensor
    from_entry: gl.tensor  # 0: from `diagonal` (0.0 or 1.0) times the identity
    diagonal: gl.tensor
    leaves: gl.tensor  # 0: the state goes nowhere

    @gluon.constexpr_function
    def __init__(self, entry, exit, from_entry, diagonal, leaves):
        self.entry = entry
        self.exit = exit
        self.from_entry = from_entry
        self.diagonal = diagonal
        self.leaves = leaves


@aggregate
class Checkpoints:
    """The item's are number `first` up to `stop` of `tokens` and `rows`, see `WorkTable`."""

    at: _Optional  # [rows, H, DIM, DIM] fp32; None: the call has none
    tokens: _Optional
    rows: _Optional
    dump: _Optional
    first: gl.tensor
    stop: gl.tensor

    @gluon.constexpr_function
    def __init__(self, at, tokens, rows, dump, first, stop):
        self.at = gl.constexpr(None) if at is None else at
        self.tokens = gl.constexpr(None) if tokens is None else tokens
        self.rows = gl.constexpr(None) if rows is None else rows
        self.dump = gl.constexpr(None) if dump is None else dump
        self.first = first
        self.stop = stop
