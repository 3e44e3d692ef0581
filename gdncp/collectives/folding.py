"""The left fold that every strategy shares: one map at a time in sequence order, batched over runs that are alike."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from gdncp.backends.base import AffineMaps, Fold
from gdncp.collectives.schedule import Link

# Runs per call of the fold.  Gathering a batch copies its transitions, 64 KiB a head of 128: this bounds the scratch.
MAX_BATCH = 16


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


def link_steps(
    link: Link,
    transitions: torch.Tensor,  # [.., H, K, K]; the link's begin at `transition`, without a first CP chunk's
    transition: int,
    local_states: torch.Tensor,  # [.., H, V', K]; the link's begin at `local_state`
    local_state: int,
    outs: Sequence[torch.Tensor | None],
) -> list[Step]:
    """A link's maps as steps; `outs[j]` takes the state after its map j."""
    skip = int(link.starts)
    return [
        Step(None if j < skip else transitions[transition + j - skip], local_states[local_state + j], outs[j])
        for j in range(link.num_maps)
    ]


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
    inside = link.num_maps - (link.next_rank is not None)
    outs: list[torch.Tensor | None] = [None] * inside
    if fill:
        outs = [entry_states[link.item + 1 + j][:, rows] for j in range(inside)]
    if link.next_rank is not None:
        outs.append(exit_out)
    return link_steps(link, maps.transition, link.row + link.starts, maps.local_state[:, :, rows], link.row, outs)


def fold_inside(
    links: Iterable[Link], maps: AffineMaps, entry_states: torch.Tensor, fold: Fold, entered: bool = True
) -> None:
    """From the entry state of each link of this rank to those of its other CP chunks, in place.

    entered: the entry state is known; else zeros take its place.
    """
    runs = []
    for link in links:
        steps = own_steps(link, maps, entry_states)
        if link.next_rank is not None:
            steps.pop()  # its last map leads out of the link
        if steps:
            state = entry_states[link.item] if entered else torch.zeros_like(entry_states[0])
            runs.append(Run(None if link.starts else state, steps))
    fold_runs(runs, fold)
