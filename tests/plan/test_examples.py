"""Plans worked out by hand, and the batches that field reports name."""

from __future__ import annotations

import ast
import time
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

import gdncp.plan
from gdncp.plan import CpChunk, PrefillPlan, RankCheckpoint, plan_prefill
from gdncp.plan.checks import LANES_BY
from gdncp.plan.cost import fixup_load
from tests.plan.strategies import HEADS


def shares(plan: PrefillPlan) -> list[tuple[tuple[int, int], ...]]:
    return [plan.token_ranges(rank) for rank in range(plan.world_size)]


def test_two_sequences_on_two_ranks() -> None:
    plan = plan_prefill(
        [300, 100], world_size=2, cp_chunk_len=128, checkpoint_every_n_tokens=64, fixup="chain", **HEADS
    )
    # half of 400 tokens is 200; the grid has 128 and 256, and 256 is nearer
    assert shares(plan) == [((0, 256),), ((256, 400),)]
    assert plan.cp_chunks == (
        CpChunk(0, 0, 0, 0, 128, rank=0, lane=0, offset=0, is_last=False),
        CpChunk(1, 0, 1, 128, 256, rank=0, lane=0, offset=128, is_last=False),
        CpChunk(2, 0, 2, 256, 300, rank=1, lane=0, offset=0, is_last=True),
        CpChunk(3, 1, 0, 300, 400, rank=1, lane=0, offset=44, is_last=True),
    )
    first, second = plan.rank_plan(0), plan.rank_plan(1)
    assert (first.map_rows, first.num_maps, first.final_rows) == ((0, 1), 2, (-1, -1))
    assert (second.map_rows, second.num_maps, second.final_rows) == ((-1, -1), 0, (0, 1))
    assert plan.checkpoint_cu_starts == (0, 4, 5)
    assert [plan.checkpoint_rows(rank) for rank in (0, 1)] == [(0, 1, 2, 3), (4,)]
    assert second.checkpoints == (RankCheckpoint(item=1, tokens=64, row=0),)
    assert [plan.final_state_owner(sequence) for sequence in (0, 1)] == [1, 1]
    assert (plan.crosses_ranks, plan.reproducible, plan.fixup) == (True, True, "chain")
    assert plan.fixup_bytes == (4 * 128 * 128 * 4, 0)  # one state of 4 heads


def test_a_cut_off_the_grid_ends_a_cp_chunk_and_the_next_runs_to_the_grid() -> None:
    ownership = [[(0, 100), (130, 200)], [(100, 130)]]
    plan = plan_prefill(
        [200], world_size=2, ownership=ownership, cp_chunk_len=64, checkpoint_positions=[[100, 101, 200]], **HEADS
    )
    assert [(c.start, c.stop, c.rank) for c in plan.cp_chunks] == [
        (0, 64, 0), (64, 100, 0), (100, 128, 1), (128, 130, 1), (130, 192, 0), (192, 200, 0)
    ]  # fmt: skip
    assert plan.off_grid_cuts == (100, 130) and not plan.reproducible
    # a checkpoint belongs to the CP chunk of its last token
    assert [c[:2] for c in plan.rank_plan(0).checkpoints] == [(1, 36), (3, 8)]
    assert [c[:2] for c in plan.rank_plan(1).checkpoints] == [(0, 1)]
    assert [plan.checkpoint_rows(rank) for rank in (0, 1)] == [(0, 2), (1,)]


def test_ownership_on_the_grid_of_the_chunk_length_alone_is_not_on_the_cp_chunk_grid() -> None:
    ownership = [[(0, 64)], [(64, 256)]]
    assert plan_prefill([256], world_size=2, ownership=ownership, cp_chunk_len=64, **HEADS).reproducible
    assert not plan_prefill([256], world_size=2, ownership=ownership, cp_chunk_len=128, **HEADS).reproducible
    chosen = plan_prefill([256], world_size=2, ownership=ownership, require_reproducible=True, **HEADS)
    assert (chosen.cp_chunk_len, chosen.reproducible) == (64, True)  # the only length with this cut on its grid


def test_first_cp_chunks_of_another_length() -> None:
    options = {"world_size": 2, "checkpoint_positions": [[192, 193, 300], [100]], "fixup": "chain", **HEADS}
    plan = plan_prefill([400, 100], cp_chunk_len=128, first_cp_chunk_len=192, **options)
    assert [(c.start, c.stop, c.rank) for c in plan.cp_chunks] == [
        (0, 192, 0), (192, 320, 1), (320, 400, 1), (400, 500, 1)
    ]  # fmt: skip
    assert [c[:2] for c in plan.rank_plan(0).checkpoints] == [(0, 192)]
    assert [c[:2] for c in plan.rank_plan(1).checkpoints] == [(0, 1), (0, 108), (2, 100)]
    assert plan.reproducible and "a sequence's first of 192" in plan.explain()
    shorter = plan_prefill([400, 100], cp_chunk_len=192, first_cp_chunk_len=64, **options)
    assert [(c.start, c.stop) for c in shorter.cp_chunks] == [(0, 64), (64, 256), (256, 400), (400, 464), (464, 500)]
    # on this grid, not on that of equal CP chunks
    cut = [[(0, 320)], [(320, 500)]]
    assert not plan_prefill([500], world_size=2, ownership=cut, cp_chunk_len=128, **HEADS).reproducible
    assert plan_prefill(
        [500], world_size=2, ownership=cut, cp_chunk_len=128, first_cp_chunk_len=192, **HEADS
    ).reproducible
    # equal lengths are the grid that they always were
    equal = plan_prefill([400, 100], cp_chunk_len=128, first_cp_chunk_len=128, **options)
    assert equal == plan_prefill([400, 100], cp_chunk_len=128, **options) != plan


def test_a_cut_between_sequences_is_on_every_grid() -> None:
    plan = plan_prefill([100, 50], world_size=2, ownership=[[(0, 100)], [(100, 150)]], cp_chunk_len=64, **HEADS)
    assert (plan.reproducible, plan.fixup, plan.crosses_ranks) == (True, "local", False)


def test_zigzag_of_eight_cp_chunks_on_two_ranks() -> None:
    plan = plan_prefill([512], world_size=2, ownership="zigzag", cp_chunk_len=64, **HEADS)
    assert [chunk.rank for chunk in plan.cp_chunks] == [0, 0, 1, 1, 1, 1, 0, 0]
    # parts 1 and 2 touch on rank 1: one segment
    assert [(s.rank, s.start, s.stop) for s in plan.segments] == [(0, 0, 128), (1, 128, 384), (0, 384, 512)]


@pytest.mark.parametrize("num_tokens, world_size", [(10, 3), (2, 3), (1, 8), (0, 2)])
def test_fewer_tokens_than_ranks(num_tokens: int, world_size: int) -> None:
    plan = plan_prefill([num_tokens], world_size=world_size, **HEADS)
    assert [chunk.num_tokens for chunk in plan.cp_chunks] == [num_tokens]  # never split within a chunk
    assert sum(map(len, (plan.rank_plan(rank).items for rank in range(world_size)))) == 1
    assert plan.fixup == "local"


def test_a_share_that_ends_halfway_between_grid_points_ends_at_the_lower_one() -> None:
    assert shares(plan_prefill([192], world_size=2, cp_chunk_len=64, **HEADS)) == [((0, 64),), ((64, 192),)]
    assert shares(plan_prefill([194], world_size=2, cp_chunk_len=64, **HEADS)) == [((0, 128),), ((128, 194),)]


def test_a_fixup_costs_more_the_more_sequences_cross() -> None:
    def plan(count: int) -> PrefillPlan:
        return plan_prefill([512] * count, world_size=2, ownership="zigzag", cp_chunk_len=64, fixup="chain", **HEADS)

    one, four = (fixup_load(plan(n).pieces, 2, 4, 64) for n in (1, 4))
    # rank 0 holds parts 0 and 3: it hands one state on in each sequence, rank 1 likewise
    assert (one.num_hops, one.states_per_rank, four.num_hops, four.states_per_rank) == (2, 1, 2, 4)
    assert (one.num_maps, four.num_maps, one.depth, four.depth) == (6, 24, 7, 7)
    assert plan(4).fixup_seconds["chain"] > plan(1).fixup_seconds["chain"]


def test_empty_sequences() -> None:
    plan = plan_prefill([0, 0, 64, 0, 64, 0], world_size=2, cp_chunk_len=64, **HEADS)
    assert [chunk.rank for chunk in plan.cp_chunks] == [0, 0, 0, 1, 1, 1]
    assert [plan.final_state_owner(i) for i in range(6)] == [0, 0, 0, 1, 1, 1]
    nothing = plan_prefill([0, 0, 0], world_size=4, **HEADS)
    assert [chunk.rank for chunk in nothing.cp_chunks] == [3, 3, 3]
    assert nothing.rank_plan(3).final_sequences == (0, 1, 2)


@pytest.mark.parametrize(
    "seq_lens", [[1238, 1199, 1240, 1216, 1187, 1203, 519], [16, 24, 0], [500, 700, 900], [1866], [1, 2, 3]]
)
def test_checkpoints_count_finished_blocks_alone(seq_lens: list[int]) -> None:
    plan = plan_prefill(seq_lens, world_size=3, checkpoint_every_n_tokens=128, **HEADS)
    assert plan.num_checkpoints == sum(n // 128 for n in seq_lens)
    assert sorted(r for rank in range(3) for r in plan.checkpoint_rows(rank)) == list(range(plan.num_checkpoints))


def test_a_tree_over_several_segments_gives_up_the_promise() -> None:
    crossing = plan_prefill([256], world_size=2, cp_chunk_len=64, fixup="tree", **HEADS)
    inside = plan_prefill([256], world_size=1, cp_chunk_len=64, fixup="tree", **HEADS)
    assert (crossing.fixup, crossing.reproducible) == ("tree", False)
    assert (inside.fixup, inside.reproducible) == ("local", True)


def test_a_plan_is_frozen_and_its_rank_plans_are_made_once() -> None:
    plan = plan_prefill([256], world_size=2, cp_chunk_len=64, **HEADS)
    with pytest.raises(FrozenInstanceError):
        plan.world_size = 3  # type: ignore[misc]
    assert plan.rank_plan(1) is plan.rank_plan(1)
    assert len(plan.digest) == 64 and len({plan, plan_prefill([256], world_size=2, cp_chunk_len=64, **HEADS)}) == 1


@pytest.mark.parametrize("rank", [-1, 2])
def test_ranks_and_sequences_outside_the_plan(rank: int) -> None:
    plan = plan_prefill([256], world_size=2, cp_chunk_len=64, **HEADS)
    for accessor in (plan.rank_plan, plan.token_ranges, plan.num_tokens, plan.checkpoint_rows, plan.final_state_owner):
        with pytest.raises(IndexError, match="is not in 0"):
            accessor(rank)


@pytest.mark.parametrize(
    "change",
    [
        {"world_size": 3},
        {"ownership": "zigzag"},
        {"ownership": [[(0, 192)], [(192, 600)]]},
        {"num_v_heads": 8},
        {"head_dim": 64},
        {"cp_chunk_len": 128},
        {"first_cp_chunk_len": 128},
        {"checkpoint_every_n_tokens": 64},
        {"checkpoint_positions": [[5]]},
        {"fixup": "all_gather"},
        {"finish": "entry_late"},
        {"fold_span": 2},
        {"lanes_per_rank": 2},
        {"lanes_per_rank": 2, "lanes_by": "heads"},
        {"head_half_lives": [8.0] * 4},
        {"forget_below": 0},
        {"opens": False},
        {"seq_lens": [601]},
    ],
    ids=lambda change: "-".join(change),
)
def test_digest_sees_every_argument(change: dict) -> None:
    base = {"seq_lens": [600], "world_size": 2, "cp_chunk_len": 64, "fixup": "chain", **HEADS}
    assert plan_prefill(**base).digest != plan_prefill(**{**base, **change}).digest


def test_lanes_of_one_group_of_heads_are_not_lanes_of_cp_chunks() -> None:
    layer = {"num_q_heads": 1, "num_k_heads": 1, "num_v_heads": 4}
    by = {word: plan_prefill([600], cp_chunk_len=64, lanes_per_rank=2, lanes_by=word, **layer) for word in LANES_BY}
    assert [len(plan.rank_plan(0).lanes) for plan in by.values()] == [2, 1]
    assert len({plan.digest for plan in by.values()}) == 2


def test_the_digest_is_the_same_in_every_process() -> None:
    # a literal: anything that depends on hash seeds, paths or platforms would show
    plan = plan_prefill([300, 100], world_size=2, cp_chunk_len=128, fixup="chain", **HEADS)
    assert plan.digest.startswith("a8facf4dd808")


def test_thousands_of_sequences_plan_quickly() -> None:
    seq_lens = [(7919 * i) % 4000 for i in range(4096)]

    def seconds(**options: object) -> float:
        start = time.process_time()
        plan = plan_prefill(seq_lens, world_size=64, **HEADS, **options)  # type: ignore[arg-type]
        plan.rank_plan(17)
        assert plan.digest
        return time.process_time() - start

    # 10 ms each on a quiet machine; the least of three, since others may be busy on this one
    assert min(seconds() for _ in range(3)) < 0.1
    assert min(seconds(cp_chunk_len=512, checkpoint_every_n_tokens=256) for _ in range(3)) < 0.1


def test_the_planner_needs_no_torch() -> None:
    for file in Path(gdncp.plan.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not [name for name in names if name.split(".")[0] == "torch"], file


def test_explain_says_what_a_person_asks() -> None:
    text = plan_prefill([4096, 100], world_size=4, cp_chunk_len=256, fixup="chain", **HEADS).explain()
    for fact in (
        "2 sequences, 4,196 tokens",
        "contiguous",
        "up to 256 tokens (as asked)",
        "chain, as asked",
        "3 places",
    ):
        assert fact in text
    assert "bits         reproducible" in text and "[0, 1024)" in text
    cut = plan_prefill(
        [256], world_size=2, ownership=[[(0, 100)], [(100, 256)]], cp_chunk_len=64, fixup="tree", **HEADS
    )
    reasons = "not reproducible: ownership cuts CP chunks at token 100; tree associates maps by rank"
    assert reasons in " ".join(cut.explain().split())
    many = plan_prefill([1 << 16], world_size=64, cp_chunk_len=256, **HEADS).explain()
    assert "(49 ranks left out)" in many
    assert all(line == line.rstrip() for line in (text + many).splitlines())


def test_cp_chunks_longer_than_any_int64_leave_sequences_whole() -> None:
    plan = plan_prefill([300, 100], cp_chunk_len=64 << 80, world_size=2, ownership="zigzag", **HEADS)
    assert plan.num_cp_chunks == 2 and plan.num_tokens_total == 400
