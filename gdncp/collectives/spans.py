"""Spans (`plan.fold_span` = n): the maps of n CP chunks, counted from the sequence's start, as one.

Exchanges and folds along a sequence then run over composed maps, and inside a span entry states come by folding from
the span's.  How maps are associated is a function of the grid alone, so the bits are the same wherever the spans lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from gdncp.backends.base import AffineMaps, Fold
from gdncp.collectives.folding import Stretch, Stretches, fold_stretches, stretches_on
from gdncp.plan import PrefillPlan
from gdncp.plan.layout import span_bounds
from gdncp.work import upload


class Span(NamedTuple):
    """The CP chunks of a span that lie on one rank: all of them, but for ownership off the grid of spans."""

    segment: int  # which of the rank's
    first: int  # its first CP chunk within the segment
    num_items: int
    map_row: int  # of that CP chunk
    starts: bool  # it starts its sequence
    row: int  # among the rank's composed maps; -1: nothing of the sequence follows


@lru_cache(256)
def spans_of(plan: PrefillPlan, rank: int) -> tuple[Span, ...]:
    """The rank's, in the order of their items; their entry states have rows in this order."""
    share = plan.rank_plan(rank)
    spans: list[Span] = []
    row = 0
    for number, segment in enumerate(share.segments):
        bounds = span_bounds(segment, plan.fold_span)
        for first, stop in bounds:
            passes_on = segment.next is not None or stop < segment.num_items
            starts = segment.previous is None and first == 0
            map_row = share.map_rows[segment.first_item + first]
            spans.append(Span(number, first, stop - first, map_row, starts, row if passes_on else -1))
            row += passes_on
    return tuple(spans)


class Composing(NamedTuple):
    """What becomes of the maps of spans that something follows, by rows on a device."""

    local_states: Stretches  # from each span's first local state, of a sequence's first CP chunk its exit state
    transitions: Stretches  # from its first transition; of spans that do not start their sequence
    alone: tuple[Span, ...]  # of these, those of one CP chunk: off the grid of spans


@lru_cache(256)  # plans are compared by their digest
def composing_on(plan: PrefillPlan, rank: int, device: torch.device) -> Composing:
    """Copied to the device once, without waiting for it."""
    composed = [span for span in spans_of(plan, rank) if span.row >= 0]
    later = [span for span in composed if not span.starts]
    return Composing(
        stretches_on([Stretch(0, span.map_row, span.num_items, 1, 0, span.row) for span in composed], device),
        stretches_on([Stretch(s.map_row, s.map_row + 1, s.num_items - 1, 0, 0, s.row) for s in later], device),
        tuple(span for span in later if span.num_items == 1),
    )


def compose(plan: PrefillPlan, rank: int, maps: AffineMaps, fold: Fold) -> AffineMaps:
    """One map per span that something follows; row `Span.row`.  Only transitions and local states are filled.

    Transitions are folded like states, with nothing to add: a span's is zero where one of its maps dropped its own.
    """
    num_maps, num_heads, v_dim, k_dim = maps.local_state.shape
    device = maps.local_state.device
    local_states, transitions, alone = composing_on(plan, rank, device)
    num_composed = sum(span.row >= 0 for span in spans_of(plan, rank))
    made = AffineMaps.empty(num_composed, num_heads, k_dim, v_dim, device)
    fold_stretches(local_states, maps, maps.local_state, fold, exits=made.local_state)
    if transitions.rows:
        adds_nothing = AffineMaps.empty(num_maps, num_heads, k_dim, k_dim, device)
        adds_nothing.transition.copy_(maps.transition)
        adds_nothing.local_state.zero_()
        fold_stretches(transitions, adds_nothing, maps.transition, fold, exits=made.transition)
    for span in alone:
        made.transition[span.row].copy_(maps.transition[span.map_row])
    return made


class InSpans(NamedTuple):
    """From entry states of spans to those of all their CP chunks, by rows on a device."""

    spans: torch.Tensor  # whose entry states are known and not yet among those of CP chunks
    rows: torch.Tensor  # where they belong there
    folds: Stretches


def in_spans_on(
    spans: Sequence[Span], known: Sequence[bool | None], rows: Sequence[int], device: torch.device
) -> InSpans:
    """For a rank's spans; zeros stand for entry states that are not known, and are not written.

    known: per span, whether the state that enters it is; of one that starts its sequence it is in place.  None: the
    span is left out.  rows: per segment of the rank the row of its first CP chunk.
    """
    entered, folds = [], []
    for number, (span, is_known) in enumerate(zip(spans, known, strict=True)):
        if is_known is not None:
            row, steps = rows[span.segment] + span.first, span.num_items - 1
            if is_known and not span.starts:
                entered.append((number, row))
            folds.append(Stretch(row, span.map_row, steps, 1 if span.starts else is_known - 1, steps))
    columns = upload({"spans": [number for number, _ in entered], "rows": [row for _, row in entered]}, device)
    return InSpans(folds=stretches_on(folds, device), **columns)


def fold_in_spans(
    inside: InSpans, states: torch.Tensor, maps: AffineMaps, entry_states: torch.Tensor, fold: Fold
) -> None:
    """`states`: those that enter spans, [spans, H, V, K]."""
    if inside.spans.numel():
        entry_states.index_copy_(0, inside.rows, states.index_select(0, inside.spans))
    fold_stretches(inside.folds, maps, entry_states, fold)
