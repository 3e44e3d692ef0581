"""`fold_span`: composed maps over spans of CP chunks.  Bits are a function of the grid alone, and right."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

import gdncp
from gdncp.plan.choose import typical_half_lives
from gdncp.plan.cost import total_seconds
from tests.conftest import SAME_BITS_TARGETS
from tests.distributed.ranks import run_ranks
from tests.distributed.test_same_bits import (
    BATCHES,
    LENGTH,
    SHORT,
    assert_right,
    dim_of,
    gather,
    plan_for,
    run_share,
    same,
    uneven,
)
from tests.numeric import Target

SPAN = 3  # which `uneven` cuts at


def span_plan(name: str, world_size: int, ownership: str, dim: int, **choices: Any) -> gdncp.PrefillPlan:
    seq_lens = BATCHES.get(name, SHORT)
    ranges = uneven(seq_lens, world_size) if ownership == "uneven" else ownership
    return plan_for(seq_lens, world_size, dim, ownership=ranges, **{"fold_span": SPAN, **choices})


def _shares(rank: int, cases: list[Any], target: Target) -> list[dict[str, torch.Tensor]]:
    return [
        run_share(rank, plan, name, gates, target.dtype, target, {"forget_below": below})
        for plan, name, gates, below in cases
    ]


GATES = (("never", 0.0), ("mixed", 2.0**-10))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4], ids="ranks{}".format)
@pytest.mark.parametrize("target", SAME_BITS_TARGETS)
def test_bits_are_those_of_one_rank(world_size, target):
    dim = dim_of(target)
    for name, (gates, below) in product(BATCHES, GATES):
        one = span_plan(name, 1, "contiguous", dim)
        expected = gather(one, _shares(0, [(one, name, gates, below)], target))
        if below == 0.0:
            assert_right(one, name, gates, target, expected)
        cases = []
        for ownership, fixup, finish in product(
            ("contiguous", "zigzag", "uneven"), ("chain", "all_gather", "head_sharded"), ("entry_first", "entry_late")
        ):
            lanes = 1 + (fixup == "chain")
            choices = {"fixup": fixup, "finish": finish, "lanes_per_rank": lanes}
            cases.append((span_plan(name, world_size, ownership, dim, **choices), name, gates, below))
        assert all(plan.reproducible for plan, *_ in cases)
        shares = run_ranks(_shares, world_size, cases, target)
        for (plan, *_), of_ranks in zip(cases, zip(*shares, strict=True), strict=True):
            same(gather(plan, of_ranks), expected)


@pytest.mark.slow
def test_triton_keeps_the_bits_too():
    target, name = Target("cpu", "triton"), "short"
    one = span_plan(name, 1, "contiguous", 32)
    two = span_plan(name, 2, "zigzag", 32, fixup="all_gather", finish="entry_late")
    arguments = (name, *GATES[1])
    expected = gather(one, _shares(0, [(one, *arguments)], target))
    shares = run_ranks(_shares, 2, [(two, *arguments)], target)
    same(gather(two, [of_rank[0] for of_rank in shares]), expected)


def test_spans_and_trees_and_cuts_off_the_spans_are_right():
    target, name = Target("cpu", "torch"), "varlen"
    off = [[(0, 5 * LENGTH)], [(5 * LENGTH, sum(BATCHES[name]))]]  # on the grid of CP chunks, inside a span
    plans = [plan_for(BATCHES[name], 2, 32, ownership=off, fold_span=SPAN, fixup="chain")]
    plans.append(span_plan(name, 2, "zigzag", 32, fixup="tree"))
    assert not any(plan.reproducible for plan in plans)
    cases = [(plan, name, "never", 0.0) for plan in plans]
    shares = run_ranks(_shares, 2, cases, target)
    for plan, of_ranks in zip(plans, zip(*shares, strict=True), strict=True):
        assert_right(plan, name, "never", target, gather(plan, of_ranks))


def test_one_composed_map_travels_per_span():
    flat, spans = (plan_for([24 * LENGTH], 2, 32, fixup="all_gather", fold_span=n) for n in (1, 4))
    assert flat.fixup_bytes[0] == 23 * max((1, 1, 2)) * 32 * 32 * 4  # a first CP chunk's is its state alone
    assert spans.fixup_bytes[0] == 5 * max((1, 1, 2)) * 32 * 32 * 4
    assert [s.stop for s in plan_for([26 * LENGTH], 2, 32, fold_span=4).segments] == [12 * LENGTH, 26 * LENGTH]
    assert flat.digest != spans.digest and "spans of 4 CP chunks" in spans.explain()
    with pytest.raises(ValueError, match="fold_span must be a positive int or None, got 0"):
        plan_for([1000], 2, fold_span=0)


def test_the_planner_composes_where_that_gains():
    layer = {"num_q_heads": 16, "num_k_heads": 16, "num_v_heads": 32, "profile": "h200", "fixup": "chain"}
    plan = gdncp.plan_prefill([1 << 17], world_size=8, **layer)
    flat = gdncp.plan_prefill([1 << 17], world_size=8, cp_chunk_len=plan.cp_chunk_len, **layer)
    assert plan.fold_span > 1 == flat.fold_span
    assert plan.fixup_seconds["chain"] < flat.fixup_seconds["chain"]
    assert gdncp.plan_prefill([1 << 17], world_size=8, require_reproducible=True, **layer).fold_span == 1


def test_so_it_does_on_one_rank_and_nowhere_in_vain():
    for seq_lens, heads, composes in (([1 << 17], 1, True), ([1 << 17], 4, False), ([1 << 17], 32, False)):
        layer = {"num_q_heads": heads, "num_k_heads": heads, "num_v_heads": heads, "profile": "h200"}
        plan, flat = (gdncp.plan_prefill(seq_lens, fold_span=n, **layer) for n in (None, 1))
        assert (plan.fold_span > 1) == composes and plan.fixup == "local"
        for half_lives in (None, typical_half_lives(heads)):
            seconds, without = (total_seconds(p, half_lives) for p in (plan, flat))
            assert seconds < 0.96 * without if composes else plan == flat
        assert (
            f"over spans of {plan.fold_span} CP chunks (predicted one by one: " in " ".join(plan.explain().split())
        ) == composes
        assert gdncp.plan_prefill(seq_lens, cp_chunk_len=2048, **layer).fold_span == 1  # bits depend on what is given
