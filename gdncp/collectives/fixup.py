"""Stage 3: from every CP chunk's map to every CP chunk's entry state, along each sequence, across ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from gdncp.backends.base import AffineMaps, Fold
from gdncp.collectives import all_gather, chain, head_sharded, local, tree
from gdncp.collectives.spans import compose, fold_in_spans, spans_of
from gdncp.collectives.wire import Wire, world_group
from gdncp.plan import PrefillPlan

fold_here = local.run

_Strategy = Callable[[Wire, PrefillPlan, int, AffineMaps, torch.Tensor, Fold], None]

STRATEGIES: dict[str, _Strategy] = {
    "chain": chain.run,
    "all_gather": all_gather.run,
    "head_sharded": head_sharded.run,
    "tree": tree.run,
}


@dataclass(frozen=True)
class FixupStats:
    """What this rank put on the wire; an all-gather counts as one message to and from each other rank."""

    strategy: str
    messages_sent: int = 0
    messages_received: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0


LOCAL = FixupStats("local")


def state_fixup(
    plan: PrefillPlan,
    rank: int,
    maps: AffineMaps,
    entry_states: torch.Tensor,
    fold: Fold,
    group: dist.ProcessGroup | None = None,
    composed: AffineMaps | None = None,
) -> FixupStats:
    """Fill the entry states of all CP chunks but the first of each sequence, in place.

    Every rank of the group calls it, also one that holds nothing; where no sequence crosses ranks nothing is sent and
    no group is needed.  Every strategy but "tree" gives bitwise the left fold, one map, or one composed map of
    `plan.fold_span` CP chunks, at a time in sequence order, of `fold`; a first CP chunk's local state is its exit state
    and is taken as it is.

    Where the plan finishes with `entry_late`, and something crosses ranks, this fills only the rows of segments whose
    entry state comes from another rank; `fold_here` fills the others, and may do so meanwhile.

    Args:
        plan: says who holds what and, in `plan.fixup`, by which strategy.
        rank: this rank within the group, `dist.get_rank(group)`.
        maps: the rank's maps, `num_maps` rows or more, fp32; read only.
        entry_states: [items, H, V, K] fp32, contiguous.  Rows of first CP chunks hold the initial states and are not
            read or changed; whatever the other rows hold is overwritten.
        fold: the backend's, the same on every rank.
        group: None: the default group.
        composed: what `spans.compose` makes of the maps, where that is there already.

    Raises:
        ValueError: the group's size or rank is not the plan's; an unknown strategy; no backend for this device.
        RuntimeError: an exchange failed; names the strategy, the original error chained.
    """
    if not plan.crosses_ranks:
        local.run(plan, rank, maps, entry_states, fold, composed)
        return LOCAL
    if plan.fixup not in STRATEGIES:
        raise ValueError(f"plan.fixup is {plan.fixup!r}; allowed where sequences cross ranks: {', '.join(STRATEGIES)}")
    check_group(plan, rank, group)
    wire = Wire(group, entry_states.device, f"state_fixup by {plan.fixup}")
    if plan.fold_span == 1:
        STRATEGIES[plan.fixup](wire, plan, rank, maps, entry_states, fold)
    else:
        spans = spans_of(plan, rank)
        states = entry_states.new_empty(len(spans), *entry_states.shape[1:])
        STRATEGIES[plan.fixup](wire, plan, rank, composed or compose(plan, rank, maps, fold), states, fold)
        segments = plan.rank_plan(rank).segments
        filled = [plan.finish == "entry_first" or segment.previous is not None for segment in segments]
        of_spans = ((span, state) for span, state in zip(spans, states, strict=True) if filled[span.segment])
        fold_in_spans(of_spans, [segment.first_item for segment in segments], maps, entry_states, fold)
    return stats_of(wire, plan.fixup)


def stats_of(wire: Wire, strategy: str) -> FixupStats:
    return FixupStats(strategy, wire.messages_sent, wire.messages_received, wire.bytes_sent, wire.bytes_received)


def check_group(plan: PrefillPlan, rank: int, group: dist.ProcessGroup | None) -> None:
    """ValueError unless the group is one that the plan was made for and `rank` is this process's place in it."""
    group = world_group(group)
    size, own = group.size(), group.rank()
    if size != plan.world_size:
        raise ValueError(f"group has {size} ranks; the plan was made for world_size={plan.world_size}")
    if own != rank:
        raise ValueError(f"rank is {rank}; this process is rank {own} of the group")
