"""Stage 3 of the Hopper set: which launches of the fold's kernels (`fold`) a rank's runs take."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from gdncp_kernels.hopper import tensor_maps
from gdncp_kernels.hopper.fold import SINGLE_ROWS, fold_kernel, fold_runs_kernel
from gdncp_kernels.hopper.launch import Launch, Launcher, Launches, Pointer

if TYPE_CHECKING:
    from gdncp.backends.base import AffineMaps, ComposingRuns, FoldRuns
    from gdncp.collectives.peer_memory import Mailboxes
    from gdncp.scratch import ScratchLayout

SMS = 132  # one program each: with K = 128 its ring fills an SM's shared memory
RING = 3  # transitions on their way or in use


@cache
def _launcher(dim: int, by_mail: bool) -> Launcher:
    options = {"num_warps": dim // 16}
    if dim == 64:
        options["maxnreg"] = 128  # as much as it needs; by default a program takes all registers of an SM
    if by_mail:
        options |= {"debug": True, "sanitize_overflow": False}  # one assertion: that a peer came in time
    return Launcher(fold_runs_kernel, **options)


@cache
def _launcher_of_single(dim: int) -> Launcher:
    return Launcher(fold_kernel, num_warps=dim // 16)


_MAPS, _ENTRY_STATES = Pointer("maps", torch.float32), Pointer("entry_states", torch.float32)


class StateFold:
    """`gdncp.backends.base.Fold`, `RunFold` and `MailFold` for K = 64 and 128."""

    block_rows: int = SINGLE_ROWS.value

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
                launch = _launcher_of_single(s.shape[2])
                launch(s.shape[0] * num_blocks, s, m, n, out, *strides, num_blocks, s.shape[2])
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
    launcher = _launcher(k_dim, by_mail=arguments.get("peers") is not None)
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
    return next((rows for rows in (8, 16) if num_rows <= SMS * rows), 32)


def _as_batch(x: torch.Tensor) -> torch.Tensor:
    """[B, rows, K], each matrix dense; a view where possible."""
    x = x.reshape(-1, *x.shape[-2:])
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()
