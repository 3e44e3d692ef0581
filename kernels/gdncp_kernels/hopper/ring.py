"""What the warps of the recurrent kernel are given: shared memory, the item, states and checkpoints."""

# mypy: disable-error-code="valid-type"
# (an aggregate's annotations are Gluon's types of values, which mypy takes for variables)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate  # `triton.aggregate` in later versions

# Kinds of work, see `partitions`.
OUTPUTS = gl.constexpr(0)
LOCAL_STATE = gl.constexpr(1)
TRANSITION = gl.constexpr(2)

_Memory = gl.shared_memory_descriptor
_Optional = gl.tensor | gl.constexpr  # a pointer, or None


@aggregate
class Ring:
    """Shared memory, by stage; what a launch does without stands for something else, and is not used."""

    queries: _Memory  # [STAGES, 64, DIM]
    keys: _Memory  # [STAGES, 64, DIM]
    values: _Memory  # [STAGES, 64, DIM]
    solves: _Memory  # [STAGES, 64, 64]
    gates: _Memory  # [STAGES, NUM_GATES · 64] fp32
    key_scales: _Memory  # [STAGES, 64] fp32, with L2 norm
    gate_tiles: _Memory  # the last two once more, as the copy engine sees them
    key_tiles: _Memory
    scores: _Memory  # [STAGES, 64, 64]: P
    query_scales: _Memory  # [2 · STAGES, 64] fp32, with L2 norm: see `_query_scale`
    factors: _Memory  # [2 · STAGES, 64] fp32: a scan's from_start and to_end, see `_factors`
    carry: _Memory  # [STAGES, 2] fp32
    staged: _Memory  # [DIM / 64, 64, 64]: outputs on their way
    full: _Memory
    empty: _Memory
    scored: _Memory
    clean: _Memory
    STAGES: gl.constexpr
    L2NORM: gl.constexpr
    LEAST_GAMMA: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self,
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
    ):
        self.queries = queries
        self.keys = keys
        self.values = values
        self.solves = solves
        self.gates = gates
        self.key_scales = key_scales
        self.gate_tiles = gate_tiles
        self.key_tiles = key_tiles
        self.scores = scores
        self.query_scales = query_scales
        self.factors = factors
        self.carry = carry
        self.staged = staged
        self.full = full
        self.empty = empty
        self.scored = scored
        self.clean = clean
        self.STAGES = gl.constexpr(STAGES)
        self.L2NORM = gl.constexpr(L2NORM)
        self.LEAST_GAMMA = gl.constexpr(LEAST_GAMMA)


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
