"""Fixups between CUDA tensors: over NCCL, one rank a GPU, also captured; over gloo, ranks that share one GPU."""

from __future__ import annotations

import pytest
import torch

from gdncp.collectives import agree, chain, compare_digest_once, share_final_states, state_fixup
from gdncp.plan import PrefillPlan
from tests.conftest import SAME_BITS_TARGETS
from tests.distributed.affine import HEADS, K_DIM, V_DIM, fold_for, make_plan, make_problem, rank_share, same_bits
from tests.distributed.ranks import run_ranks
from tests.distributed.test_fixup import MANY, STRATEGIES, TREE_TOL, fix_all
from tests.distributed.test_fold_span import SPAN, span_plan
from tests.distributed.test_same_bits import dim_of, gather, run_share, same
from tests.numeric import Target

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

GPUS = torch.cuda.device_count()


def test_ranks_that_share_a_gpu_have_the_bits_of_one_left_fold():
    run_ranks(fix_all, 4, 4, "cuda")


@pytest.mark.parametrize("world_size", sorted({1, GPUS}), ids="ranks{}".format)
def test_nccl_ranks_have_the_bits_of_one_left_fold(world_size):
    run_ranks(fix_all, world_size, world_size, "cuda", backend="nccl")


def _capture(rank: int, world_size: int) -> None:
    """Capture each fixup, replay it on other maps; the host never waits for the device."""
    assert agree(None, rank) == list(range(world_size))
    chain.MIN_BLOCK_BYTES = 1
    for strategy in STRATEGIES:
        plan = make_plan(MANY, world_size, "zigzag", strategy)
        compare_digest_once(plan)
        final = torch.zeros(len(plan.rank_plan(rank).final_sequences), HEADS, V_DIM, K_DIM, device="cuda")
        maps, entry_states, _ = rank_share(plan, rank, make_problem(plan, "cuda"))
        fold = fold_for("cuda")

        def work():
            stats = state_fixup(plan, rank, maps, entry_states, fold)  # noqa: B023  called before the next turn
            return stats, share_final_states(plan, rank, final)  # noqa: B023

        torch.cuda.set_sync_debug_mode("error")
        try:
            eager_stats, _ = work()
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                captured_stats, shared = work()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert captured_stats == eager_stats

        other_maps, other_entries, expected = rank_share(plan, rank, make_problem(plan, "cuda", seed=1))
        maps.transition.copy_(other_maps.transition)
        maps.local_state.copy_(other_maps.local_state)
        entry_states.copy_(other_entries)
        final.fill_(rank + 1.0)
        graph.replay()
        if strategy == "tree":
            assert (entry_states - expected).norm() <= TREE_TOL * expected.norm()
        else:
            assert same_bits(entry_states, expected)
        owners = torch.tensor([plan.final_state_owner(s) + 1.0 for s in range(plan.num_sequences)], device="cuda")
        assert torch.equal(shared, owners[:, None, None, None].expand_as(shared))


@pytest.mark.parametrize("world_size", sorted({1, GPUS}), ids="ranks{}".format)
def test_fixups_are_captured_in_cuda_graphs(world_size):
    run_ranks(_capture, world_size, world_size, backend="nccl")


def _by_whole_runs(rank: int, plans: list[PrefillPlan], target: Target) -> list[dict[str, torch.Tensor]]:
    """As with any fold, without a launch of single maps."""
    from gdncp_kernels.hopper.state_fixup import StateFold

    def refuse(*_: torch.Tensor) -> torch.Tensor:
        raise AssertionError("a map was folded by itself")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StateFold, "__call__", refuse)
        return [run_share(rank, plan, "varlen", "never", target.dtype, target, {}) for plan in plans]


@pytest.mark.parametrize("span", [1, SPAN])
@pytest.mark.parametrize("target", [target for target in SAME_BITS_TARGETS if "hopper" in target.id])
def test_the_hopper_set_folds_whole_runs_for_every_strategy_of_same_bits(target, span):
    plans = [
        span_plan("varlen", 3, ownership, dim_of(target), fold_span=span, fixup=fixup, finish=finish)
        for ownership in ("contiguous", "zigzag", "uneven")
        for fixup in ("chain", "all_gather", "head_sharded")
        for finish in ("entry_first", "entry_late")
    ]
    one = span_plan("varlen", 1, "contiguous", dim_of(target), fold_span=span)
    expected = gather(one, run_ranks(_by_whole_runs, 1, [one], target)[0])
    shares = run_ranks(_by_whole_runs, 3, plans, target)
    for plan, of_ranks in zip(plans, zip(*shares, strict=True), strict=True):
        same(gather(plan, of_ranks), expected)
