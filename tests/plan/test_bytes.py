"""The bytes that a plan says its ranks send are those that they put on the wire."""

from __future__ import annotations

import pytest
import torch

from gdncp.backends.base import AffineMaps
from gdncp.collectives import state_fixup
from gdncp.plan import PrefillPlan, plan_prefill
from tests.distributed.affine import BlockFold
from tests.distributed.ranks import run_ranks
from tests.plan.strategies import HEADS

DIM = 16
SEQ_LENS = [64 * 11 + 5, 0, 100, 64 * 6]
OWNERSHIPS = ["contiguous", "zigzag", [[(0, 100), (300, 400)], [(100, 300), (450, 1193)], [(400, 450)]]]


def sent(rank: int, plans: list[PrefillPlan]) -> list[int]:
    result = []
    for plan in plans:
        share = plan.rank_plan(rank)
        maps = AffineMaps.empty(share.num_maps, plan.num_state_heads, DIM, DIM, torch.device("cpu"))
        maps.transition.zero_()
        maps.local_state.zero_()
        entry_states = torch.zeros(len(share.items), plan.num_state_heads, DIM, DIM)
        result.append(state_fixup(plan, rank, maps, entry_states, BlockFold()).bytes_sent)
    return result


@pytest.mark.parametrize("fixup", ["chain", "all_gather", "head_sharded", "tree"])
def test_bytes_are_those_on_the_wire(fixup: str) -> None:
    layer = {"head_dim": DIM, "cp_chunk_len": 64, "fixup": fixup, **HEADS}
    plans = [plan_prefill(SEQ_LENS, world_size=3, ownership=ownership, **layer) for ownership in OWNERSHIPS]
    plans.append(plan_prefill([64, 64, 64], world_size=3, **layer))  # nothing crosses
    by_rank = run_ranks(sent, 3, plans)
    for plan, of_ranks in zip(plans, zip(*by_rank, strict=True), strict=True):
        assert plan.fixup_bytes == of_ranks
    assert not any(plans[-1].fixup_bytes)
