"""Every fixup must give the entry states of one left fold: bit for bit, the tree within rounding."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gdncp.backends.base import Fold
from gdncp.collectives import FixupStats, chain, compose, fold_here, share_final_states, state_fixup
from gdncp.plan import PrefillPlan
from tests.distributed.affine import (
    CP_CHUNK_LEN,
    HEADS,
    K_DIM,
    V_DIM,
    BlockFold,
    Problem,
    RunsFold,
    fold_for,
    make_plan,
    make_problem,
    random_ranges,
    rank_share,
    same_bits,
)
from tests.distributed.ranks import run_ranks

STRATEGIES = ["chain", "all_gather", "head_sharded", "tree"]
WORLD_SIZES = [1, 2, 3, 4, 8]
# The tree composes maps, so it rounds elsewhere: some 20 products of 16-long fp32 dots, each off by a few 2**-24.
TREE_TOL = 1e-6

LONG = [64 * 29 + 5]  # three or more CP chunks on each of 8 ranks
MANY = [64 * 4, 0, 64 * 5 + 1, 3, 0, 64 * 24 + 63, 64, 130, 64 * 7, 0]  # empty, short, at the grid, beyond it


def _ownerships(seq_lens: list[int], world_size: int) -> list[Any]:
    some = range(0, world_size, 2)  # the other ranks hold nothing
    return [
        "contiguous",
        "zigzag",
        random_ranges(seq_lens, range(world_size), world_size, seed=1, grid=CP_CHUNK_LEN),
        random_ranges(seq_lens, range(world_size), world_size, seed=2),
        random_ranges(seq_lens, some, world_size, seed=3),
    ]


def _fix(
    rank: int,
    plan: PrefillPlan,
    group: dist.ProcessGroup | None = None,
    problem: Problem | None = None,
    fold: Fold | None = None,
) -> FixupStats:
    maps, entry_states, expected = rank_share(plan, rank, problem or make_problem(plan))
    given = maps.transition.clone(), maps.local_state.clone()
    fold = fold or fold_for(maps.transition.device.type)
    stats = state_fixup(plan, rank, maps, entry_states, fold, group)
    if plan.fixup == "tree":
        error = (entry_states - expected).norm() / expected.norm().clamp(min=1e-30)
        assert error <= TREE_TOL or entry_states.numel() == 0, f"off by {error}"
        first = [i for i, item in enumerate(plan.rank_plan(rank).items) if item.is_first]
        assert same_bits(entry_states[first], expected[first])
    else:
        assert same_bits(entry_states, expected)
    assert same_bits(maps.transition, given[0]) and same_bits(maps.local_state, given[1]), "maps are read only"
    return stats


def fix_all(rank: int, world_size: int, device: str = "cpu") -> None:
    for seq_lens in (LONG, MANY, [1, 0]):
        for ownership in _ownerships(seq_lens, world_size):
            problem = make_problem(make_plan(seq_lens, world_size, ownership), device)
            for strategy in STRATEGIES:
                for min_block_bytes in (1, 1 << 20) if strategy == "chain" else (1,):  # three blocks, and one
                    try:
                        with pytest.MonkeyPatch.context() as patch:  # these processes serve other tests too
                            patch.setattr(chain, "MIN_BLOCK_BYTES", min_block_bytes)
                            _fix(rank, make_plan(seq_lens, world_size, ownership, strategy), problem=problem)
                    except Exception as error:
                        raise AssertionError(f"{strategy}, {seq_lens}, {ownership}") from error
            if device == "cpu":
                for strategy in STRATEGIES[:3]:
                    _fix_by_runs(rank, make_plan(seq_lens, world_size, ownership, strategy), problem)


def _fix_by_runs(rank: int, plan: PrefillPlan, problem: Problem) -> None:
    """With a fold that takes whole runs: the same bits, in so many launches whatever there is to fold."""
    fold = RunsFold()
    stats = _fix(rank, plan, problem=problem, fold=fold)
    assert fold.single_launches == 0
    if plan.fixup == "chain":  # states travel whole
        handed_on = [s for s in plan.segments if s.rank == rank and s.next is not None]
        assert stats.messages_sent == sum(plan.segments[s.next].rank != rank for s in handed_on)
    else:
        # while maps are under way, through what came, and from the entry states inside segments
        assert fold.run_launches <= (3 if plan.crosses_ranks else 1)


@pytest.mark.parametrize("world_size", WORLD_SIZES, ids="ranks{}".format)
def test_entry_states_have_the_bits_of_one_left_fold(world_size):
    run_ranks(fix_all, world_size, world_size)


def _stats(rank: int, plan: PrefillPlan) -> FixupStats:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chain, "MIN_BLOCK_BYTES", 1)
        return _fix(rank, plan)


STATE_BYTES = HEADS * V_DIM * K_DIM * 4
TRANSITION_BYTES = HEADS * K_DIM * K_DIM * 4


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ranks_send_what_their_strategy_says_and_no_more(strategy):
    """One sequence, four CP chunks on each of ranks 0, 1 and 3; rank 2 holds nothing and has nothing to say."""
    chunk = CP_CHUNK_LEN
    ranges = [[(0, 4 * chunk)], [(4 * chunk, 8 * chunk)], [], [(8 * chunk, 12 * chunk)]]
    stats = run_ranks(_stats, 4, make_plan([12 * chunk], 4, ranges, strategy))

    assert {s.strategy for s in stats} == {strategy}
    assert sum(s.bytes_sent for s in stats) == sum(s.bytes_received for s in stats)
    assert sum(s.messages_sent for s in stats) == sum(s.messages_received for s in stats)
    sent = [s.bytes_sent for s in stats]
    four, four_but_first = 4 * (STATE_BYTES + TRANSITION_BYTES), 4 * STATE_BYTES + 3 * TRANSITION_BYTES
    if strategy == "chain":
        assert sent == [STATE_BYTES, STATE_BYTES, 0, 0]
        assert [s.messages_sent for s in stats] == [3, 3, 0, 0]  # blocks of 32 rows of 80
    elif strategy == "all_gather":
        assert sent == [3 * four] * 4  # as much as the rank that ships most
    elif strategy == "head_sharded":
        heads = [1, 1, 1, 2]  # of 5: each ships the others' maps, and answers to ranks 1 and 3
        maps = [four_but_first, four, 0, 0]
        answers = [2, 1, 2, 1]
        share = [m * (HEADS - h) // HEADS for m, h in zip(maps, heads, strict=True)]
        back = [a * h * STATE_BYTES // HEADS for a, h in zip(answers, heads, strict=True)]
        assert sent == [a + b for a, b in zip(share, back, strict=True)]
    else:
        # rank 0's exit state to rank 1, which sends its map on and, a stride of one later, its entry state
        assert sent == [STATE_BYTES, TRANSITION_BYTES + 2 * STATE_BYTES, 0, 0]


def _refuse(*args: Any, **kwargs: Any) -> None:
    raise AssertionError("a collective was called")


COLLECTIVES = ["all_gather_into_tensor", "all_gather_single", "all_to_all_single", "batch_isend_irecv", "all_reduce"]


def _fix_without_collectives(rank: int, plan: PrefillPlan) -> FixupStats:
    patch = pytest.MonkeyPatch()
    with patch.context() as patched:
        for name in COLLECTIVES:
            patched.setattr(dist, name, _refuse, raising=False)
        return _fix(rank, plan)


def test_nothing_is_sent_where_no_sequence_crosses_ranks():
    ranges = [[(0, 300)], [(300, 1000)]]
    assert (
        run_ranks(_fix_without_collectives, 2, make_plan([300, 700], 2, ranges, "chain")) == [FixupStats("local")] * 2
    )
    with pytest.raises(AssertionError, match="a collective was called"):
        run_ranks(_fix_without_collectives, 2, make_plan([1000], 2, ranges, "chain"))


def _fix_in_subgroups(rank: int) -> int:
    groups = [dist.new_group([1, 3]), dist.new_group([0, 2])]
    if "sort_ranks" in inspect.signature(dist.new_group).parameters:
        groups[1] = dist.new_group([2, 0], sort_ranks=False)  # its rank 0 is global rank 2
    group = groups[rank % 2 == 0]
    own = dist.get_rank(group)
    for strategy in STRATEGIES:
        plan = make_plan(MANY, 2, "zigzag", strategy)
        _fix(own, plan, group)
        _share(own, plan, group)
    return own


def test_subgroups_use_their_own_ranks():
    own = run_ranks(_fix_in_subgroups, 4)
    assert own[1::2] == [0, 1]
    assert sorted(own[::2]) == [0, 1]


def _share(rank: int, plan: PrefillPlan, group: dist.ProcessGroup | None = None) -> None:
    everything = torch.randn(plan.num_sequences, HEADS, V_DIM, K_DIM, generator=torch.Generator().manual_seed(7))
    own = everything[list(plan.rank_plan(rank).final_sequences)]
    spare = torch.full((1, HEADS, V_DIM, K_DIM), float("nan"))  # stage 4's dump row
    assert same_bits(share_final_states(plan, rank, torch.cat([own, spare]), group), everything)


def _share_all(rank: int, world_size: int) -> None:
    for seq_lens in (LONG, MANY, [0, 0]):
        ownerships = _ownerships(seq_lens, world_size) if sum(seq_lens) else ["contiguous", "zigzag"]
        for ownership in ownerships:
            _share(rank, make_plan(seq_lens, world_size, ownership))


@pytest.mark.parametrize("world_size", [1, 3, 4], ids="ranks{}".format)
def test_final_states_reach_every_rank_with_their_bits(world_size):
    run_ranks(_share_all, world_size, world_size)


def test_a_plan_of_one_rank_needs_no_group():
    plan = make_plan(MANY, 1)
    assert _fix(0, plan) == FixupStats("local")
    _share(0, plan)
    _fix(0, make_plan([64 * (n % 5) for n in range(90)], 1))  # more sequences than are folded at once


def _fix_in_wrong_group(rank: int) -> list[str]:
    complaints = []
    for world_size, own in ((3, rank), (2, 1 - rank)):
        plan = make_plan(LONG, world_size, fixup="chain")
        maps, entry_states, _ = rank_share(plan, own, make_problem(plan))
        with pytest.raises(ValueError) as caught:
            state_fixup(plan, own, maps, entry_states, BlockFold())
        complaints.append(str(caught.value))
    return complaints


def test_a_group_that_the_plan_was_not_made_for_is_refused():
    assert run_ranks(_fix_in_wrong_group, 2)[0] == [
        "group has 2 ranks; the plan was made for world_size=3",
        "rank is 1; this process is rank 0 of the group",
    ]


def test_a_crossing_plan_without_a_process_group_is_refused():
    plan = make_plan(LONG, 2, fixup="chain")
    maps, entry_states, _ = rank_share(plan, 0, make_problem(plan))
    with pytest.raises(ValueError, match="group is None and there is no default process group"):
        state_fixup(plan, 0, maps, entry_states, BlockFold())


def _fix_spans(rank: int, plans: list[PrefillPlan]) -> None:
    for plan in plans:
        states = []
        for fold in (BlockFold(), RunsFold()):
            maps, entry_states, _ = rank_share(plan, rank, make_problem(plan))
            spare = torch.full_like(entry_states, torch.nan)  # more than enough for what `fold_here` stands zeros for
            entry_states = torch.cat([entry_states, spare])
            composed = compose(plan, rank, maps, fold)
            state_fixup(plan, rank, maps, entry_states, fold, None, composed)
            if plan.finish == "entry_late":
                for segment in plan.rank_plan(rank).segments:  # what `fold_here` fills, maybe meanwhile, is left to it
                    inside = entry_states[segment.first_item + 1 : segment.stop_item]
                    assert segment.previous is not None or inside.isnan().all()
                fold_here(plan, rank, maps, entry_states, fold, composed)
            states.append(entry_states)
            if isinstance(fold, RunsFold):
                assert fold.single_launches == 0
                # maps of spans; along them; inside; and without the exchange
                assert fold.run_launches <= 1 + (3 if plan.fixup != "chain" else 2 * WORLD_SIZES[-1]) + 1 + 2
        assert same_bits(*states)


@pytest.mark.parametrize("world_size", [2, 3], ids="ranks{}".format)
def test_spans_are_folded_in_whole_runs(world_size):
    off_the_grid = random_ranges(MANY, range(world_size), world_size, seed=1, grid=CP_CHUNK_LEN)
    plans = [
        make_plan(MANY, world_size, ownership, strategy, fold_span=3, finish=finish)
        for ownership in ("contiguous", "zigzag", off_the_grid)
        for strategy in STRATEGIES[:3]
        for finish in ("entry_first", "entry_late")
    ]
    assert all(plan.fold_span == 3 for plan in plans)
    run_ranks(_fix_spans, world_size, plans)
