"""The pipeline: summarise (stages 1 and 2), fixup (3), finish (4), each a function from the last one's result.

Everything is validated before it comes here; see `gdncp.api` for the public calls.  Work is only enqueued.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, Literal, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from gdncp import collectives, states
from gdncp.backends import AffineMaps, Backend, Sinks, TokenInputs
from gdncp.backends.base import OpeningBackend, Part, StateBackend, folds_runs, moves_states, opens, runs_whole
from gdncp.layout import Layout, fold_on_device
from gdncp.plan import PrefillPlan
from gdncp.plan.cost import STAGES as STAGES
from gdncp.stage_timer import StageTimer
from gdncp.streams import exchange_stream, lane_stream
from gdncp.work import WorkTable

FinalState = Literal["owner", "all"]


@dataclass(eq=False)
class StateIO:
    """Where initial states come from and final states go; rows are `slots[sequence]`, or the sequence without slots."""

    source: torch.Tensor | None  # None: zeros
    destination: torch.Tensor | None  # None: final states are not wanted
    slots: torch.Tensor | None  # [N] int32 or int64
    share: bool = False  # every sequence's final state on every rank, not only on its owner

    def rows(self, sequences: torch.Tensor, all_in_order: bool) -> torch.Tensor | None:
        """Rows of these sequences, [n]; None: all rows in order."""
        if self.slots is None:
            return None if all_in_order else sequences
        return self.slots if all_in_order else self.slots.index_select(0, sequences)


@dataclass(eq=False)
class Call:
    """One validated prefill on one rank."""

    kind: object  # the same one for calls over one layout that differ in addresses and values only
    layout: Layout
    backend: Backend
    inputs: TokenInputs
    states: StateIO
    forget_below: float
    state_shape: tuple[int, int, int]  # H, V, K
    output: torch.Tensor  # [T, H, V]
    checkpoints: torch.Tensor | None  # [rows, H, V, K], any state dtype
    plan: PrefillPlan | None  # None: lengths are only on the device, world size 1
    rank: int
    group: dist.ProcessGroup | None  # None: nobody to talk to
    timer: StageTimer
    keep_entry: bool = False  # else a result that is kept would hold scratch and inputs in memory
    lane: int = 0  # of a group of heads: exchanges of groups run on streams of their own

    @property
    def skips_starts(self) -> bool:
        """No sequence has an initial state, and the backend needs no zeros in their place."""
        return self.states.source is None and self.backend.exact_rows and self.inputs.q.shape[0] > 0

    @property
    def tables(self) -> tuple[WorkTable, ...]:
        """Per lane."""
        return self.layout.tables_from_zeros if self.skips_starts else self.layout.tables

    @property
    def divides_heads(self) -> bool:
        """It is of all heads, and lanes divide them."""
        plan = self.plan
        return plan is not None and len(plan.head_groups) > 1 and self.state_shape[0] == plan.num_state_heads

    @property
    def final_in_place(self) -> bool:
        """Stage 4 writes final states where the caller wants them."""
        in_order = self.layout.ends_all and self.states.slots is None and not self.states.share
        return in_order and self._is_sink(self.states.destination)

    @property
    def checkpoints_in_place(self) -> bool:
        return self._is_sink(self.checkpoints)

    def _is_sink(self, x: torch.Tensor | None) -> bool:
        return self.backend.exact_rows and x is not None and x.dtype == torch.float32 and x.is_contiguous()


@dataclass(eq=False)
class Summary:
    """What stages 1 and 2 leave: every CP chunk reduced to its affine map, nothing communicated yet."""

    call: Call
    tiles: tuple[Any, ...]  # per lane, the backend's own
    # [items (+ 1 spare, or stand-ins), H, V, K] fp32; rows that start a sequence are filled unless `call.skips_starts`
    entry_states: torch.Tensor
    maps: AffineMaps | None  # None: no sequence has two CP chunks
    sinks: Sinks  # of stage 4; what an `OpeningBackend` makes early is there already


@dataclass(eq=False)
class EntryStates:
    """The state that enters each CP chunk of this rank."""

    summary: Summary
    stats: collectives.FixupStats
    maps: AffineMaps | None = None  # as the exchange saw them, where stage 4 is in two parts
    exchange: torch.cuda.Stream | None = None  # where the exchange is under way; None: on the stream of the call
    composed: AffineMaps | None = None  # with spans; kept, as the exchange under way may not have read them yet
    joined: bool = False  # the stream that this was made on waits for the exchange

    def __post_init__(self) -> None:
        self._home = None if self.exchange is None else torch.cuda.current_stream(self.exchange.device)

    @property
    def states(self) -> torch.Tensor:
        """[items (+ other rows), H, V, K] fp32."""
        self.wait()
        if self.summary.call.skips_starts:
            _load_starts(self.summary.call, self.summary.entry_states)
        return self.summary.entry_states

    def wait(self) -> None:
        """Make the current stream wait for the exchange."""
        if self.exchange is not None:
            stream = torch.cuda.current_stream(self.exchange.device)
            stream.wait_stream(self.exchange)
            self.joined = self.joined or stream == self._home

    def __del__(self) -> None:
        """Dropped while the exchange is under way: what it uses goes to nobody before it has passed.

        Not said of every exchange: memory that may be on two streams comes back late, and `finish` joins them.
        """
        if self.exchange is not None and not self.joined:
            self.summary.entry_states.record_stream(self.exchange)
            for maps in (self.maps, self.composed):
                if maps is not None:
                    maps.scratch.record_stream(self.exchange)


@dataclass(eq=False)
class PrefillResult:
    """A rank's share of a prefill."""

    output: torch.Tensor  # [T, H, V], this rank's tokens, dtype of q
    final_state: torch.Tensor | None  # [N, H, V, K], or the state pool
    checkpoints: torch.Tensor | None  # [rows of this rank, H, V, K]; None where it has none and was given no buffer
    fixup: collectives.FixupStats  # what this rank sent and received in stage 3
    entry: EntryStates | None  # maps, entry states and inputs, for reports: only where `keep_entry` asked for them
    timer: StageTimer
    groups: tuple[EntryStates, ...] = ()  # in place of `entry` where lanes divide heads: of each group

    @property
    def entries(self) -> tuple[EntryStates, ...]:
        """What `keep_entry` asked for, heads in order."""
        return self.groups if self.entry is None else (self.entry,)

    @property
    def timings(self) -> dict[str, float]:
        """Seconds per stage, for a call with `timed=True`; waits for the device.

        An exchange that runs beside stage 4 is part of "cp_prefill".
        """
        return self.timer.seconds()


P = ParamSpec("P")
R = TypeVar("R")


def without_gradients(run: Callable[P, R]) -> Callable[P, R]:
    """`run` as under `torch.no_grad`; where gradients are off already it is not entered, at the price of a launch."""

    @wraps(run)
    def off(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.is_grad_enabled():
            return run(*args, **kwargs)
        torch._C._set_grad_enabled(False)  # the context manager around it costs as much as a launch
        try:
            return run(*args, **kwargs)
        finally:
            torch._C._set_grad_enabled(True)

    return off


@without_gradients
def run(call: Call) -> PrefillResult:
    """All stages, at once where the backend can and nobody looks between them."""
    backend = call.backend
    if call.divides_heads:
        from gdncp.head_groups import run_groups  # which needs all of this

        return run_groups(call)
    stats = None
    if runs_whole(backend) and not (call.timer.enabled or call.keep_entry):
        stats = backend.run_whole(call)
    if stats is None:
        return finish(fixup(summarise(call)))
    return PrefillResult(call.output, call.states.destination, call.checkpoints, stats, None, call.timer)


@without_gradients
def summarise(call: Call) -> Summary:
    """Stages 1 and 2 on every lane."""
    if call.divides_heads:
        raise ValueError("plan must not have lanes_by='heads' here: its groups of heads run side by side, by prefill")
    layout, device = call.layout, call.inputs.q.device
    spare = layout.num_sequence_items is not None
    rows = layout.num_items + layout.num_stand_ins + spare
    entry_states = torch.empty((rows, *call.state_shape), dtype=torch.float32, device=device)
    if not call.skips_starts:
        _load_starts(call, entry_states)

    with call.timer.stage("precompute_t"):
        tiles = _on_lanes(call, lambda _, table: call.backend.precompute_t(call.inputs, table))
    maps = None
    if layout.has_maps:
        heads, v_dim, k_dim = call.state_shape
        maps = AffineMaps.empty(layout.num_maps + spare, heads, k_dim, v_dim, device)
    sinks = _sinks(call)
    with call.timer.stage("precompute_mn"):
        if maps is not None:

            def reduce(lane: int, table: WorkTable) -> None:
                arguments = (call.inputs, tiles[lane], table, entry_states, maps, call.forget_below)
                if (backend := _opening(call)) is not None:
                    backend.precompute_mn_and_open(*arguments, sinks)
                else:
                    call.backend.precompute_mn(*arguments)

            _on_lanes(call, reduce)
    return Summary(call, tiles, entry_states, maps, sinks)


def _opening(call: Call) -> OpeningBackend | None:
    """The backend, where stage 2 is to open sequences."""
    return call.backend if opens(call.backend) and (call.plan is None or call.plan.opens) else None


def _load_starts(call: Call, entry_states: torch.Tensor) -> None:
    layout = call.layout
    rows = call.states.rows(layout.first_sequences, layout.starts_all) if call.states.source is not None else None
    _states(call.backend).load_states(call.states.source, rows, entry_states, layout.first_rows)


def _states(backend: Backend) -> StateBackend:
    return backend if moves_states(backend) else states  # a module is as good


def _sinks(call: Call) -> Sinks:
    """The caller's own tensors where a backend can write them, else memory that `finish` copies."""
    layout, device = call.layout, call.inputs.q.device

    def rows(count: int) -> torch.Tensor:  # one more: the dump row of `WorkTable`
        return torch.empty((count + 1, *call.state_shape), dtype=torch.float32, device=device)

    output, final, checkpoints = call.output, call.states.destination, call.checkpoints
    if output.data_ptr() % _ALIGNMENT:
        output = output.clone()  # rows that no item covers keep what they held
    if final is None or not call.final_in_place:
        final = rows(layout.num_final)
    if checkpoints is not None and not call.checkpoints_in_place:
        given, checkpoints = checkpoints, rows(layout.num_checkpoints)
        if call.plan is None:  # rows that no sequence earns keep what they held
            checkpoints[:-1].copy_(given)
    return Sinks(output, final, checkpoints, layout.num_final, layout.num_checkpoints)


_ALIGNMENT = 16  # bytes: allocations start at multiples, and kernels ask for it; views into them may not


@without_gradients
def fixup(summary: Summary) -> EntryStates:
    """Stage 3: every entry state, across lanes and ranks.  A data collective only where something crosses ranks."""
    call, plan, maps = summary.call, summary.call.plan, summary.maps
    with call.timer.stage("state_fixup"):
        if plan is None or not plan.crosses_ranks:
            _fold_here(summary)
            return EntryStates(summary, collectives.LOCAL)
        if maps is None:  # a rank may pass nothing on and still receive
            heads, v_dim, k_dim = call.state_shape
            maps = AffineMaps.empty(0, heads, k_dim, v_dim, call.inputs.q.device)
        composed = None
        if plan.fold_span > 1:
            composed = collectives.compose(plan, call.rank, maps, call.backend.fold)
        device, stream = call.inputs.q.device, None
        if plan.finish == "entry_late" and device.type == "cuda":
            stream = exchange_stream(device, call.lane)
            stream.wait_stream(torch.cuda.current_stream(device))
        entry = EntryStates(summary, collectives.LOCAL, maps, stream, composed)  # now: the exchange may break off
        with nullcontext() if stream is None else torch.cuda.stream(stream):  # first, so that peers need not wait
            arguments = (plan, call.rank, maps, summary.entry_states, call.backend.fold)
            entry.stats = collectives.state_fixup(*arguments, call.group, composed)
        if plan.finish == "entry_late":
            _fold_here(summary, composed)
    return entry


def _fold_here(summary: Summary, composed: AffineMaps | None = None) -> None:
    """The entry states that need no exchange: all, or with `entry_late` those of `EarlyTable`."""
    call, maps, runs = summary.call, summary.maps, summary.call.layout.runs
    if maps is None:
        return
    fold = call.backend.fold
    if runs is not None and call.layout.composing is None and folds_runs(fold):
        fold.fold_runs(maps, summary.entry_states, runs)
    elif call.plan is None:
        fold_on_device(call.layout, maps, summary.entry_states, fold)
    else:
        collectives.fold_here(call.plan, call.rank, maps, summary.entry_states, fold, composed)


@without_gradients
def finish(entry: EntryStates) -> PrefillResult:
    """Stage 4 on every lane, then states and checkpoints in the caller's dtypes.

    With `entry_late` in two parts side by side, of which one does not wait for the exchange, and the other follows it.
    """
    summary = entry.summary
    call, layout, sinks = summary.call, summary.call.layout, summary.sinks
    backend, entry_states, destination = call.backend, summary.entry_states, call.states.destination
    run = backend.cp_prefill
    if summary.maps is not None and (opening := _opening(call)) is not None:
        run = opening.cp_prefill_after_opening

    def stage_4(early: bool) -> None:
        part = None
        if layout.has_early and layout.has_late:
            assert entry.maps is not None
            part = Part(early, entry.maps)

        def on_lane(lane: int, table: WorkTable) -> None:
            table = table.before_exchange if early else table
            run(call.inputs, summary.tiles[lane], table, entry_states, sinks, part)

        _on_lanes(call, on_lane)

    with call.timer.stage("cp_prefill"):
        if layout.has_early:
            stage_4(early=True)
        try:
            if layout.has_late:
                with _behind_exchange(entry):
                    stage_4(early=False)
        finally:  # also of what broke off: its memory is used there
            entry.wait()
    if sinks.output is not call.output:
        call.output.copy_(sinks.output)
    if sinks.checkpoints is not None and sinks.checkpoints is not call.checkpoints:
        assert call.checkpoints is not None
        call.checkpoints.copy_(sinks.checkpoints[:-1])
    if destination is not None and sinks.final_states is not destination:
        final, all_in_order = sinks.final_states[:-1], layout.ends_all
        if call.states.share and call.plan is not None:
            final, all_in_order = collectives.share_final_states(call.plan, call.rank, final, call.group), True
        _states(backend).store_states(final, destination, call.states.rows(layout.final_sequences, all_in_order))
    # a process group that a kept result would keep alive past destroy_process_group can abort a process as it exits
    done = replace(entry, summary=replace(summary, call=replace(call, group=None))) if call.keep_entry else None
    return PrefillResult(call.output, destination, call.checkpoints, entry.stats, done, call.timer)


def _behind_exchange(entry: EntryStates) -> AbstractContextManager[Any]:
    """Where the late part of stage 4 is enqueued: on the exchange's stream, so that it need not wait for the early one.

    But not with a set that masks: a part would write back what it found of the other's.
    """
    call, stream = entry.summary.call, entry.exchange
    if stream is not None and call.backend.exact_rows:
        return torch.cuda.stream(stream)
    entry.wait()
    return nullcontext()


def _on_lanes(call: Call, run: Callable[[int, WorkTable], Any]) -> tuple[Any, ...]:
    """`run` for every lane: on CUDA lane 0 on the current stream and the others beside it, joined before return."""
    tables, device = call.tables, call.inputs.q.device
    if len(tables) == 1:
        return (run(0, tables[0]),)
    if device.type != "cuda" or not tables:
        return tuple(run(lane, table) for lane, table in enumerate(tables))
    current = torch.cuda.current_stream(device)
    results = []
    for lane, table in enumerate(tables):
        stream = current
        if lane > 0:
            stream = lane_stream(device, lane)
            stream.wait_stream(current)
        with torch.cuda.stream(stream):
            results.append(run(lane, table))
    for lane in range(1, len(tables)):
        current.wait_stream(lane_stream(device, lane))
    return tuple(results)
