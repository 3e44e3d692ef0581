"""Spans (`plan.fold_span` = n): the maps of n CP chunks, counted from the sequence's start, as one.

Exchanges and folds along a sequence then run over composed maps, and inside a span entry states come by folding from
the span's.  How maps are associated is a function of the grid alone, so the bits are the same wherever the spans lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from gdncp.backends.base import AffineMaps, ComposingRuns, Fold, FoldRuns
from gdncp.backends.base import folds_runs as takes_runs
from gdncp.collectives.folding import Run, Step, Stretch, Stretches, fold_runs, fold_stretches
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
    """What becomes of the maps of spans that something follows."""

    spans: tuple[Span, ...]
    later: tuple[Span, ...]  # that do not start their sequence; of the others nobody needs the transition
    runs: ComposingRuns  # by rows on a device


@lru_cache(256)  # plans are compared by their digest
def composing_on(plan: PrefillPlan, rank: int, device: torch.device) -> Composing:
    """Copied to the device once, without waiting for it."""
    spans = tuple(span for span in spans_of(plan, rank) if span.row >= 0)
    later = tuple(span for span in spans if not span.starts)
    rows = [*((span, 0) for span in spans), *((span, 1) for span in later)]
    columns = {
        "map_row": [span.map_row for span, _ in rows],
        "num_steps": [span.num_items for span, _ in rows],
        "composed_row": [span.row for span, _ in rows],
        "of_transitions": [of_transitions for _, of_transitions in rows],
    }
    return Composing(spans, later, ComposingRuns(len(rows), **upload(columns, device)))


def compose(plan: PrefillPlan, rank: int, maps: AffineMaps, fold: Fold) -> AffineMaps:
    """One map per span that something follows; row `Span.row`.  Only transitions and local states are filled.

    Transitions are folded like states, with nothing to add: a span's is zero where one of its maps dropped its own.  Of
    a span that starts its sequence the transition is not filled, as nobody needs it.
    """
    num_heads, v_dim, k_dim = maps.local_state.shape[1:]
    device = maps.local_state.device
    composing = composing_on(plan, rank, device)
    made = AffineMaps.empty(len(composing.spans), num_heads, k_dim, v_dim, device)
    if takes_runs(fold):
        fold.compose_runs(maps, composing.runs, made)
        return made
    fold_runs([_of_local_states(span, maps, made) for span in composing.spans], fold)
    if composing.later:
        nothing = maps.transition.new_zeros(num_heads, k_dim, k_dim)
        fold_runs([_of_transitions(span, maps, made, nothing) for span in composing.later], fold)
    return made


def _of_local_states(span: Span, maps: AffineMaps, made: AffineMaps) -> Run:
    rows = range(span.map_row, span.map_row + span.num_items)
    steps = [Step(maps.transition[row], maps.local_state[row], None) for row in rows]
    steps[0] = steps[0]._replace(transition=None)  # taken as it is
    steps[-1] = steps[-1]._replace(out=made.local_state[span.row])
    return Run(None, steps)


def _of_transitions(span: Span, maps: AffineMaps, made: AffineMaps, nothing: torch.Tensor) -> Run:
    rows = range(span.map_row, span.map_row + span.num_items)
    steps = [Step(maps.transition[row], nothing, None) for row in rows]
    steps[0] = Step(None, maps.transition[span.map_row], None)
    steps[-1] = steps[-1]._replace(out=made.transition[span.row])
    return Run(None, steps)


class InSpans(NamedTuple):
    """From entry states of spans to those of all their CP chunks."""

    # one map at a time: first are copied, by rows on a device,
    spans: torch.Tensor  # the entry states that are known and not yet among those of CP chunks,
    rows: torch.Tensor  # to where they belong there
    folds: Stretches
    # or all of it in one launch
    runs: FoldRuns


def in_spans_on(
    spans: Sequence[Span], known: Sequence[bool | None], rows: Sequence[int], device: torch.device
) -> InSpans:
    """For a rank's spans; zeros stand for entry states that are not known, and are not written.

    known: per span, whether the state that enters it is; of one that starts its sequence it is in place.  None: the
    span is left out.  rows: per segment of the rank the row of its first CP chunk.
    """
    entered, folds, numbers = [], [], []
    for number, (span, is_known) in enumerate(zip(spans, known, strict=True)):
        if is_known is not None:
            row, steps = rows[span.segment] + span.first, span.num_items - 1
            if is_known and not span.starts:
                entered.append((number, row))
            if steps or (is_known and not span.starts):
                folds.append(Stretch(row, span.map_row, steps, 1 if span.starts else is_known - 1, steps))
                numbers.append(number)
    columns = {name: [getattr(stretch, name) for stretch in folds] for name in Stretch._fields[:4]}
    columns |= {"span_row": numbers, "spans": [number for number, _ in entered], "rows": [row for _, row in entered]}
    uploaded = upload(columns, device)
    copied = {name: uploaded.pop(name) for name in ("spans", "rows")}
    steps_only = Stretches(tuple(stretch for stretch in folds if stretch.num_steps))
    return InSpans(folds=steps_only, runs=FoldRuns(len(folds), **uploaded), **copied)


def fold_in_spans(
    inside: InSpans, states: torch.Tensor, maps: AffineMaps, entry_states: torch.Tensor, fold: Fold
) -> None:
    """`states`: those that enter spans, [spans, H, V, K]."""
    if takes_runs(fold):
        fold.fold_runs(maps, entry_states, inside.runs, spans=states)
        return
    if inside.spans.numel():
        entry_states.index_copy_(0, inside.rows, states.index_select(0, inside.spans))
    fold_stretches(inside.folds, maps, entry_states, fold)
