"""Lanes of heads where the simulation says that they hide an exchange, and nowhere else."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gdncp.plan import PrefillPlan, lanes, plan_prefill
from gdncp.plan.choose import typical_half_lives
from gdncp.simulate.schemes import simulate_plan

ROOT = Path(__file__).parents[2]
_SPEC = importlib.util.spec_from_file_location("lanes_table", ROOT / "bench" / "lanes_table.py")
assert _SPEC is not None and _SPEC.loader is not None
table = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(table)
TCP = {"world_size": 2, "profile": table.profile("TCP", 2), **table.LAYER}


@pytest.mark.parametrize("network", table.NETWORKS)
@pytest.mark.parametrize("world_size", [2, 8, pytest.param(64, marks=pytest.mark.slow)])
def test_the_table_of_the_docs(network: str, world_size: int) -> None:
    docs = (ROOT / "docs" / "planner.md").read_text(encoding="utf-8").splitlines()
    assert table.HEAD in docs
    for tokens in table.TOKENS_PER_GPU:
        assert table.row(network, world_size, tokens) in docs


def seconds(plan: PrefillPlan, half_lives: list[float] | None) -> float:
    return simulate_plan(replace(plan, head_half_lives=None if half_lives is None else tuple(half_lives))).seconds


def test_lanes_are_taken_where_they_gain_and_the_plan_says_why() -> None:
    plan, one = plan_prefill([1 << 17], lanes_per_rank=None, **TCP), plan_prefill([1 << 17], **TCP)
    assert len(plan.head_groups) == 2 and plan.lanes_by == "heads"
    for half_lives in (None, typical_half_lives(32)):
        assert seconds(plan, half_lives) < 0.97 * seconds(one, half_lives)
    assert "lanes        2 of heads, which hide some of the exchange" in plan.explain()
    told = plan_prefill([1 << 17], lanes_per_rank=None, head_half_lives=[1e30] * 32, **TCP)
    assert len(told.head_groups) == 2 and " or " not in told.lanes_reason


@pytest.mark.parametrize(
    "seq_lens, given, why",
    [
        ([1 << 15], {}, "simulated to take"),
        ([1 << 21], {}, "% of the predicted time"),
        ([1024], {}, "nothing crosses ranks"),
        ([1 << 17], {"num_q_heads": 32, "num_k_heads": 1, "num_v_heads": 1}, "share a key head"),
        ([1 << 17], {"profile": "cpu", "cp_chunk_len": 1 << 14}, "on one worker"),
    ],
)
def test_one_lane_otherwise_and_the_plan_says_why(seq_lens: list[int], given: dict[str, Any], why: str) -> None:
    layer = {"world_size": 2, "profile": "h200", **table.LAYER, **given}
    plan, one = plan_prefill(seq_lens, lanes_per_rank=None, **layer), plan_prefill(seq_lens, **layer)
    assert plan.lanes_per_rank == 1 and plan == one
    assert why in plan.lanes_reason and plan.lanes_reason.startswith("one: ")
    assert "lanes        1, as asked" in one.explain()


def test_a_batch_that_takes_long_to_simulate_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "MOST_CP_CHUNKS", 1)
    plan = plan_prefill([1 << 17, 64], lanes_per_rank=None, **TCP)
    assert plan.lanes_per_rank == 1 and "not simulated for more than 64 ranks or 1 CP chunks" in plan.explain()


@pytest.mark.parametrize("finer_alone, num_lanes", [(0.9, 1), (1.0, 2)])
def test_what_a_finer_grid_gains_by_itself_is_not_counted_for_lanes(
    finer_alone: float, num_lanes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, told = [1 << 17, *[0] * num_lanes], {"head_half_lives": [1e30] * 32, **TCP}
    usual = plan_prefill(batch, **told).cp_chunk_len
    times = {(True, 1): 1.0, (False, 1): finer_alone, (True, 2): 1.0, (False, 2): 0.89}
    monkeypatch.setattr(lanes, "_seconds", lambda plan, _: [times[plan.cp_chunk_len == usual, plan.lanes_per_rank]])
    assert plan_prefill(batch, lanes_per_rank=None, **told).lanes_per_rank == num_lanes


@pytest.mark.parametrize("given", [{"cp_chunk_len": 8192}, {"require_reproducible": True}])
def test_lanes_do_not_change_a_grid_that_bits_depend_on(given: dict[str, Any]) -> None:
    plan, one = plan_prefill([1 << 17], lanes_per_rank=None, **given, **TCP), plan_prefill([1 << 17], **given, **TCP)
    assert plan.grid == one.grid and plan.opens == one.opens and plan.fold_span == one.fold_span
