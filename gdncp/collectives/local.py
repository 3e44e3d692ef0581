"""What a rank folds without the others: its sequences where nothing crosses ranks; with `entry_late` all its segments.

Then those whose sequence starts elsewhere are folded from zeros, to rows of their own: what follows a map that dropped
its transition has the bits that it gets from any other state.
"""

from __future__ import annotations

import torch

from gdncp.backends.base import AffineMaps, Fold
from gdncp.collectives.folding import fold_inside
from gdncp.collectives.schedule import own_links
from gdncp.plan import PrefillPlan
from gdncp.work import stand_in_rows


def run(plan: PrefillPlan, rank: int, maps: AffineMaps, entry_states: torch.Tensor, fold: Fold) -> None:
    rows = stand_in_rows(plan.rank_plan(rank))
    links = [link._replace(item=row) for link, row in zip(own_links(plan, rank), rows, strict=True)]
    fold_inside(links, maps, entry_states, fold, entered=False)
