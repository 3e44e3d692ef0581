"""What ranks have to do by a plan, whatever the gates: what predictions are made of."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from gdncp.plan.overlap import Run
from gdncp.plan.stage_model import Kind, kinds_of_run

if TYPE_CHECKING:
    from gdncp.plan.prefill_plan import PrefillPlan


class RankWork(NamedTuple):
    """What a rank has to do, whatever the gates."""

    runs: list[Run]  # of stage 4 that runs beside the exchange
    kinds: dict[Kind, int]
    local: list[int]  # of runs that it folds by itself, the maps
    takes_part: bool  # in the exchange


def rank_work(plan: PrefillPlan) -> list[RankWork]:
    """Per rank."""
    grid, pieces = plan.grid, plan.pieces
    beside = plan.finish == "entry_late"  # then all segments are also folded without the exchange, beside it
    works: list[RankWork] = [RankWork([], {}, [], False) for _ in range(plan.world_size)]
    starts = np.array(plan.seq_starts, dtype=np.int64)
    begin, end = starts[pieces.sequence], starts[pieces.sequence + 1]
    columns = (pieces.rank, pieces.start - begin, pieces.stop - begin, end - begin, pieces.num_items)
    ends = (pieces.is_first.tolist(), pieces.is_last.tolist())
    for rank, start, stop, tokens, items, is_first, is_last in zip(*(c.tolist() for c in columns), *ends, strict=True):
        work = works[rank]
        kinds = kinds_of_run(grid, start, stop, tokens)
        if beside:
            work.runs.append(Run(is_first, kinds))
        for kind, count in kinds:
            work.kinds[kind] = work.kinds.get(kind, 0) + count
        apart = is_first and is_last
        if beside or apart:
            work.local.append(items - 1)
        if not (apart or work.takes_part):
            works[rank] = work._replace(takes_part=True)
    return works
