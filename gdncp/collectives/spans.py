"""Spans (`plan.fold_span` = n): the maps of n CP chunks, counted from the sequence's start, as one.

Exchanges and folds along a sequence then run over composed maps, and inside a span entry states come by folding from
the span's.  How maps are associated is a function of the grid alone, so the bits are the same wherever the spans lie.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from gdncp.backends.base import AffineMaps, Fold
from gdncp.collectives.folding import Run, Step, fold_runs
from gdncp.plan import PrefillPlan
from gdncp.plan.layout import span_bounds


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


def compose(plan: PrefillPlan, rank: int, maps: AffineMaps, fold: Fold) -> AffineMaps:
    """One map per span that something follows; row `Span.row`.  Only transitions and local states are filled.

    Transitions are folded like states, with nothing to add: a span's is zero where one of its maps dropped its own.
    """
    num_heads, v_dim, k_dim = maps.local_state.shape[1:]
    composed = [span for span in spans_of(plan, rank) if span.row >= 0]
    made = AffineMaps.empty(len(composed), num_heads, k_dim, v_dim, maps.local_state.device)
    nothing = maps.local_state.new_zeros(num_heads, k_dim, k_dim)
    runs, outs = [], []
    for span in composed:
        transitions, local_states = (x[span.map_row :][: span.num_items] for x in (maps.transition, maps.local_state))
        steps = [Step(m, n, None) for m, n in zip(transitions[1:], local_states[1:], strict=True)]
        runs.append(Run(local_states[0], steps))  # of a sequence's first CP chunk: its exit state
        outs.append(made.local_state[span.row])
        if not span.starts:
            runs.append(Run(transitions[0], [step._replace(local_state=nothing) for step in steps]))
            outs.append(made.transition[span.row])
    for out, after in zip(outs, fold_runs(runs, fold), strict=True):
        out.copy_(after)
    return made


def fold_in_spans(
    spans: Iterable[tuple[Span, torch.Tensor | None]],
    rows: Sequence[int],
    maps: AffineMaps,
    entry_states: torch.Tensor,
    fold: Fold,
) -> None:
    """From the entry state of spans [H, V, K] to those of all their CP chunks, into `entry_states`.

    rows: per segment of the rank the row of its first CP chunk.  None for an entry state: zeros stand for it, and are
    not written.
    """
    runs = []
    for span, state in spans:
        row, steps = rows[span.segment] + span.first, []
        if state is not None and not span.starts:
            entry_states[row].copy_(state)
        for j in range(span.num_items - 1):
            begins = span.starts and j == 0
            at = span.map_row + j
            steps.append(Step(None if begins else maps.transition[at], maps.local_state[at], entry_states[row + 1 + j]))
        if steps:
            entered = torch.zeros_like(entry_states[0]) if state is None and not span.starts else state
            runs.append(Run(None if span.starts else entered, steps))
    fold_runs(runs, fold)
