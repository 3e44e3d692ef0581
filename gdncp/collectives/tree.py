"""Fixup by a tree: each segment's maps are composed to one, and prefixes of composed maps double in length every round.

About log2(segments) rounds, for worlds where a chain has too many hops.  Maps are associated by segment, so its bits
are tied to the ownership: outside the promise of the other strategies.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from gdncp.backends.base import AffineMaps, Fold
from gdncp.collectives.folding import Run, Step, Stretches, fold_runs, fold_stretches, inside, own_steps, stretches_on
from gdncp.collectives.schedule import Link, crossing_routes, links_to_fill, tree_rounds
from gdncp.collectives.wire import Wire
from gdncp.plan import PrefillPlan


class Composed(NamedTuple):
    """A run of maps as one; without a transition where it begins at the sequence's start: then it is a state."""

    local_state: torch.Tensor  # [H, V, K]
    transition: torch.Tensor | None  # [H, K, K]


def run(wire: Wire, plan: PrefillPlan, rank: int, maps: AffineMaps, entry_states: torch.Tensor, fold: Fold) -> None:
    num_heads, v_dim, k_dim = entry_states.shape[1:]
    nothing = entry_states.new_zeros(num_heads, k_dim, k_dim)
    split = num_heads * v_dim * k_dim

    def pack(composed: Composed, whole: bool) -> torch.Tensor:
        if not whole:
            return composed.local_state.flatten()
        assert composed.transition is not None
        return torch.cat([composed.local_state.flatten(), composed.transition.flatten()])

    def unpack(flat: torch.Tensor, whole: bool) -> Composed:
        transition = flat[split:].view(num_heads, k_dim, k_dim) if whole else None
        return Composed(flat[:split].view(num_heads, v_dim, k_dim), transition)

    wire.open_point_to_point()
    links = [link for route in crossing_routes(plan) for link in route[:-1] if link.rank == rank]
    held: dict[Link, Composed] = _compose(links, maps, entry_states, nothing, fold)
    for number, (sends, receives) in enumerate(tree_rounds(plan, rank)):
        outgoing = [(t.target.rank, pack(held[t.source], t.whole)) for t in sends]
        landing = [(t.source.rank, entry_states.new_empty(split + t.whole * nothing.numel())) for t in receives]
        wire.exchange(outgoing, landing).wait()
        arrived = {t.target: unpack(flat, t.whole) for t, (_, flat) in zip(receives, landing, strict=True)}
        if number == 0:
            held = arrived  # the hand-over: from now on a link holds what precedes it
        else:
            held |= _after(arrived, held, nothing, fold)
    for link, composed in held.items():
        entry_states[link.item].copy_(composed.local_state)
    fold_stretches(filling_on(plan, rank, entry_states.device), maps, entry_states, fold)
    wire.finish()


@lru_cache(256)  # plans are compared by their digest
def filling_on(plan: PrefillPlan, rank: int, device: torch.device) -> Stretches:
    """Inside the rank's segments; copied to the device once, without waiting for it."""
    return stretches_on(inside(links_to_fill(plan, rank)), device)


def _compose(
    links: list[Link], maps: AffineMaps, entry_states: torch.Tensor, nothing: torch.Tensor, fold: Fold
) -> dict[Link, Composed]:
    """Each link's maps as one.  The transitions are folded like states, with nothing to add."""
    state_runs, transition_runs = [], []
    for link in links:
        steps = [step._replace(out=None) for step in own_steps(link, maps, entry_states)]
        if link.starts:
            state_runs.append(Run(None, steps))
        else:
            state_runs.append(Run(steps[0].local_state, steps[1:]))
            after = [Step(step.transition, nothing, None) for step in steps[1:]]
            transition_runs.append(Run(steps[0].transition, after))
    states = fold_runs(state_runs, fold)
    transitions = iter(fold_runs(transition_runs, fold))
    return {
        link: Composed(state, None if link.starts else next(transitions))
        for link, state in zip(links, states, strict=True)
    }


def _after(
    earlier: dict[Link, Composed], held: dict[Link, Composed], nothing: torch.Tensor, fold: Fold
) -> dict[Link, Composed]:
    """Per link: what arrived, then what it held, as one."""
    state_runs, transition_runs = [], []
    for link, composed in earlier.items():
        state_runs.append(Run(composed.local_state, [Step(held[link].transition, held[link].local_state, None)]))
        if composed.transition is not None:
            transition_runs.append(Run(composed.transition, [Step(held[link].transition, nothing, None)]))
    states = fold_runs(state_runs, fold)
    transitions = iter(fold_runs(transition_runs, fold))
    return {
        link: Composed(state, None if composed.transition is None else next(transitions))
        for (link, composed), state in zip(earlier.items(), states, strict=True)
    }
