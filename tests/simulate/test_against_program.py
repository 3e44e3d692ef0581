"""The simulated fixups do what the real ones do: messages, bytes, calls of the fold and folded maps per rank."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from gdncp.backends.base import AffineMaps
from gdncp.collectives import state_fixup
from gdncp.plan import PrefillPlan, plan_prefill
from gdncp.simulate import collectives, schemes
from gdncp.simulate.engine import Event
from tests.distributed.affine import BlockFold
from tests.distributed.ranks import run_ranks

WORLD = 3
OWNERSHIPS: tuple[Any, ...] = (
    "contiguous",
    "zigzag",
    [[(0, 100), (300, 400)], [(100, 300), (450, 1193)], [(400, 450)]],
)


class Work(NamedTuple):
    messages_sent: int
    bytes_sent: int
    bytes_received: int
    launches: int
    elements: int  # of the states that were folded


class CountingFold(BlockFold):
    def __init__(self) -> None:
        self.launches = self.elements = 0

    def __call__(self, state: torch.Tensor, transition: torch.Tensor, local_state: torch.Tensor) -> torch.Tensor:
        self.launches += 1
        self.elements += state.numel()
        return super().__call__(state, transition, local_state)


def real(rank: int, plans: list[PrefillPlan]) -> list[Work]:
    result = []
    for plan in plans:
        share, heads, dim = plan.rank_plan(rank), plan.num_state_heads, plan.head_dim
        maps = AffineMaps.empty(share.num_maps, heads, dim, dim, torch.device("cpu"))
        maps.transition.zero_()
        maps.local_state.zero_()
        fold = CountingFold()
        stats = state_fixup(plan, rank, maps, torch.zeros(len(share.items), heads, dim, dim), fold)
        result.append(Work(stats.messages_sent, stats.bytes_sent, stats.bytes_received, fold.launches, fold.elements))
    return result


def simulated(plan: PrefillPlan, monkeypatch: pytest.MonkeyPatch) -> list[Work]:
    launches, elements = [0] * WORLD, [0.0] * WORLD

    class CountingRank(collectives.Rank):
        def fold(self, runs: Any, heads: float | None = None) -> Event:
            runs = [run for run in runs if run]
            launches[self.rank] += collectives.fold_launches(runs)
            elements[self.rank] += (
                sum(map(len, runs)) * (plan.num_state_heads if heads is None else heads) * plan.head_dim**2
            )
            return super().fold(runs, heads)

    monkeypatch.setattr(schemes, "Rank", CountingRank)
    result = schemes.simulate_plan(plan)
    columns = result.messages_sent, result.bytes_sent, result.bytes_received, launches, map(round, elements)
    return [Work(*row) for row in zip(*columns, strict=True)]


@pytest.mark.parametrize("fixup", ["chain", "all_gather", "head_sharded", "tree"])
def test_work_of_each_rank(fixup: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer: dict[str, Any] = {"num_q_heads": 2, "num_k_heads": 2, "num_v_heads": 4, "head_dim": 16, "profile": "cpu"}
    plans = [
        plan_prefill([709, 0, 100, 384], world_size=WORLD, ownership=own, fixup=fixup, cp_chunk_len=64, **layer)
        for own in OWNERSHIPS
    ]
    wide: dict[str, Any] = {
        "num_q_heads": 32,
        "num_k_heads": 32,
        "num_v_heads": 32,
        "profile": "cpu",
    }  # a chain of two blocks
    plans.append(plan_prefill([512], world_size=WORLD, fixup=fixup, cp_chunk_len=64, **wide))
    for plan, expected in zip(plans, zip(*run_ranks(real, WORLD, plans), strict=True), strict=True):
        assert simulated(plan, monkeypatch) == list(expected), plan
