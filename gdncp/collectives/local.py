"""What a rank folds without the others: its sequences where nothing crosses ranks; with `entry_late` all its segments.

Then those whose sequence starts elsewhere are folded from zeros, to rows of their own: what follows a map that dropped
its transition has the bits that it gets from any other state.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from gdncp.backends.base import AffineMaps, Fold
from gdncp.collectives.folding import Stretches, fold_stretches, inside, stretches_on
from gdncp.collectives.schedule import own_links
from gdncp.collectives.spans import InSpans, compose, fold_in_spans, in_spans_on, spans_of
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
    tables = tables_on(plan, rank, entry_states.device)
    if tables.in_spans is None:
        fold_stretches(tables.links, maps, entry_states, fold)
        return
    states = entry_states.new_empty(len(spans_of(plan, rank)), *entry_states.shape[1:])
    fold_stretches(tables.links, composed or compose(plan, rank, maps, fold), states, fold)
    fold_in_spans(tables.in_spans, states, maps, entry_states, fold)


class Tables(NamedTuple):
    """What a rank folds by itself, by rows on its device."""

    links: Stretches  # with `plan.fold_span` > 1 of spans
    in_spans: InSpans | None  # then what follows


@lru_cache(256)  # plans are compared by their digest
def tables_on(plan: PrefillPlan, rank: int, device: torch.device) -> Tables:
    """Copied to the device once, without waiting for it."""
    rows, links = stand_in_rows(plan.rank_plan(rank)), own_links(plan, rank)
    if plan.fold_span == 1:
        links = tuple(link._replace(item=row) for link, row in zip(links, rows, strict=True))
        return Tables(stretches_on(inside(links, entered=False), device), None)
    known = [bool(span.first or span.starts) for span in spans_of(plan, rank)]
    return Tables(
        stretches_on(inside(links, entered=False), device),
        in_spans_on(spans_of(plan, rank), known, rows, device),
    )
