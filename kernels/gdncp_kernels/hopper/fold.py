"""Stage 3's arithmetic, the fold  out [V', K] = state [V', K] · transition [K, K] + local_state [V', K].

fp32 operands in halves that tensor cores take (tf32), three products for one, and one order of summation whatever else
is in the call: a fixup may cut V at multiples of 8 rows, and fold maps one at a time or many in one launch, for the
same bits.  Matrices are turned over, out^T = transition^T · state^T, as the tensor cores' smallest product has 16 rows
and 8 columns, and a program that has fewer rows of the state is done sooner.  Transitions (64 KiB for K = 128) travel
ahead of the fold by TMA, issued by a warp that does nothing else; the state stays in shared memory, and each warp makes
16 of the next one's columns.
"""

# mypy: disable-error-code="valid-type,attr-defined"
# (an aggregate's annotations are Gluon's types of values, which mypy takes for variables)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, mma_v2
from triton.language.core import _aggregate as aggregate  # `triton.aggregate` in later versions

from gdncp_kernels.hopper import mailboxes
from gdncp_kernels.hopper.common import barrier, load_tile

LOAD_REGISTERS = gl.constexpr(24)
SINGLE_ROWS = gl.constexpr(8)  # of a program that folds one map
TRANSITION = gl.constexpr(gl.NVMMASharedLayout(128, 32))
STATE = gl.constexpr(gl.SwizzledSharedLayout(4, 1, 8, [1, 0]))


@gluon.constexpr_function
def _acc(DIM):
    """Of a state turned over [DIM, rows]: each warp has 16 of its columns."""
    return gl.NVMMADistributedLayout([2, 0], [DIM // 16, 1], [16, 8])


@gluon.constexpr_function
def _operand(DIM, index):
    """A thread has two neighbours of what is summed over: so transitions are read without bank conflicts."""
    return gl.DotOperandLayout(index, _acc(DIM), 2)


@gluon.constexpr_function
def _copy_layout(DIM):
    """Of rows [.., DIM]: 16 bytes a thread, whole rows in a warp."""
    return gl.BlockedLayout([1, 4], [128 // DIM, DIM // 4], [DIM // 16, 1], [1, 0])


@gluon.jit
def _halves(x):
    """x as high + low: high rounded to tf32's 11 bits, low what is left, of which tf32 keeps another 11."""
    high = ((x.to(gl.int32, bitcast=True) + 0x1000) & -0x2000).to(gl.float32, bitcast=True)
    return high, x - high


@gluon.jit
def _fold(state, transition, local_state):
    """Of state [ROWS, DIM] and transition [DIM, DIM], in shared memory; local_state and the result [DIM, ROWS].

    Three sums, as a sum of so few elements is one long wait.
    """
    DIM: gl.constexpr = transition.shape[0]
    high = gl.zeros_like(local_state)
    low = gl.zeros_like(local_state)
    cross = gl.zeros_like(local_state)
    for u in gl.static_range(DIM // 32):
        a_high, a_low = _halves(transition.slice(32 * u, 32).permute((1, 0)).load(_operand(DIM, 0)))
        b_high, b_low = _halves(state.slice(32 * u, 32, 1).permute((1, 0)).load(_operand(DIM, 1)))
        low = mma_v2(a_low, b_high, low, input_precision="tf32")
        cross = mma_v2(a_high, b_low, cross, input_precision="tf32")
        high = mma_v2(a_high, b_high, high, input_precision="tf32")
    return high + (low + cross) + local_state


@gluon.jit
def _positions(block, ROWS: gl.constexpr, DIM: gl.constexpr):
    """[DIM, ROWS]: where a block of ROWS rows lies in a matrix [.., DIM], turned over."""
    row = block * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(0, _acc(DIM)))
    return row[None, :] * DIM + gl.arange(0, DIM, layout=gl.SliceLayout(1, _acc(DIM)))[:, None]


@gluon.jit(do_not_specialize=["state_batch", "transition_batch", "local_batch", "NUM_BLOCKS"])
def fold_kernel(
    state,
    transition,
    local_state,
    out,
    state_batch,
    transition_batch,
    local_batch,
    NUM_BLOCKS,
    DIM: gl.constexpr,
):
    """One program per (batch, SINGLE_ROWS rows); pointers to fp32 [.., DIM], strides of the batch in elements."""
    ROWS: gl.constexpr = SINGLE_ROWS
    COPY: gl.constexpr = _copy_layout(DIM)
    block = gl.program_id(0) % NUM_BLOCKS
    batch = (gl.program_id(0) // NUM_BLOCKS).to(gl.int64)
    at = _positions(block, ROWS, DIM)
    tile = gl.allocate_shared_memory(gl.float32, [DIM, DIM], TRANSITION)
    held = gl.allocate_shared_memory(gl.float32, [ROWS, DIM], STATE)
    held.permute((1, 0)).store(gl.load(state + batch * state_batch + at))
    i = gl.arange(0, DIM, layout=gl.SliceLayout(1, COPY))[:, None]
    j = gl.arange(0, DIM, layout=gl.SliceLayout(0, COPY))[None, :]
    tile.store(gl.load(transition + batch * transition_batch + i * DIM + j))
    n = gl.load(local_state + batch * local_batch + at)
    barrier()
    gl.store(out + batch * NUM_BLOCKS * (ROWS * DIM) + at, _fold(held, tile, n))


_Memory = gl.shared_memory_descriptor
_Optional = gl.tensor | gl.constexpr  # or None
_OptionalChannel = mailboxes.Channel | gl.constexpr


@aggregate
class Ring:
    """Shared memory."""

    transitions: _Memory  # [RING, DIM, DIM]
    full: _Memory
    empty: _Memory

    @gluon.constexpr_function
    def __init__(self, transitions, full, empty):
        self.transitions = transitions
        self.full = full
        self.empty = empty


@aggregate
class Run:
    """Some rows of a run: int32 scalars, and pointers to fp32 [DIM, ROWS]."""

    begins: gl.tensor  # 1: the first map's local state is the state after it; 0: the fold begins from `entry`
    is_known: gl.tensor  # 0: from zeros
    steps: gl.tensor  # maps
    stride: gl.tensor  # int64, elements from one map or entry state to the next
    at: gl.tensor  # of those rows in a matrix
    local: gl.tensor  # the first map's
    is_added: _Optional  # 0: local states are not; None: they are
    entry: _Optional  # the first map's; None: none are filled
    fills: _Optional  # how many after that; None: all
    outer: _Optional  # where the first one is read from, and put in place; None: it is in place
    leave: _Optional  # where the state after map `last` goes
    last: gl.tensor

    @gluon.constexpr_function
    def __init__(self, begins, is_known, steps, stride, at, local, is_added, entry, fills, outer, leave, last):
        self.begins = begins
        self.is_known = is_known
        self.steps = steps
        self.stride = stride
        self.at = at
        self.local = local
        self.is_added = gl.constexpr(None) if is_added is None else is_added
        self.entry = gl.constexpr(None) if entry is None else entry
        self.fills = gl.constexpr(None) if fills is None else fills
        self.outer = gl.constexpr(None) if outer is None else outer
        self.leave = gl.constexpr(None) if leave is None else leave
        self.last = last


@aggregate
class Mail:
    """Where a run's state comes from and goes to, of runs by mail."""

    peers: _Optional  # None: not by mail
    inbox: _OptionalChannel
    outbox: _OptionalChannel
    entry: _Optional  # pointer to fp32 [ROWS, DIM], where what arrives is put

    @gluon.constexpr_function
    def __init__(self, peers, inbox, outbox, entry):
        self.peers = gl.constexpr(None) if peers is None else peers
        self.inbox = gl.constexpr(None) if inbox is None else inbox
        self.outbox = gl.constexpr(None) if outbox is None else outbox
        self.entry = gl.constexpr(None) if entry is None else entry


@gluon.jit(do_not_specialize=["H", "NUM_MAPS", "NUM_COMPOSED"])
def fold_runs_kernel(
    transition_map,
    local_state,
    entry_states,
    entry_row,
    map_row,
    num_steps,
    starts,
    num_fills,
    exit_row,
    exits,
    span_row,
    spans,
    of_transitions,
    source,
    source_message,
    target,
    target_message,
    peers,
    H,
    NUM_MAPS,
    NUM_COMPOSED,
    ROWS: gl.constexpr,
    RING: gl.constexpr,
):
    """One program per (run, head, ROWS rows) of `gdncp.backends.base.FoldRuns`; a row's bits do not depend on ROWS.

    peers: of runs by mail, the table of `gdncp.collectives.peer_memory`.  What does not start its sequence then comes
    from another rank, to nothing but its entry state where there is nothing to fold.
    spans: of runs inside spans, whose entry states lie there; they are put in place, also where there is nothing to
    fold.
    of_transitions: of `gdncp.backends.base.ComposingRuns`; `exits` are then the local states of composed maps.  In
    memory NUM_MAPS transitions come before local states, and NUM_COMPOSED before `exits`.
    """
    DIM: gl.constexpr = transition_map.block_shape[1]
    block = gl.program_id(0) % (DIM // ROWS)
    head = gl.program_id(0) // (DIM // ROWS) % H
    run = gl.program_id(0) // (DIM // ROWS * H)
    steps = gl.load(num_steps + run).to(gl.int32)
    works = steps > 0
    if peers is not None:
        works = steps >= 0
    if spans is not None:  # a start with nothing to fold has its entry state, and what follows it is not its own
        works = (steps > 0) | (gl.load(starts + run) <= 0)
    if works:
        stride = H.to(gl.int64) * (DIM * DIM)
        at = _positions(block, ROWS, DIM)
        first_map = gl.load(map_row + run)
        entry = None
        if entry_states is not None:
            entry_start = entry_states + gl.load(entry_row + run) * stride + head * (DIM * DIM)
            entry = entry_start + at
        first_local = first_map
        if of_transitions is not None:
            is_transition = gl.load(of_transitions + run)
            first_local -= is_transition * NUM_MAPS
        local = local_state + first_local * stride + head * (DIM * DIM) + at
        tile_row = ((first_map * H + head) * DIM).to(gl.int32)
        fills = None
        leave = None
        last = steps
        if num_fills is not None:
            fills = gl.load(num_fills + run).to(gl.int32)
        if exits is not None:
            leave_row = gl.load(exit_row + run)
            there = gl.maximum(leave_row, 0)
            if of_transitions is not None:
                there -= is_transition * NUM_COMPOSED
            leave = exits + there * stride + head * (DIM * DIM) + at
            last = gl.where(leave_row < 0, steps, steps - 1)

        ring = Ring(
            gl.allocate_shared_memory(gl.float32, [RING, DIM, DIM], TRANSITION),
            gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout()),
            gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout()),
        )
        for s in gl.static_range(RING):
            mbarrier.init(ring.full.index(s), count=1)
            mbarrier.init(ring.empty.index(s), count=1)
        # the first map of a sequence: its local state is its exit state, and its transition is not read
        begins = gl.to_tensor(1)
        is_known = begins
        if starts is not None:
            how = gl.load(starts + run)
            begins = (how > 0).to(gl.int32)
            is_known = (how == 0).to(gl.int32)
        outer = None
        if spans is not None:
            outer = spans + gl.load(span_row + run) * stride + head * (DIM * DIM) + at
        is_added = None
        if of_transitions is not None:
            is_added = (1 - is_transition).to(gl.int32)
        inbox = None
        outbox = None
        arrived = None
        if peers is not None:
            inbox = mailboxes.channel(
                peers, gl.load(source + run), gl.load(source_message + run), H, head, block, ROWS, DIM
            )
            outbox = mailboxes.channel(
                peers, gl.load(target + run), gl.load(target_message + run), H, head, block, ROWS, DIM
            )
            arrived = entry_start + block * (ROWS * DIM)
        rows = Run(begins, is_known, steps, stride, at, local, is_added, entry, fills, outer, leave, last)
        gl.warp_specialize(
            [
                (_fold_partition, (ring, rows, Mail(peers, inbox, outbox, arrived), ROWS)),
                (_load_partition, (ring, transition_map, tile_row, H * DIM, begins, steps)),
            ],
            [1],
            [LOAD_REGISTERS],
        )


@gluon.jit
def _put(S, j, run):
    """The state after map j: an entry state, and after the last map what the run hands on."""
    if run.entry is not None:
        if run.fills is None:
            gl.store(run.entry + (j + 1) * run.stride, S)
        else:
            if j < run.fills:
                gl.store(run.entry + (j + 1) * run.stride, S)
    if run.leave is not None:
        if j == run.last:
            gl.store(run.leave, S)


@gluon.jit
def _load_partition(ring, transition_map, row, stride, begins, steps):
    RING: gl.constexpr = ring.transitions.shape[0]
    DIM: gl.constexpr = ring.transitions.shape[1]
    for i in range(steps - begins):
        slot = i % RING
        full = ring.full.index(slot)
        mbarrier.wait(ring.empty.index(slot), ((i // RING) & 1) ^ 1)
        mbarrier.expect(full, DIM * DIM * 4)
        load_tile(transition_map, [row + (begins + i) * stride, 0], full, ring.transitions.index(slot))


@gluon.jit
def _fold_partition(ring, run, mail, ROWS: gl.constexpr):
    RING: gl.constexpr = ring.transitions.shape[0]
    DIM: gl.constexpr = ring.transitions.shape[1]
    held = gl.allocate_shared_memory(gl.float32, [ROWS, DIM], STATE)
    turned = held.permute((1, 0))
    if mail.peers is not None:
        COPY: gl.constexpr = _copy_layout(DIM)
        part = gl.arange(0, ROWS, layout=gl.SliceLayout(1, COPY))[:, None]
        column = gl.arange(0, DIM, layout=gl.SliceLayout(0, COPY))[None, :]
        sent = mailboxes.next_out(mail.peers, mail.outbox, ROWS)
        received = 0
    if run.begins != 0:
        S = gl.load(run.local)
        _put(S, 0, run)
        turned.store(S)
    else:
        known = run.at < DIM * DIM * run.is_known
        if mail.peers is not None:
            received = mailboxes.next_in(mail.peers, mail.inbox, ROWS)
            whole = gl.load(mailboxes.arrived(mail.peers, mail.inbox, received, part, column, DIM))
            gl.store(mail.entry + part * DIM + column, whole)
            held.store(whole)
        elif run.outer is not None:
            S = gl.load(run.outer, mask=known, other=0.0)
            gl.store(run.entry, S, mask=known)
            turned.store(S)
        elif run.entry is not None:
            turned.store(gl.load(run.entry, mask=known, other=0.0))
    barrier()
    for step in range(run.begins, run.steps):
        if run.is_added is not None:
            n = gl.load(run.local + step * run.stride, mask=run.at < DIM * DIM * run.is_added, other=0.0)
        else:
            n = gl.load(run.local + step * run.stride)
        i = step - run.begins
        slot = i % RING
        mbarrier.wait(ring.full.index(slot), (i // RING) & 1)
        S = _fold(held, ring.transitions.index(slot), n)
        barrier()  # all have read the state and the transition
        mbarrier.arrive(ring.empty.index(slot), count=1)
        turned.store(S)
        _put(S, step, run)
        barrier()
    if mail.peers is not None:
        if mail.outbox.rank >= 0:
            gl.store(mailboxes.leaving(mail.peers, mail.outbox, sent, part, column, DIM), held.load(COPY))
        mailboxes.post(mail.peers, mail.inbox, received, mail.outbox, sent, ROWS)
