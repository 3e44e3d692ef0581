"""Stage 3: from every CP chunk's map to every CP chunk's entry state, along each sequence, across ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

from gdncp.backends.base import AffineMaps, Fold, maps_layout
from gdncp.collectives import all_gather, chain, head_sharded, local, tree
from gdncp.collectives.parcels import shape_of
from gdncp.collectives.spans import InSpans, compose, composing_on, fold_in_spans, in_spans_on, spans_of
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
    """What this rank sent, and by what; an all-gather counts as one message to and from each other rank."""

    strategy: str
    messages_sent: int = 0
    messages_received: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    transport: str = "none"  # "nccl", "gloo", "peer memory" (`gdncp.collectives.peer_memory`); "none": a local fixup


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
        states = entry_states.new_empty(len(spans_of(plan, rank)), *entry_states.shape[1:])
        STRATEGIES[plan.fixup](wire, plan, rank, composed or compose(plan, rank, maps, fold), states, fold)
        fold_in_spans(_in_spans(plan, rank, entry_states.device), states, maps, entry_states, fold)
    return stats_of(wire, plan.fixup)


@lru_cache(256)  # plans are compared by their digest
def _in_spans(plan: PrefillPlan, rank: int, device: torch.device) -> InSpans:
    """What is left when the entry states of spans are known; of those that `fold_here` does not fill."""
    segments, spans = plan.rank_plan(rank).segments, spans_of(plan, rank)
    late = plan.finish == "entry_late"
    filled = [None if late and segments[span.segment].previous is None else True for span in spans]
    return in_spans_on(spans, filled, [segment.first_item for segment in segments], device)


def in_spans(plan: PrefillPlan, rank: int, device: torch.device) -> InSpans | None:
    """What comes last in stage 3 with composed maps, where no part of it comes before an exchange; copied once."""
    if plan.fold_span == 1 or plan.finish == "entry_late":
        return None
    return _in_spans(plan, rank, device) if plan.crosses_ranks else local.tables_on(plan, rank, device).in_spans


def tables_on(plan: PrefillPlan, rank: int, device: torch.device, v_dim: int) -> tuple[Any, ...]:
    """All that `state_fixup` and `fold_here` read on the device, copied there once, without waiting for it.

    Each is made where it is missed; here, so that this is before a capture, and on the stream that others wait for.
    """
    spanned = plan.fold_span > 1
    tables: list[Any] = [composing_on(plan, rank, device)] if spanned else []
    if plan.finish == "entry_late" or not plan.crosses_ranks:
        tables.append(local.tables_on(plan, rank, device))
    if not plan.crosses_ranks:
        return tuple(tables)
    if spanned:
        tables.append(_in_spans(plan, rank, device))
    if plan.fixup == "chain":
        tables.append(chain.rounds_on(plan, rank, device))
    if plan.fixup == "tree":
        tables.append(tree.filling_on(plan, rank, device))
    if plan.fixup in ("all_gather", "head_sharded"):
        strategy = all_gather if plan.fixup == "all_gather" else head_sharded
        num_maps = sum(span.row >= 0 for span in spans_of(plan, rank)) if spanned else plan.rank_plan(rank).num_maps
        for start, stop in plan.head_groups:
            layout = maps_layout(num_maps, stop - start, plan.head_dim, v_dim)
            tables.append(strategy.tables_on(plan, rank, device, *shape_of(layout)))
    return tuple(tables)


def stats_of(wire: Wire, strategy: str) -> FixupStats:
    counts = (wire.messages_sent, wire.messages_received, wire.bytes_sent, wire.bytes_received)
    return FixupStats(strategy, *counts, wire.transport)


def check_group(plan: PrefillPlan, rank: int, group: dist.ProcessGroup | None) -> None:
    """ValueError unless the group is one that the plan was made for and `rank` is this process's place in it."""
    group = world_group(group)
    size, own = group.size(), group.rank()
    if size != plan.world_size:
        raise ValueError(f"group has {size} ranks; the plan was made for world_size={plan.world_size}")
    if own != rank:
        raise ValueError(f"rank is {rank}; this process is rank {own} of the group")
