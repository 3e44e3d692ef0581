"""Same bits for any world size, ownership on the grid, number of lanes and order-preserving fixup; and right ones.

Real processes; the reference is one process, one lane, and the float64 oracle once.
"""

from __future__ import annotations

import gc
import weakref
from datetime import timedelta
from functools import lru_cache
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist

import gdncp
from tests.conftest import SAME_BITS_TARGETS
from tests.distributed.ranks import run_ranks
from tests.numeric import Target, assert_output, assert_within, random_state, random_tokens, tolerance_of

HEADS, DIM, LENGTH, EVERY = (1, 1, 2), 32, 64, 128
BATCHES = {
    "one long": [24 * LENGTH + 13],  # three CP chunks a rank on 8 ranks
    "varlen": [9 * LENGTH, 0, 5 * LENGTH + 1, 3, 11 * LENGTH + 40, 0],
}


def dim_of(target: Target) -> int:
    """Small, as many processes share few cores, but for a set that takes one head dim only."""
    return target.dim if target.backend == "hopper" else DIM


@lru_cache(maxsize=8)
def batch(
    name: str, gates: str, dtype: torch.dtype, dim: int = DIM
) -> tuple[list[int], dict[str, torch.Tensor], torch.Tensor]:
    seq_lens = BATCHES[name]
    tokens = random_tokens(sum(seq_lens), HEADS, dim, gates=gates, dtype=dtype, beta_max=2.0)
    return seq_lens, tokens, random_state(len(seq_lens), max(HEADS), dim)


def plan_for(seq_lens, world_size: int, dim: int = DIM, **choices: Any) -> gdncp.PrefillPlan:
    q, k, v = HEADS
    return gdncp.plan_prefill(
        seq_lens, world_size=world_size, num_q_heads=q, num_k_heads=k, num_v_heads=v, head_dim=dim,
        **{"cp_chunk_len": LENGTH, "checkpoint_every_n_tokens": EVERY, **choices},
    )  # fmt: skip


def run_share(rank: int, plan, name, gates, dtype, target, arguments) -> dict[str, torch.Tensor]:
    """One rank's call on its own tokens; results on the CPU, with the global rows they are."""
    device, backend = target
    _, tokens, initial = batch(name, gates, dtype, plan.head_dim)
    ranges = plan.token_ranges(rank)
    own = {n: torch.cat([x[a:b] for a, b in ranges] or [x[:0]]).to(device) for n, x in tokens.items()}
    result = gdncp.prefill(plan, **own, initial_state=initial.to(device), backend=backend, **arguments)
    rows = list(plan.checkpoint_rows(rank))
    checkpoints = result.checkpoints if rows else torch.empty(0, max(HEADS), plan.head_dim, plan.head_dim)
    return {
        "output": result.output.cpu(),
        "final_state": result.final_state.cpu(),
        "checkpoints": checkpoints.cpu(),
    }


def gather(plan, shares) -> dict[str, torch.Tensor]:
    """The whole batch's results from every rank's share."""
    output = torch.empty(plan.num_tokens_total, *shares[0]["output"].shape[1:], dtype=shares[0]["output"].dtype)
    checkpoints = torch.empty(plan.num_checkpoints, *shares[0]["checkpoints"].shape[1:])
    for rank, share in enumerate(shares):
        held = share["output"].split([b - a for a, b in plan.token_ranges(rank)])
        for (a, b), rows in zip(plan.token_ranges(rank), held, strict=True):
            output[a:b] = rows
        checkpoints[list(plan.checkpoint_rows(rank))] = share["checkpoints"]
    final = torch.stack([shares[plan.final_state_owner(i)]["final_state"][i] for i in range(plan.num_sequences)])
    return {"output": output, "final_state": final, "checkpoints": checkpoints}


def assert_right(plan, name, gates, target, result) -> None:
    """Held against the oracle."""
    seq_lens, tokens, initial = batch(name, gates, target.dtype, plan.head_dim)
    expected = gdncp.gated_delta_rule_reference(
        **tokens, seq_lens=seq_lens, initial_state=initial, checkpoint_every_n_tokens=EVERY
    )
    tol = tolerance_of(target.dtype, tokens["beta"])
    assert_output(result["output"], expected.output, seq_lens, tol)
    assert_within(result["final_state"], expected.final_state, tol, what="final state")
    assert_within(result["checkpoints"], expected.checkpoints, tol, what="checkpoints")


@lru_cache(maxsize=16)
def alone(name: str, gates: str, target: Target) -> dict[str, torch.Tensor]:
    """World size 1, one lane; right."""
    plan = plan_for(BATCHES[name], 1, dim_of(target))
    result = gather(plan, [run_share(0, plan, name, gates, target.dtype, target, {"forget_below": 0.0})])
    assert_right(plan, name, gates, target, result)
    return result


def uneven(seq_lens, world_size: int) -> list[list[tuple[int, int]]]:
    """Explicit ranges on the grid: uneven, scattered shares, and a last rank that holds nothing."""
    cuts, start = [0], 0
    for n in seq_lens:
        cuts += [start + m for m in range(3 * LENGTH, n, 3 * LENGTH)] + [start + n]
        start += n
    cuts = sorted(set(cuts))
    ranges: list[list[tuple[int, int]]] = [[] for _ in range(world_size)]
    for i, piece in enumerate(pairwise(cuts)):
        ranges[(i * i) % max(1, world_size - 1)].append(piece)
    return ranges


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    for name in a:
        assert torch.equal(a[name], b[name]), f"{name} differs"


CONFIGURATIONS = [  # world size, ownership, fixup, lanes, gates, batch, final_state
    (1, "contiguous", "auto", 2, "never", "varlen", "owner"),
    (1, "contiguous", "auto", 4, "mixed", "one long", "all"),
    (2, "contiguous", "chain", 1, "never", "one long", "owner"),
    (2, "zigzag", "all_gather", 2, "mixed", "varlen", "all"),
    (3, "contiguous", "all_gather", 1, "never", "varlen", "all"),
    (3, "uneven", "chain", 3, "never", "varlen", "owner"),
    (3, "zigzag", "head_sharded", 1, "resets", "one long", "owner"),  # two heads: one rank holds none
    (4, "zigzag", "chain", 1, "never", "one long", "all"),
    (4, "uneven", "head_sharded", 2, "mixed", "varlen", "owner"),
    (4, "contiguous", "head_sharded", 4, "never", "one long", "owner"),
    (8, "contiguous", "chain", 1, "never", "one long", "owner"),
    (8, "contiguous", "head_sharded", 1, "never", "varlen", "all"),
    (8, "zigzag", "all_gather", 2, "never", "one long", "owner"),
    (8, "uneven", "all_gather", 1, "resets", "varlen", "owner"),
]


@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=lambda c: "-".join(map(str, c)))
@pytest.mark.parametrize("target", SAME_BITS_TARGETS)
def test_same_bits_as_one_rank(configuration, target):
    world_size, ownership, fixup, lanes, gates, name, final_state = configuration
    dtype, seq_lens = target.dtype, BATCHES[name]
    ranges = uneven(seq_lens, world_size) if ownership == "uneven" else ownership
    plan = plan_for(seq_lens, world_size, dim_of(target), ownership=ranges, fixup=fixup, lanes_per_rank=lanes)
    assert plan.reproducible
    arguments = {"forget_below": 0.0, "final_state": final_state, "check": True}
    shares = run_ranks(run_share, world_size, plan, name, gates, dtype, target, arguments)
    reference = alone(name, gates, target)
    same(gather(plan, shares), reference)
    if final_state == "all":
        for share in shares:
            assert torch.equal(share["final_state"], reference["final_state"])
    else:
        for rank, share in enumerate(shares):
            others = [i for i in range(len(seq_lens)) if plan.final_state_owner(i) != rank]
            assert not share["final_state"][others].any(), "rows of other owners stay zeros"


@pytest.mark.parametrize("first", [LENGTH, 3 * LENGTH])
@pytest.mark.parametrize("target", SAME_BITS_TARGETS)
def test_first_cp_chunks_of_another_length_keep_the_bits(first, target):
    """... and are right: shorter and longer ones, over lanes and ranks."""
    name, gates, seq_lens, dim = "varlen", "never", BATCHES["varlen"], dim_of(target)
    grid = {"cp_chunk_len": 2 * LENGTH, "first_cp_chunk_len": first}
    one, lanes = plan_for(seq_lens, 1, dim, **grid), plan_for(seq_lens, 1, dim, lanes_per_rank=3, **grid)
    three = plan_for(seq_lens, 3, dim, fixup="chain", **grid)
    assert three.reproducible and three.crosses_ranks
    arguments = (name, gates, target.dtype, target, {"forget_below": 0.0})
    single = gather(one, [run_share(0, one, *arguments)])
    same(gather(lanes, [run_share(0, lanes, *arguments)]), single)
    same(gather(three, run_ranks(run_share, 3, three, *arguments)), single)
    assert_right(one, name, gates, target, single)


@pytest.mark.parametrize("target", SAME_BITS_TARGETS)
def test_forgetting_and_narrow_inputs_keep_the_bits(target):
    """What is dropped is decided per CP chunk and head, so it does not depend on ranks either."""
    name, gates, dtype = "varlen", "strong", torch.bfloat16
    seq_lens, dim = BATCHES[name], dim_of(target)
    one, four = plan_for(seq_lens, 1, dim), plan_for(seq_lens, 4, dim, ownership="zigzag", fixup="chain")
    single = gather(one, [run_share(0, one, name, gates, dtype, target, {})])
    shares = run_ranks(run_share, 4, four, name, gates, dtype, target, {})
    same(gather(four, shares), single)


def _share(rank: int, plan, name, target) -> dict[str, torch.Tensor]:
    return run_share(rank, plan, name, "never", target.dtype, target, {"forget_below": 0.0})


@pytest.mark.parametrize("target", SAME_BITS_TARGETS)
def test_the_tree_is_right_but_outside_the_promise(target):
    name = "one long"
    plan = plan_for(BATCHES[name], 4, dim_of(target), fixup="tree")
    assert not plan.reproducible
    assert_right(plan, name, "never", target, gather(plan, run_ranks(_share, 4, plan, name, target)))


@pytest.mark.parametrize("target", SAME_BITS_TARGETS)
def test_cuts_off_the_grid_put_checkpoints_inside_tiles(target):
    name = "varlen"
    cuts = [0, 101, 390, 391, 777, sum(BATCHES[name])]
    ranges = [[(a, b)] for a, b in pairwise(cuts)]
    ownership = [ranges[0] + ranges[3], ranges[1] + ranges[4], ranges[2]]
    plan = plan_for(BATCHES[name], 3, dim_of(target), ownership=ownership, fixup="chain")
    assert not plan.reproducible
    assert_right(plan, name, "never", target, gather(plan, run_ranks(_share, 3, plan, name, target)))


# ---- a rank's bad input, groups, and what is sent


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


@pytest.mark.gpu
@pytest.mark.parametrize("target", [target for target in SAME_BITS_TARGETS if target.id != "cpu-torch"])
def test_one_nccl_rank(target):
    name, gates = "varlen", "never"
    plan = plan_for(BATCHES[name], 1, dim_of(target))
    arguments = {"forget_below": 0.0, "check": True, "final_state": "all"}
    result = run_ranks(run_share, 1, plan, name, gates, target.dtype, target, arguments, backend="nccl")
    same(gather(plan, result), alone(name, gates, target))


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
