"""Calls of several ranks: what is refused on all of them, groups, pools, what is sent, and what a result keeps."""

from __future__ import annotations

import gc
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import gdncp
from gdncp import flashinfer_api
from tests.distributed.ranks import run_ranks
from tests.distributed.test_same_bits import DIM, EVERY, HEADS, LENGTH, alone, batch, plan_for
from tests.numeric import Target, assert_output, assert_within, random_state, random_tokens

BAD_RANK = {
    "gates": "rank 2: g must be linear",
    "plan": "rank 2: plan must be a PrefillPlan",
    "world size": "rank 2: group must have the plan's 3 ranks, got 4",
    "device": "rank 2: NotImplementedError: no backend serves device type 'meta'",
    "buffer": "rank 2: state_checkpoints must be a torch.Tensor, got int",
}


def _one_bad_rank(rank: int, plan, what: str) -> str:
    tokens, arguments = random_tokens(plan.num_tokens(rank), HEADS, DIM), {}
    if rank == 2:
        if what == "gates":
            tokens["g"] = tokens["g"] - 2.0
        elif what == "plan":
            plan = None
        elif what == "world size":
            plan = plan_for([1000], 3)
        elif what == "device":
            tokens = {n: x.to("meta") for n, x in tokens.items()}
        else:
            arguments["state_checkpoints"] = 5
    try:
        gdncp.prefill(plan, **tokens, **arguments, check=True)
    except ValueError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("what", BAD_RANK)
def test_one_ranks_bad_input_raises_on_every_rank(what):
    messages = run_ranks(_one_bad_rank, 4, plan_for([1000], 4), what)
    assert all(m.startswith(BAD_RANK[what]) for m in messages), messages


def _different_calls(rank: int, plan, what: str) -> str:
    tokens = random_tokens(plan.num_tokens(rank), HEADS, DIM)
    try:
        if what == "scale":
            gdncp.prefill(plan, **tokens, check=True, scale=0.5 if rank else 0.25)
        elif what == "head dim of v":
            tokens["v"] = tokens["v"][..., : DIM - 16 * rank].contiguous()
            gdncp.prefill(plan, **tokens, check=True)
        elif what == "initial states":  # each rank starts a sequence
            other = plan_for([640, 640], 2)
            state = random_state(2, max(HEADS), DIM) if rank else None
            gdncp.prefill(other, **random_tokens(640, HEADS, DIM), check=True, initial_state=state)
        else:
            other = plan_for([1000], 2, fixup="chain" if rank else "all_gather")
            gdncp.prefill(other, **tokens)
    except ValueError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("what", ["scale", "head dim of v", "initial states", "digest"])
def test_calls_that_differ_are_named_on_every_rank(what):
    messages = run_ranks(_different_calls, 2, plan_for([1000], 2), what)
    assert all(what in m for m in messages), messages


def _one_starts(rank: int, plan) -> bool:
    """Only the rank that starts the sequence has, and needs, its initial state."""
    state = random_state(1, max(HEADS), DIM) if rank == 0 else None
    gdncp.prefill(plan, **random_tokens(plan.num_tokens(rank), HEADS, DIM), check=True, initial_state=state)
    return True


def test_a_rank_that_starts_nothing_has_no_say_in_initial_states():
    assert all(run_ranks(_one_starts, 2, plan_for([1000], 2)))


def _public_call(rank: int, seq_lens) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """FlashInfer's call on a sub-group whose global ranks are not 0 ... W−1."""
    members = [3, 1]
    group = dist.new_group(members, use_local_synchronization=True) if rank in members else None
    if group is None:
        return None
    plan = plan_for(seq_lens, 2)
    own = dist.get_rank(group)
    _, tokens, initial = batch("varlen", "weak", torch.float32)
    start, stop = plan.token_ranges(own)[0][0], plan.token_ranges(own)[-1][1]
    starts = torch.tensor([0, *torch.tensor([n // EVERY for n in seq_lens]).cumsum(0).tolist()])
    rows = torch.full((len(plan.checkpoint_rows(own)), max(HEADS), DIM, DIM), torch.nan)
    output, final = gdncp.chunk_gated_delta_rule(
        **{n: x[start:stop].contiguous() for n, x in tokens.items()}, initial_state=initial, output_final_state=True,
        cu_seqlens_host=[0, *torch.tensor(seq_lens).cumsum(0).tolist()], group=group, _cp_chunk_len=LENGTH,
        state_checkpoints=rows, checkpoint_cu_starts=starts, checkpoint_every_n_tokens=EVERY,
    )  # fmt: skip
    return output, final, rows


def test_flashinfers_call_on_a_sub_group():
    seq_lens, tokens, initial = batch("varlen", "weak", torch.float32)
    shares = run_ranks(_public_call, 4, seq_lens)
    first, second = shares[1], shares[3]  # group ranks follow global ranks
    expected = gdncp.gated_delta_rule_reference(
        **tokens, seq_lens=seq_lens, initial_state=initial, checkpoint_every_n_tokens=EVERY
    )
    assert_output(torch.cat([first[0], second[0]]), expected.output, seq_lens, 2e-5)
    assert_within(first[1] + second[1], expected.final_state, 2e-5)  # each row on one owner, zeros elsewhere
    assert_within(torch.cat([first[2], second[2]]), expected.checkpoints, 2e-5)


def test_use_cp_leaves_tokens_where_plan_prefill_says():
    """Callers cut their tokens by it; on one rank True splits what "auto" would leave whole."""
    seq_lens, (q, k, v) = (300, 63, 63, 1), (torch.empty(0, heads, DIM) for heads in HEADS)
    words = dict(zip(("num_q_heads", "num_k_heads", "num_v_heads"), HEADS, strict=True))
    expected = gdncp.plan_prefill(seq_lens, world_size=2, head_dim=DIM, **words)
    assert expected.cp_chunk_len >= 300
    assert flashinfer_api._plan_of_call(seq_lens, 2, True, None, 0, q, k, v) == expected
    assert flashinfer_api._plan_of_call(seq_lens, 1, True, None, 0, q, k, v).cp_chunk_len < 300


GROUP_CALLS = {
    "use_cp": ({"use_cp": False}, "use_cp must be True or 'auto' with a group of 2 ranks, got False"),
    "lengths": ({"cu_seqlens_host": None}, "cu_seqlens_host must be given with a group of 2 ranks, got None"),
    "tokens": ({"cu_seqlens_host": [0, 400]}, "q must have the {} tokens that the plan gives this rank, got "),
    "max_seqlen": ({"max_seqlen": 400}, "max_seqlen must lie between ceil(tokens / sequences) = 512 and"),
    "plan": ({"plan": plan_for([512], 1)}, "plan must have the group's 2 ranks, got 1"),
    "digest": ({}, "ranks differ in plan (by its digest)"),
}


def _group_calls(rank: int) -> dict[str, str]:
    said, tokens = {}, random_tokens(256, HEADS, DIM)
    group = dist.group.WORLD
    for what, (arguments, _) in GROUP_CALLS.items():
        good = {"cu_seqlens_host": [0, 512], "_cp_chunk_len": 128 if what == "digest" and rank else LENGTH}
        try:
            gdncp.chunk_gated_delta_rule(**tokens, **{**good, **arguments}, group=group)
        except ValueError as error:
            said[what] = str(error)
    return said


def test_what_flashinfers_call_refuses_with_a_group():
    for rank, said in enumerate(run_ranks(_group_calls, 2)):
        for what, (_, expected) in GROUP_CALLS.items():
            assert said[what].startswith(expected.format((192, 208)[rank])), (rank, what, said)


def _outside(rank: int) -> list[str]:
    group, said = dist.new_group([1]), []
    tokens, plan = random_tokens(10, HEADS, DIM), plan_for([10], 1)
    for call in (
        lambda: gdncp.chunk_gated_delta_rule(**tokens, group=group),
        lambda: gdncp.prefill(plan, **tokens, group=group, check=True),
        lambda: gdncp.warmup(plan, group=group),
    ):
        try:
            call()
        except ValueError as error:
            said.append(str(error))
    return said


def test_a_process_outside_the_group_is_told_so():
    outside, inside = run_ranks(_outside, 2)
    assert outside == ["group must contain this process, got a group that it is not a member of"] * 3
    assert inside == []


def _pool_share(rank: int, plan, final_state: str) -> torch.Tensor:
    _, tokens, initial = batch("varlen", "never", torch.float32)
    own = {n: torch.cat([x[a:b] for a, b in plan.token_ranges(rank)] or [x[:0]]) for n, x in tokens.items()}
    pool = torch.full((9, max(HEADS), DIM, DIM), 7.0)
    starts_here = [item.sequence for item in plan.rank_plan(rank).items if item.is_first]
    pool[SLOTS[starts_here]] = initial[starts_here]  # the others are not this rank's to read
    result = gdncp.prefill(
        plan, **own, state_pool=pool, state_indices=SLOTS, final_state=final_state, forget_below=0.0, check=True
    )
    assert result.final_state is pool
    return pool


SLOTS = torch.tensor([8, 2, 5, 0, 3, 6])


@pytest.mark.parametrize("final_state", ["owner", "all"])
def test_pools_on_several_ranks_are_written_in_place_where_sequences_end_or_everywhere(final_state):
    seq_lens, *_ = batch("varlen", "never", torch.float32)
    plan = plan_for(seq_lens, 3, ownership="zigzag", fixup="chain")
    expected = alone("varlen", "never", Target("cpu", "torch"))["final_state"]
    for rank, pool in enumerate(run_ranks(_pool_share, 3, plan, final_state)):
        for sequence, slot in enumerate(SLOTS.tolist()):
            if final_state == "all" or plan.final_state_owner(sequence) == rank:
                assert torch.equal(pool[slot], expected[sequence]), (rank, sequence)
        assert bool((pool[[1, 4, 7]] == 7).all())


def _few_tokens(rank: int, seq_lens, world_size: int) -> dict[str, torch.Tensor]:
    q, k, v = HEADS
    plan = gdncp.plan_prefill(
        seq_lens, world_size=world_size, num_q_heads=q, num_k_heads=k, num_v_heads=v, head_dim=DIM
    )
    tokens = random_tokens(sum(seq_lens), HEADS, DIM)
    own = {n: torch.cat([x[a:b] for a, b in plan.token_ranges(rank)] or [x[:0]]) for n, x in tokens.items()}
    result = gdncp.prefill(plan, **own, final_state="all", check=True)
    return {"plan": plan, "output": result.output, "final_state": result.final_state, "sent": result.fixup.bytes_sent}


@pytest.mark.parametrize("seq_lens", [[10], [2], [0, 0], [3, 0, 4], [100, 100, 100]], ids=str)
def test_fewer_tokens_than_ranks(seq_lens):
    shares = run_ranks(_few_tokens, 3, seq_lens, 3)
    plan = shares[0]["plan"]
    expected = gdncp.gated_delta_rule_reference(**random_tokens(sum(seq_lens), HEADS, DIM), seq_lens=seq_lens)
    start = 0
    output = torch.empty(sum(seq_lens), max(HEADS), DIM)
    for rank, share in enumerate(shares):
        held = share["output"].split([b - a for a, b in plan.token_ranges(rank)])
        for (a, b), rows in zip(plan.token_ranges(rank), held, strict=True):
            output[a:b] = rows
            start += b - a
        assert_within(share["final_state"], expected.final_state, 2e-5)
        if not plan.crosses_ranks:
            assert share["sent"] == 0
    assert start == sum(seq_lens)
    assert_output(output, expected.output, seq_lens, 2e-5)


def _kept_result(rank: int, plan) -> bool:
    group = dist.new_group([0, 1], timeout=timedelta(seconds=30))
    tokens = random_tokens(plan.num_tokens(rank), HEADS, DIM)
    result = gdncp.prefill(plan, **tokens, group=group, check=True, final_state="all")
    alive = weakref.ref(group)
    dist.destroy_process_group(group)
    del group
    gc.collect()
    return alive() is None and bool(result.output.isfinite().all())


def test_a_kept_result_keeps_no_process_group():
    """A group that is still there when Python exits aborts now and then, and torchrun calls a good run failed."""
    assert run_ranks(_kept_result, 2, plan_for([1000], 2)) == [True, True]
