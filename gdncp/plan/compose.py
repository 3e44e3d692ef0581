"""Whether maps are composed over spans of CP chunks (`plan.fold_span`), and over how many."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from gdncp.plan import choose, cost

if TYPE_CHECKING:
    from gdncp.plan.prefill_plan import PrefillPlan

_GAIN_OF_SPANS = 0.04  # of the whole call: twice what the model got wrong on an H200 (`bench/fold_spans.py`)


def may_compose(plan: PrefillPlan) -> bool:
    """Whether composing maps may gain enough to look for a grid of its own."""
    wanted = _GAIN_OF_SPANS * cost.total_seconds(plan, plan.head_half_lives)
    if max(plan.predicted["state_fixup"]) <= wanted:
        return False
    if plan.crosses_ranks:
        load = cost.load_of(plan)
        if (maps := load.maps_per_rank) < 2:  # a finer grid may pay for what it folds with what it saves elsewhere
            return True
        # at best a rank's maps are one, and composing takes no time
        fewer = {name: math.ceil(getattr(load, name) / maps) for name in ("num_maps", "depth", "maps_per_rank")}
        least = min(cost.fixup_seconds(plan.profile, load._replace(**fewer)).values())
        return plan.fixup_seconds[plan.fixup] - least > wanted
    for work in plan.rank_work:  # what gains nothing on this grid gains nothing on finer ones
        flat, *composed = choose.local_seconds(plan.stage_model, max(work.local, default=0), sum(work.local))
        if min(composed, default=flat) < flat:
            return True
    return False


def choose_span(
    usual: PrefillPlan, with_span: Callable[[int], PrefillPlan], gates: Sequence[Sequence[float] | None]
) -> PrefillPlan:
    """The plan with composed maps, of as many CP chunks as it gains most by; or without on its grid; or the usual one.

    with_span: the plan on some grid, with spans of so many CP chunks.
    """
    best = with_span(1)
    most, span = best.pieces.num_items.max(), 2
    while span <= most:
        found = choose.choose_plan(best, [with_span(span)], gates, 0.0)
        if found is best and best.fold_span > 1:  # longer ones gain less and less
            break
        best, span = found, 2 * span
    return choose.choose_plan(usual, [best], gates, _GAIN_OF_SPANS if usual.fold_span == 1 < best.fold_span else 0.0)
