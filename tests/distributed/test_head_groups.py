"""Lanes that divide heads: the same bits as one lane, on views of the caller's tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import gdncp
from gdncp.forgetting import error_bound, joined, rank_terms
from gdncp.head_groups import _of_heads
from tests.conftest import SAME_BITS_TARGETS
from tests.distributed.ranks import run_ranks
from tests.distributed.test_same_bits import dim_of, gather, same
from tests.numeric import random_state, random_tokens

LENGTH, SEQ_LENS = 64, [9 * 64, 0, 5 * 64 + 1, 3, 11 * 64 + 40]
HEADS = {"GVA": (2, 2, 4), "GQA": (6, 3, 3), "equal": (3, 3, 3)}


def plan_of(heads: tuple[int, int, int], dim: int, world_size: int = 1, **choices: Any) -> gdncp.PrefillPlan:
    q, k, v = heads
    return gdncp.plan_prefill(
        SEQ_LENS, world_size=world_size, num_q_heads=q, num_k_heads=k, num_v_heads=v, head_dim=dim,
        cp_chunk_len=LENGTH, checkpoint_every_n_tokens=LENGTH, **choices,
    )  # fmt: skip


def _share(rank: int, plan, heads, target, arguments) -> dict[str, torch.Tensor]:
    device, backend, _ = target
    tokens = random_tokens(sum(SEQ_LENS), heads, plan.head_dim, dtype=target.dtype, beta_max=2.0)
    initial = random_state(len(SEQ_LENS), max(heads), plan.head_dim)
    own = {n: torch.cat([x[a:b] for a, b in plan.token_ranges(rank)]).to(device) for n, x in tokens.items()}
    given = {"initial_state": initial.to(device), "backend": backend, "forget_below": 2.0**-10, **arguments}
    result = gdncp.prefill(plan, **own, **given)
    found = {"output": result.output, "final_state": result.final_state, "checkpoints": result.checkpoints}
    return {what: x.cpu() for what, x in found.items()}


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("target", SAME_BITS_TARGETS)
def test_groups_of_heads_have_the_bits_of_all(heads, target):
    one = plan_of(heads, dim_of(target))
    expected = gather(one, [_share(0, one, heads, target, {})])
    for lanes in (2, 3):
        grouped = plan_of(heads, dim_of(target), lanes_per_rank=lanes, lanes_by="heads")
        assert len(grouped.head_groups) == min(lanes, heads[1]) and len(grouped.rank_plan(0).lanes) == 1
        same(gather(grouped, [_share(0, grouped, heads, target, {"timed": True})]), expected)


@pytest.mark.parametrize(
    "choices",
    [
        {"fixup": "chain", "finish": "entry_late"},
        {"fixup": "all_gather", "ownership": "zigzag"},
        {"fixup": "head_sharded", "finish": "entry_late", "ownership": "zigzag"},
        {"fixup": "chain", "fold_span": 2},
    ],
    ids=lambda c: "-".join(map(str, c.values())),
)
@pytest.mark.parametrize("target", SAME_BITS_TARGETS)
def test_groups_exchange_apart_with_the_same_bits(choices, target):
    heads, dim = HEADS["GVA"], dim_of(target)
    span = {"fold_span": choices.get("fold_span", 1)}
    one = plan_of(heads, dim, **span)
    expected = gather(one, [_share(0, one, heads, target, {})])
    plan = plan_of(heads, dim, 3, lanes_per_rank=2, lanes_by="heads", **choices)
    assert plan.reproducible and plan.crosses_ranks
    for final_state in ("owner", "all"):
        shares = run_ranks(_share, 3, plan, heads, target, {"final_state": final_state, "check": True})
        same(gather(plan, shares), expected)


@pytest.mark.slow
def test_triton_reads_some_heads_too():
    heads, seq_lens = (2, 2, 2), [150, 40]
    tokens = random_tokens(sum(seq_lens), heads, 16, gates="never")
    layer = dict(zip(("num_q_heads", "num_k_heads", "num_v_heads"), heads, strict=True))
    results = []
    for lanes in ({}, {"lanes_per_rank": 2, "lanes_by": "heads"}):
        plan = gdncp.plan_prefill(seq_lens, **layer, head_dim=16, cp_chunk_len=64, **lanes)
        results.append(gdncp.prefill(plan, **tokens, backend="triton", use_qk_l2norm_in_kernel=True, forget_below=0.0))
    assert torch.equal(results[0].output, results[1].output)
    assert torch.equal(results[0].final_state, results[1].final_state)


def test_groups_are_views_and_keep_what_reports_need():
    heads, dim = HEADS["GQA"], 32
    plan = plan_of(heads, dim, lanes_per_rank=3, lanes_by="heads")
    tokens = random_tokens(sum(SEQ_LENS), heads, dim)
    plain = gdncp.prefill(plan_of(heads, dim), **tokens, keep_entry=True)
    call = plain.entry.summary.call
    for lane, (start, stop) in enumerate(plan.head_groups):
        group = _of_heads(call, lane, start, stop)
        for name, first in (("q", start), ("k", start // 2), ("v", start // 2), ("gate", start), ("beta", start)):
            whole, some = getattr(call.inputs, name), getattr(group.inputs, name)
            assert some.data_ptr() == whole[:, first].data_ptr() and some.shape[1] == whole.shape[1] // 3

    result = gdncp.prefill(plan, **tokens, keep_entry=True)
    share = plan.rank_plan(0)

    def terms(entry):
        return rank_terms(entry.summary.call.inputs, share, entry.summary.maps, entry.states)

    bound = error_bound([joined([terms(entry) for entry in result.entries])])
    assert bound.summary() == error_bound([terms(plain.entry)]).summary()


def test_pools_and_parts():
    heads, dim = HEADS["GVA"], 32
    plan, one = plan_of(heads, dim, lanes_per_rank=2, lanes_by="heads"), plan_of(heads, dim)
    tokens = random_tokens(sum(SEQ_LENS), heads, dim)
    slots = torch.tensor([8, 2, 5, 0, 3], dtype=torch.int32)
    pools = [random_state(9, 4, dim).to(torch.bfloat16) for _ in range(2)]
    for pool, of in zip(pools, (plan, one), strict=True):
        gdncp.prefill(of, **tokens, state_pool=pool, state_indices=slots)
    assert torch.equal(*pools)
    with pytest.raises(ValueError, match="plan must not have lanes_by='heads' here"):
        gdncp.summarise(plan, **tokens)
    assert "2 lanes each of heads 0 to 1, 2 to 3" in plan.explain()
    few = plan_of((2, 1, 1), dim, lanes_per_rank=3, lanes_by="heads")  # as many groups as key heads
    assert "1 lane each of heads 0 to 1" in few.explain()
    assert plan.digest != one.digest
    with pytest.raises(ValueError, match="lanes_by must be"):
        plan_of(heads, dim, lanes_by="tokens")
