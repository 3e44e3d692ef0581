"""A rank that dies or never comes: the others end, and say where.  And that the harness itself reports failures."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from gdncp.collectives import agree, share_final_states, state_fixup
from tests.distributed.affine import HEADS, K_DIM, V_DIM, BlockFold, make_plan, make_problem, rank_share
from tests.distributed.ranks import RankPool, run_ranks

TIMEOUT = 2.0  # seconds, of the group that a rank stays away from


def _with_rank_1_dead(rank: int, stages: list[str]) -> list[str]:
    """Every stage in a group of its own, which rank 1 joins before it dies."""
    groups = [dist.new_group([0, 1, 2], timeout=timedelta(seconds=TIMEOUT)) for _ in stages]
    dist.barrier()
    if rank == 1:
        os._exit(7)
    return [_say(rank, stage, group) for stage, group in zip(stages, groups, strict=True)]


def _with_rank_1_late(rank: int, stages: list[str]) -> list[str]:
    groups = [dist.new_group([0, 1, 2], timeout=timedelta(seconds=TIMEOUT)) for _ in stages]
    dist.barrier()
    if rank == 1:
        time.sleep(TIMEOUT * 1.5 * len(stages))
        return []
    return [_say(rank, stage, group) for stage, group in zip(stages, groups, strict=True)]


def _say(rank: int, stage: str, group: dist.ProcessGroup) -> str:
    plan = make_plan([64 * 18], 3, fixup="chain" if stage in ("agree", "share") else stage)
    started = time.monotonic()
    try:
        if stage == "agree":
            agree(group, None)
        elif stage == "share":
            share_final_states(plan, rank, torch.zeros(1, HEADS, V_DIM, K_DIM), group)
        else:
            maps, entry_states, _ = rank_share(plan, rank, make_problem(plan))
            state_fixup(plan, rank, maps, entry_states, BlockFold(), group)
    except RuntimeError as error:
        assert error.__cause__ is not None
        assert time.monotonic() - started < TIMEOUT + 5.0
        return str(error)
    return "nothing"


EXPECTED = {
    "chain": "state_fixup by chain broke off on rank {} of 3",
    "all_gather": "state_fixup by all_gather broke off on rank {} of 3",
    "head_sharded": "state_fixup by head_sharded broke off on rank {} of 3",
    "tree": "state_fixup by tree broke off on rank {} of 3",
    "share": "sharing final states by all_gather broke off on rank {} of 3",
    "agree": "agreement between ranks broke off on rank {} of 3",
}


def test_peers_of_a_dead_rank_end_and_name_the_stage():
    pool = RankPool(3)
    outcomes = pool.outcomes(_with_rank_1_dead, list(EXPECTED))
    pool.close()
    assert outcomes[1].error == "rank 1 died with exit code 7"
    for rank in (0, 2):
        assert outcomes[rank].error is None
        for said, expected in zip(outcomes[rank].value, EXPECTED.values(), strict=True):
            assert said.startswith(expected.format(rank))


def test_peers_of_a_rank_that_never_comes_end_at_the_timeout():
    pool = RankPool(3)
    outcomes = pool.outcomes(_with_rank_1_late, ["chain", "head_sharded"])
    pool.close()
    for rank in (0, 2):
        assert outcomes[rank].error is None
        assert [said.split(":")[0] for said in outcomes[rank].value] == [
            EXPECTED[stage].format(rank) for stage in ("chain", "head_sharded")
        ]


def _fail_on_rank_1(rank: int) -> None:
    if rank == 1:
        raise ValueError("rank 1 is broken")
    dist.barrier()


def test_the_rank_that_failed_first_is_reported():
    with pytest.raises(AssertionError, match=r"rank 1 failed first(?s:.*)rank 1 is broken"):
        run_ranks(_fail_on_rank_1, 2)
