"""The left fold that every strategy shares: one map at a time in sequence order, stretches of maps side by side.

Where a backend's fold takes whole runs (`RunFold`) that is one launch; else one for each step of runs that are alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from gdncp.backends.base import AffineMaps, Fold, FoldRuns
from gdncp.backends.base import folds_runs as takes_runs
from gdncp.collectives.schedule import Link
from gdncp.work import upload

# Runs per call of the fold.  Gathering a batch copies its transitions, 64 KiB a head of 128: this bounds the scratch.
MAX_BATCH = 16


class Stretch(NamedTuple):
    """A run of `gdncp.backends.base.FoldRuns`, by its rows on the host."""

    entry_row: int
    map_row: int
    num_steps: int
    starts: int  # 1: it starts its sequence; -1: from zeros
    num_fills: int
    exit_row: int = -1


@dataclass(frozen=True, eq=False)
class Stretches:
    """What one launch folds."""

    rows: tuple[Stretch, ...]
    runs: FoldRuns | None = None  # the same on the device; None: on the host alone


def stretches_on(stretches: Iterable[Stretch], device: torch.device) -> Stretches:
    """Copied to the device without waiting for it.  What has nothing to fold is left out."""
    rows = tuple(stretch for stretch in stretches if stretch.num_steps)
    names = list(Stretch._fields)
    if all(stretch.num_fills == stretch.num_steps and stretch.exit_row < 0 for stretch in rows):
        names = names[:4]  # what `FoldRuns` takes where all is filled and nothing leaves
    columns = {name: [getattr(stretch, name) for stretch in rows] for name in names}
    return Stretches(rows, FoldRuns(num_runs=len(rows), **upload(columns, device)))


def inside(links: Iterable[Link], entered: bool = True) -> list[Stretch]:
    """From the entry state of each link of a rank to those of its other CP chunks.

    entered: the entry state is known; else zeros take its place.
    """
    return [
        Stretch(link.item, link.row, steps, 1 if link.starts else entered - 1, steps)
        for link in links
        if (steps := link.num_maps - (link.next_rank is not None))  # its last map leads out of the link
    ]


def fold_stretches(
    stretches: Stretches,
    maps: AffineMaps,
    entry_states: torch.Tensor,
    fold: Fold,
    exits: torch.Tensor | None = None,
) -> None:
    """Fill `entry_states` [items, H, V, K], and `exits` [.., H, V, K] where stretches have them, in place."""
    if not stretches.rows:
        return
    if stretches.runs is not None and takes_runs(fold):
        fold.fold_runs(maps, entry_states, stretches.runs, exits)
        return
    fold_runs([_run(stretch, maps, entry_states, exits) for stretch in stretches.rows], fold)


def _run(stretch: Stretch, maps: AffineMaps, entry_states: torch.Tensor, exits: torch.Tensor | None) -> Run:
    entry, row, num_steps, starts, num_fills, exit_row = stretch
    outs: list[torch.Tensor | None] = [entry_states[entry + 1 + j] if j < num_fills else None for j in range(num_steps)]
    if exit_row >= 0:
        assert exits is not None and num_fills < num_steps
        outs[-1] = exits[exit_row]
    steps = [
        Step(None if starts > 0 and j == 0 else maps.transition[row + j], maps.local_state[row + j], outs[j])
        for j in range(num_steps)
    ]
    if starts > 0:
        return Run(None, steps)
    return Run(torch.zeros_like(entry_states[0]) if starts < 0 else entry_states[entry], steps)


def fold_inside(links: Iterable[Link], maps: AffineMaps, entry_states: torch.Tensor, fold: Fold) -> None:
    """The stretches `inside` links, one map at a time."""
    fold_stretches(Stretches(tuple(inside(links))), maps, entry_states, fold)


# ---- one map at a time


class Step(NamedTuple):
    """One map of a run: S := S · transition + local_state, or S := local_state for a first CP chunk."""

    transition: (
        torch.Tensor | None
    )  # [H, K, K]; None: the map begins its sequence, so its local state is its exit state
    local_state: torch.Tensor  # [H, V', K]
    out: torch.Tensor | None  # where the state after it is wanted, [H, V', K]


class Run(NamedTuple):
    state: torch.Tensor | None  # [H, V', K]; None: the first step begins its sequence
    steps: Sequence[Step]


def fold_runs(runs: Sequence[Run], fold: Fold) -> list[torch.Tensor]:
    """The state [H, V', K] after each run, which has a state or a step.  All runs see the same H and K.

    A first CP chunk is never folded through, whatever the strategy: its local state is taken as it is, so that neither
    the sign of a zero nor an initial state that is not finite can tell strategies apart.
    """
    states: list[torch.Tensor | None] = [run.state for run in runs]
    for position in range(max((len(run.steps) for run in runs), default=0)):
        live = [i for i, run in enumerate(runs) if position < len(run.steps)]
        for i in live:  # what begins a sequence
            if runs[i].steps[position].transition is None:
                states[i] = runs[i].steps[position].local_state
        for batch in _batches([i for i in live if runs[i].steps[position].transition is not None], states):
            steps = [runs[i].steps[position] for i in batch]
            folded = fold(
                _stack(states[i] for i in batch),
                _stack(step.transition for step in steps),
                _stack(step.local_state for step in steps),
            )
            for i, after in zip(batch, folded.chunk(len(batch)), strict=True):
                states[i] = after
        for i in live:
            out, state = runs[i].steps[position].out, states[i]
            if out is not None and state is not None:
                out.copy_(state)
    finished = [state for state in states if state is not None]
    assert len(finished) == len(runs), "a run without a state must begin its sequence"
    return finished


def _batches(indices: list[int], states: Sequence[torch.Tensor | None]) -> Iterator[list[int]]:
    """Runs whose states have one shape, at most `MAX_BATCH` of them."""
    alike: dict[int, list[int]] = {}
    for i in indices:
        state = states[i]
        assert state is not None
        alike.setdefault(state.shape[1], []).append(i)
    for same in alike.values():
        for start in range(0, len(same), MAX_BATCH):
            yield same[start : start + MAX_BATCH]


def _stack(tensors: Iterable[torch.Tensor | None]) -> torch.Tensor:
    """[H, .., K] each to one contiguous [n·H, .., K]; a single contiguous one is not copied."""
    parts = [tensor for tensor in tensors if tensor is not None]
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts)


def own_steps(
    link: Link,
    maps: AffineMaps,
    entry_states: torch.Tensor,
    rows: slice = slice(None),
    exit_out: torch.Tensor | None = None,
    fill: bool = True,
) -> list[Step]:
    """The maps of a link of this rank, for a block of V rows, as steps that (`fill`) fill the entry states inside the
    link.

    `exit_out` takes the state that the link hands on; a link that ends its sequence hands none on.
    """
    num_inside = link.num_maps - (link.next_rank is not None)
    outs: list[torch.Tensor | None] = [None] * num_inside
    if fill:
        outs = [entry_states[link.item + 1 + j][:, rows] for j in range(num_inside)]
    if link.next_rank is not None:
        outs.append(exit_out)
    return [
        Step(
            None if link.starts and j == 0 else maps.transition[link.row + j],
            maps.local_state[link.row + j][:, rows],
            out,
        )
        for j, out in enumerate(outs)
    ]
