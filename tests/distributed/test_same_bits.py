"""Same bits for any world size, ownership on the grid, number of lanes and order-preserving fixup; and right ones.

Real processes; the reference is one process, one lane, and the float64 oracle once.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import Any

import pytest
import torch

import gdncp
from tests.conftest import SAME_BITS_TARGETS
from tests.distributed.ranks import run_ranks
from tests.numeric import Target, assert_output, assert_within, random_state, random_tokens, tolerance_of

HEADS, DIM, LENGTH, EVERY = (1, 1, 2), 32, 64, 128
BATCHES = {
    "one long": [24 * LENGTH + 13],  # three CP chunks a rank on 8 ranks
    "varlen": [9 * LENGTH, 0, 5 * LENGTH + 1, 3, 11 * LENGTH + 40, 0],
}
SHORT = [6 * LENGTH + 9]  # under any other name: for kernels that are interpreted


def dim_of(target: Target) -> int:
    """Small, as many processes share few cores, but for a set that takes few head dims."""
    return target.dim if target.backend == "hopper" else DIM


@lru_cache(maxsize=8)
def batch(
    name: str, gates: str, dtype: torch.dtype, dim: int = DIM
) -> tuple[list[int], dict[str, torch.Tensor], torch.Tensor]:
    seq_lens = BATCHES.get(name, SHORT)
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
    device, backend, _ = target
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


@pytest.mark.gpu
@pytest.mark.parametrize("target", [target for target in SAME_BITS_TARGETS if target.id != "cpu-torch"])
def test_one_nccl_rank(target):
    name, gates = "varlen", "never"
    plan = plan_for(BATCHES[name], 1, dim_of(target))
    arguments = {"forget_below": 0.0, "check": True, "final_state": "all"}
    result = run_ranks(run_share, 1, plan, name, gates, target.dtype, target, arguments, backend="nccl")
    same(gather(plan, result), alone(name, gates, target))
