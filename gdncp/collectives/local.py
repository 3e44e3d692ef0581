"""Fixup where nothing crosses ranks: each sequence is folded on the rank that holds it."""

from __future__ import annotations

import torch

from gdncp.backends.base import AffineMaps, Fold
from gdncp.collectives.folding import fold_inside
from gdncp.collectives.schedule import own_links
from gdncp.plan import PrefillPlan


def run(plan: PrefillPlan, rank: int, maps: AffineMaps, entry_states: torch.Tensor, fold: Fold) -> None:
    fold_inside(own_links(plan, rank), maps, entry_states, fold)
