"""Stage 3's arithmetic, the fold  out [V', K] = state [V', K] · transition [K, K] + local_state [V', K].

fp32 operands in halves that tensor cores take (tf32), three products for one, and one order of summation whatever else
is in the call: a fixup may cut V at multiples of 16 rows, and fold maps one at a time or many in one launch, for the
same bits.  A step of a run costs about what its transition (64 KiB for K = 128) takes from L2: transitions travel ahead
of the fold by TMA, the state stays in shared memory, and each warp makes an eighth of the next one's columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, mma_v2

from gdncp_kernels.hopper import mailboxes, tensor_maps
from gdncp_kernels.hopper.common import barrier, load_tile
from gdncp_kernels.hopper.launch import Launch, Launcher, Launches, Pointer

if TYPE_CHECKING:
    from gdncp.backends.base import AffineMaps, ComposingRuns, FoldRuns
    from gdncp.collectives.peer_memory import Mailboxes
    from gdncp.scratch import ScratchLayout

BLOCK_ROWS = 16
WARPS = 8
SMS = 132  # one program each: with K = 128 its ring fills an SM's shared memory
RING = 3  # transitions on their way or in use

ACC = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [1, 8], [16, 8]))
LEFT = gl.constexpr(gl.DotOperandLayout(0, gl.NVMMADistributedLayout([2, 0], [1, 8], [16, 8]), 1))
RIGHT = gl.constexpr(gl.DotOperandLayout(1, gl.NVMMADistributedLayout([2, 0], [1, 8], [16, 8]), 1))
ROW = gl.constexpr(gl.SliceLayout(1, gl.NVMMADistributedLayout([2, 0], [1, 8], [16, 8])))
COL = gl.constexpr(gl.SliceLayout(0, gl.NVMMADistributedLayout([2, 0], [1, 8], [16, 8])))
TRANSITION = gl.constexpr(gl.NVMMASharedLayout(128, 32))
STATE = gl.constexpr(gl.SwizzledSharedLayout(4, 1, 8, [1, 0]))  # free of bank conflicts for LEFT


@gluon.constexpr_function
def _copy_layout(DIM):
    """Of a transition [DIM, DIM]: 16 bytes a thread, whole rows in a warp."""
    return gl.BlockedLayout([1, 4], [128 // DIM, DIM // 4], [8, 1], [1, 0])


@gluon.jit
def _halves(x):
    """x as high + low: high rounded to tf32's 11 bits, low what is left, of which tf32 keeps another 11."""
    high = ((x.to(gl.int32, bitcast=True) + 0x1000) & -0x2000).to(gl.float32, bitcast=True)
    return high, x - high


@gluon.jit
def _fold(state, transition, local_state):
    """[ROWS, DIM] in ACC: state (shared memory) · transition (shared memory) + local_state (ACC)."""
    high = gl.zeros_like(local_state)
    low = gl.zeros_like(local_state)
    for u in gl.static_range(local_state.shape[1] // 32):
        a_high, a_low = _halves(state.slice(32 * u, 32, 1).load(LEFT))
        b_high, b_low = _halves(transition.slice(32 * u, 32).load(RIGHT))
        low = mma_v2(a_low, b_high, low, input_precision="tf32")
        low = mma_v2(a_high, b_low, low, input_precision="tf32")
        high = mma_v2(a_high, b_high, high, input_precision="tf32")
    return high + low + local_state


@gluon.jit
def _load(transition_map, row, full, tile, wanted):
    mbarrier.expect(full, tile.shape[0] * tile.shape[1] * 4, pred=wanted)
    load_tile(transition_map, [row, 0], full, tile, pred=wanted)


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
    """One program per (batch, 16 rows); pointers to fp32 [.., DIM], strides of the batch in elements."""
    COPY: gl.constexpr = _copy_layout(DIM)
    block = gl.program_id(0) % NUM_BLOCKS
    batch = (gl.program_id(0) // NUM_BLOCKS).to(gl.int64)
    row = block * 16 + gl.arange(0, 16, layout=ROW)
    at = row[:, None] * DIM + gl.arange(0, DIM, layout=COL)[None, :]
    tile = gl.allocate_shared_memory(gl.float32, [DIM, DIM], TRANSITION)
    held = gl.allocate_shared_memory(gl.float32, [16, DIM], STATE)
    held.store(gl.load(state + batch * state_batch + at))
    i = gl.arange(0, DIM, layout=gl.SliceLayout(1, COPY))[:, None]
    j = gl.arange(0, DIM, layout=gl.SliceLayout(0, COPY))[None, :]
    tile.store(gl.load(transition + batch * transition_batch + i * DIM + j))
    n = gl.load(local_state + batch * local_batch + at)
    barrier()
    gl.store(out + batch * NUM_BLOCKS * (16 * DIM) + at, _fold(held, tile, n))


@gluon.jit
def _put(S, j, entry, stride, fills, leave, last):
    """The state after map j: an entry state, and after the last map what the run hands on."""
    if entry is not None:
        if fills is None:
            gl.store(entry + (j + 1) * stride, S)
        else:
            if j < fills:
                gl.store(entry + (j + 1) * stride, S)
    if leave is not None:
        if j == last:
            gl.store(leave, S)


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
        row = block * ROWS + gl.arange(0, ROWS, layout=ROW)
        at = row[:, None] * DIM + gl.arange(0, DIM, layout=COL)[None, :]
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

        ring = gl.allocate_shared_memory(gl.float32, [RING, DIM, DIM], TRANSITION)
        held = gl.allocate_shared_memory(gl.float32, [ROWS, DIM], STATE)
        full = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
        for s in gl.static_range(RING):
            mbarrier.init(full.index(s), count=1)
        # the first map of a sequence: its local state is its exit state, and its transition is not read
        begins = 1
        if starts is not None:
            how = gl.load(starts + run)
            begins = (how > 0).to(gl.int32)
        for s in gl.static_range(RING):
            ahead = begins + s
            _load(transition_map, tile_row + ahead * H * DIM, full.index(s), ring.index(s), ahead < steps)
        if peers is not None:
            inbox = mailboxes.channel(
                peers, gl.load(source + run), gl.load(source_message + run), H, head, block, ROWS, DIM
            )
            outbox = mailboxes.channel(
                peers, gl.load(target + run), gl.load(target_message + run), H, head, block, ROWS, DIM
            )
            COPY: gl.constexpr = _copy_layout(DIM)
            part = gl.arange(0, ROWS, layout=gl.SliceLayout(1, COPY))[:, None]
            column = gl.arange(0, DIM, layout=gl.SliceLayout(0, COPY))[None, :]
            sent = mailboxes.next_out(peers, outbox, ROWS)
            received = 0
        if begins != 0:
            S = gl.load(local)
            _put(S, 0, entry, stride, fills, leave, last)
            held.store(S)
        else:
            if peers is not None:
                received = mailboxes.next_in(peers, inbox, ROWS)
                whole = gl.load(mailboxes.arrived(peers, inbox, received, part, column, DIM))
                gl.store(entry_start + (block * ROWS + part) * DIM + column, whole)
                held.store(whole)
            elif spans is not None:
                outer = spans + gl.load(span_row + run) * stride + head * (DIM * DIM) + at
                known = at < DIM * DIM * (how == 0).to(gl.int32)
                S = gl.load(outer, mask=known, other=0.0)
                gl.store(entry, S, mask=known)
                held.store(S)
            elif entry is not None:
                # or from zeros
                held.store(gl.load(entry, mask=at < DIM * DIM * (how == 0).to(gl.int32), other=0.0))
        barrier()
        for step in range(begins, steps):
            if of_transitions is not None:
                # to a transition nothing is added
                n = gl.load(local + step * stride, mask=at < DIM * DIM * (1 - is_transition).to(gl.int32), other=0.0)
            else:
                n = gl.load(local + step * stride)
            i = step - begins
            slot = i % RING
            mbarrier.wait(full.index(slot), (i // RING) & 1)
            S = _fold(held, ring.index(slot), n)
            barrier()  # all have read the state and the transition
            ahead = step + RING
            _load(transition_map, tile_row + ahead * H * DIM, full.index(slot), ring.index(slot), ahead < steps)
            held.store(S)
            _put(S, step, entry, stride, fills, leave, last)
            barrier()
        if peers is not None:
            if outbox[0] >= 0:
                gl.store(mailboxes.leaving(peers, outbox, sent, part, column, DIM), held.load(COPY))
            mailboxes.post(peers, inbox, received, outbox, sent, ROWS)


_launch = Launcher(fold_kernel, num_warps=WARPS)
_launch_runs = Launcher(fold_runs_kernel, num_warps=WARPS)
# with assertions, of which there is one: that a peer came in time
_launch_runs_by_mail = Launcher(fold_runs_kernel, num_warps=WARPS, debug=True, sanitize_overflow=False)
_MAPS, _ENTRY_STATES = Pointer("maps", torch.float32), Pointer("entry_states", torch.float32)


class StateFold:
    """`gdncp.backends.base.Fold`, `RunFold` and `MailFold` for K = 64 and 128."""

    block_rows: int = BLOCK_ROWS

    def __call__(self, state: torch.Tensor, transition: torch.Tensor, local_state: torch.Tensor) -> torch.Tensor:
        num_rows = state.shape[-2]
        if num_rows % self.block_rows:
            raise ValueError(f"state has {num_rows} rows; the fold takes multiples of {self.block_rows}")
        out = torch.empty(state.shape, dtype=torch.float32, device=state.device)
        if out.numel():
            s, m, n = (_as_batch(x) for x in (state, transition, local_state))
            num_blocks = num_rows // self.block_rows
            with torch.cuda.device_of(out):
                strides = (s.stride(0), m.stride(0), n.stride(0))
                _launch(s.shape[0] * num_blocks, s, m, n, out, *strides, num_blocks, s.shape[2])
        return out

    def fold_runs(
        self,
        maps: AffineMaps,
        entry_states: torch.Tensor,
        runs: FoldRuns,
        exits: torch.Tensor | None = None,
        spans: torch.Tensor | None = None,
    ) -> None:
        others = {name: x for name, x in (("exits", exits), ("spans", spans)) if x is not None}

        def prepare(layout: ScratchLayout) -> Launch:
            return prepare_runs(layout, runs, **{name: Pointer(name, torch.float32) for name in others})

        addresses = {name: x.data_ptr() for name, x in others.items()}
        _run_prepared(maps, runs, prepare, entry_states=entry_states.data_ptr(), **addresses)

    def compose_runs(self, maps: AffineMaps, runs: ComposingRuns, composed: AffineMaps) -> None:
        made = composed.scratch

        def prepare(layout: ScratchLayout) -> Launch:
            return prepare_composing(layout, runs, made.layout, composed=Pointer("composed", torch.float32))

        _run_prepared(maps, runs, prepare, composed=made.address)

    def fold_runs_by_mail(
        self, maps: AffineMaps, entry_states: torch.Tensor, runs: FoldRuns, mailboxes: Mailboxes
    ) -> None:
        def prepare(layout: ScratchLayout) -> Launch:
            return prepare_runs(layout, runs, peers=Pointer("peers", torch.int64))

        _run_prepared(maps, runs, prepare, entry_states=entry_states.data_ptr(), peers=mailboxes.address)


def _run_prepared(
    maps: AffineMaps, runs: FoldRuns | ComposingRuns, prepare: Callable[[ScratchLayout], Launch], **addresses: int
) -> None:
    if not runs.num_runs:
        return
    with torch.cuda.device_of(runs.map_row):
        layout = maps.scratch.layout
        key = layout.fields["transition"].shape  # all that maps differ in
        launches = runs.prepared.get(key)
        if launches is None:
            launches = runs.prepared[key] = Launches(("maps", *addresses), prepare(layout))
        launches(maps.scratch.address, *addresses.values())


def prepare_runs(
    layout: ScratchLayout,
    runs: FoldRuns,
    maps: Pointer = _MAPS,
    entry_states: Pointer = _ENTRY_STATES,
    exits: Pointer | None = None,
    spans: Pointer | None = None,
    peers: Pointer | None = None,
) -> Launch:
    """The launch of `fold_runs`, over maps laid out so.

    Pointers: where maps and states lie; exits, of runs that have some; spans, of runs inside spans; peers, of runs by
    mail, the table.
    """
    arguments = {
        "entry_states": entry_states,
        "entry_row": runs.entry_row,
        "starts": runs.starts,
        "num_fills": runs.num_fills,
        "exit_row": runs.exit_row,
        "exits": exits,
        "span_row": runs.span_row,
        "spans": spans,
        "source": runs.source,
        "source_message": runs.source_message,
        "target": runs.target,
        "target_message": runs.target_message,
        "peers": peers,
    }
    return _prepare(layout, runs, maps, entry_states, arguments)


def prepare_composing(
    layout: ScratchLayout,
    runs: ComposingRuns,
    composed_layout: ScratchLayout,
    maps: Pointer = _MAPS,
    *,
    composed: Pointer,
) -> Launch:
    """The launch of `compose_runs`: from maps laid out so, at `maps`, to maps laid out so, at `composed`."""
    num_maps, num_composed = (_transitions_before_local_states(x) for x in (layout, composed_layout))
    arguments = {
        "exit_row": runs.composed_row,
        "exits": replace(composed, offset=composed.offset + composed_layout.offset("local_state")),
        "of_transitions": runs.of_transitions,
        "NUM_MAPS": num_maps,
        "NUM_COMPOSED": num_composed,
    }
    return _prepare(layout, runs, maps, maps, arguments)


def _transitions_before_local_states(layout: ScratchLayout) -> int:
    """How many: the maps, as nothing lies between the two."""
    num_maps, num_heads, k_dim, _ = layout.fields["transition"].shape
    assert layout.offset("local_state") - layout.offset("transition") == 4 * num_maps * num_heads * k_dim * k_dim
    return num_maps


def _prepare(
    layout: ScratchLayout,
    runs: FoldRuns | ComposingRuns,
    maps: Pointer,
    instead: Pointer,
    arguments: Mapping[str, Any],
) -> Launch:
    """instead: what stands for maps where there are none."""
    num_maps, num_heads, k_dim, _ = layout.fields["transition"].shape
    rows = _rows_of(runs.num_runs * num_heads * k_dim)  # states are square
    at = [replace(maps, offset=maps.offset + layout.offset(name)) for name in ("transition", "local_state")]
    if not num_maps:  # on a rank whose states only pass through: a tensor map is then of something else, and not used
        at, num_maps = [instead, instead], 1
    launcher = _launch_runs if arguments.get("peers") is None else _launch_runs_by_mail
    given = {
        "transition_map": tensor_maps.transitions(at[0].name, num_maps * num_heads, k_dim, at[0].offset),
        "local_state": at[1],
        "map_row": runs.map_row,
        "num_steps": runs.num_steps,
        "H": num_heads,
        "ROWS": rows,
        "RING": RING,
        **arguments,
    }
    num_programs = runs.num_runs * num_heads * k_dim // rows
    return launcher.prepare(num_programs, {name: given.get(name) for name in fold_runs_kernel.arg_names})


def _rows_of(num_rows: int) -> int:
    """A program's: one wave where that is possible, as every program reads whole transitions."""
    return BLOCK_ROWS if num_rows <= SMS * BLOCK_ROWS else 2 * BLOCK_ROWS


def _as_batch(x: torch.Tensor) -> torch.Tensor:
    """[B, rows, K], each matrix dense; a view where possible."""
    x = x.reshape(-1, *x.shape[-2:])
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()
