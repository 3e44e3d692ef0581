"""What a rank folds without the others: its sequences where nothing crosses ranks; with `entry_late` all its segments.

Then those whose sequence starts elsewhere are folded from zeros, to rows of their own: what follows a map that dropped
its transition has the bits that it gets from any other state.
"""

from __future__ import annotations

import torch

from gdncp.backends.base import AffineMaps, Fold
from gdncp.collectives.folding import fold_inside
from gdncp.collectives.schedule import own_links
from gdncp.collectives.spans import compose, fold_in_spans, spans_of
from gdncp.plan import PrefillPlan
from gdncp.work import stand_in_rows


def run(
    plan: PrefillPlan,
    rank: int,
    maps: AffineMaps,
    entry_states: torch.Tensor,
    fold: Fold,
    composed: AffineMaps | None = None,
) -> None:
    """composed: what `compose` makes of the maps, where that is there already."""
    rows, links = stand_in_rows(plan.rank_plan(rank)), own_links(plan, rank)
    if plan.fold_span == 1:
        links = tuple(link._replace(item=row) for link, row in zip(links, rows, strict=True))
        fold_inside(links, maps, entry_states, fold, entered=False)
        return
    spans = spans_of(plan, rank)
    states = entry_states.new_empty(len(spans), *entry_states.shape[1:])
    fold_inside(links, composed or compose(plan, rank, maps, fold), states, fold, entered=False)
    known = (state if span.first or span.starts else None for span, state in zip(spans, states, strict=True))
    fold_in_spans(zip(spans, known, strict=True), rows, maps, entry_states, fold)
