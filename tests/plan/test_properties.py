"""What every plan keeps, whatever the lengths, ownership and grid."""

from __future__ import annotations

from collections import defaultdict
from itertools import chain, groupby, pairwise
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from gdncp.plan import PrefillPlan, RankPlan, plan_prefill
from tests.plan.strategies import HEADS, batches, explicit_ownerships, plan_arguments, plans

quick = settings(deadline=None, max_examples=50)


def rank_plans(plan: PrefillPlan) -> list[RankPlan]:
    return [plan.rank_plan(rank) for rank in range(plan.world_size)]


def grid_of(plan: PrefillPlan) -> dict[str, int]:
    return {"cp_chunk_len": plan.cp_chunk_len, "first_cp_chunk_len": plan.first_cp_chunk_len}


def chunks_of(plan: PrefillPlan, sequence: int) -> list[Any]:
    return [chunk for chunk in plan.cp_chunks if chunk.sequence == sequence]


@quick
@given(plans)
def test_every_token_lies_on_one_rank_in_ascending_order(plan: PrefillPlan) -> None:
    held = []
    for rank in range(plan.world_size):
        ranges = plan.token_ranges(rank)
        # ascending, not empty, and adjacent ones merged
        assert all(start < stop for start, stop in ranges) and all(a[1] < b[0] for a, b in pairwise(ranges))
        assert plan.num_tokens(rank) == sum(stop - start for start, stop in ranges) == plan.rank_plan(rank).num_tokens
        held += [token for start, stop in ranges for token in range(start, stop)]
    assert sorted(held) == list(range(plan.num_tokens_total))


@quick
@given(plans)
def test_cp_chunks_partition_each_sequence_in_order(plan: PrefillPlan) -> None:
    assert [chunk.index for chunk in plan.cp_chunks] == list(range(plan.num_cp_chunks))
    assert [chunk.sequence for chunk in plan.cp_chunks] == sorted(chunk.sequence for chunk in plan.cp_chunks)
    for sequence, (start, stop) in enumerate(pairwise(plan.seq_starts)):
        chunks = chunks_of(plan, sequence)
        assert chunks[0].start == start and chunks[-1].stop == stop
        assert all(a.stop == b.start for a, b in pairwise(chunks))
        assert [chunk.ordinal for chunk in chunks] == list(range(len(chunks)))
        assert [chunk.is_last for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
        assert plan.final_state_owner(sequence) == chunks[-1].rank
        if start == stop:
            assert len(chunks) == 1  # which hands the initial state over
        else:
            assert all(0 < chunk.num_tokens <= max(plan.grid) for chunk in chunks)


@quick
@given(plans)
def test_cp_chunks_end_on_the_grid_or_where_ownership_cuts(plan: PrefillPlan) -> None:
    rank_of = {}
    for rank in range(plan.world_size):
        for start, stop in plan.token_ranges(rank):
            rank_of.update(dict.fromkeys(range(start, stop), rank))
    off_grid = False
    for sequence, (start, stop) in enumerate(pairwise(plan.seq_starts)):
        grid = {start, *range(start + plan.first_cp_chunk_len, stop, plan.cp_chunk_len), stop}
        cuts = {t for t in range(start + 1, stop) if rank_of[t - 1] != rank_of[t]}
        chunks = chunks_of(plan, sequence)
        assert {chunk.stop for chunk in chunks} == ((grid | cuts) - {start} or {stop})
        assert all(rank_of[t] == chunk.rank for chunk in chunks for t in range(chunk.start, chunk.stop))
        off_grid |= not cuts <= grid
    crosses = any(len({chunk.rank for chunk in chunks_of(plan, s)}) > 1 for s in range(plan.num_sequences))
    assert plan.crosses_ranks == crosses
    assert (plan.fixup == "local") == (not crosses)
    if crosses and plan.fixup_requested != "auto":
        assert plan.fixup == plan.fixup_requested
    assert plan.reproducible == (not off_grid and plan.fixup != "tree")
    if not off_grid:
        assert plan.off_grid_cuts == ()


@quick
@given(plans)
def test_an_empty_sequence_is_on_the_rank_of_the_next_token(plan: PrefillPlan) -> None:
    for sequence, length in enumerate(plan.seq_lens):
        if length == 0:
            following = [chunk for chunk in plan.cp_chunks if chunk.sequence > sequence and chunk.num_tokens]
            expected = following[0].rank if following else plan.world_size - 1
            assert [chunk.rank for chunk in chunks_of(plan, sequence)] == [expected]


@quick
@given(plans)
def test_items_lie_in_the_order_of_the_ranks_tokens(plan: PrefillPlan) -> None:
    assert sorted(chain.from_iterable(r.items for r in rank_plans(plan))) == list(plan.cp_chunks)
    for rank_plan in rank_plans(plan):
        offset = 0
        for item in rank_plan.items:
            assert (item.rank, item.offset) == (rank_plan.rank, offset)
            offset += item.num_tokens
        assert [i.index for i in rank_plan.items] == sorted(i.index for i in rank_plan.items)
        # rows by the ranges are rows by the items
        tokens = [t for start, stop in plan.token_ranges(rank_plan.rank) for t in range(start, stop)]
        assert tokens == [t for item in rank_plan.items for t in range(item.start, item.stop)]


@quick
@given(plans)
def test_segments_are_maximal_linked_and_in_order(plan: PrefillPlan) -> None:
    assert [segment.index for segment in plan.segments] == list(range(len(plan.segments)))
    expected = [
        (sequence, rank, [chunk.index for chunk in run])
        for (sequence, rank), run in groupby(plan.cp_chunks, key=lambda chunk: (chunk.sequence, chunk.rank))
    ]
    found = []
    for segment in plan.segments:
        items = plan.rank_plan(segment.rank).items[segment.first_item : segment.stop_item]
        found.append((segment.sequence, segment.rank, [item.index for item in items]))
        assert (segment.start, segment.stop) == (items[0].start, items[-1].stop)
        assert (segment.first_chunk, segment.first_ordinal) == (items[0].index, items[0].ordinal)
        assert segment.num_items == len(items) and segment.num_tokens == sum(item.num_tokens for item in items)
    assert found == expected

    of_sequence = defaultdict(list)
    for segment in plan.segments:
        of_sequence[segment.sequence].append(segment)
    for segments in of_sequence.values():
        indices = [segment.index for segment in segments]
        assert [segment.previous for segment in segments] == [None, *indices[:-1]]
        assert [segment.next for segment in segments] == [*indices[1:], None]
    for rank_plan in rank_plans(plan):
        assert rank_plan.segments == tuple(s for s in plan.segments if s.rank == rank_plan.rank)
        bounds = [(segment.first_item, segment.stop_item) for segment in rank_plan.segments]
        assert [i for start, stop in bounds for i in range(start, stop)] == list(range(len(rank_plan.items)))


@quick
@given(plans)
def test_maps_and_final_rows_number_what_passes_on_and_what_ends(plan: PrefillPlan) -> None:
    ends = []
    for rank_plan in rank_plans(plan):
        passing = [i for i, item in enumerate(rank_plan.items) if not item.is_last]
        ending = [i for i, item in enumerate(rank_plan.items) if item.is_last]
        assert rank_plan.num_maps == len(passing)
        assert [rank_plan.map_rows[i] for i in passing] == list(range(len(passing)))
        assert [rank_plan.final_rows[i] for i in ending] == list(range(len(ending)))
        assert all(rank_plan.map_rows[i] == -1 for i in ending) and all(rank_plan.final_rows[i] == -1 for i in passing)
        assert list(rank_plan.final_sequences) == [rank_plan.items[i].sequence for i in ending]
        ends += rank_plan.final_sequences
    assert sorted(ends) == list(range(plan.num_sequences))


@quick
@given(plans)
def test_checkpoint_rows_partition_all_rows_and_see_the_right_tokens(plan: PrefillPlan) -> None:
    positions = plan.checkpoint_positions
    if positions is None:
        every = plan.checkpoint_every_n_tokens
        positions = tuple(tuple(range(every, n + 1, every)) if every else () for n in plan.seq_lens)
    wanted = [(sequence, position) for sequence, own in enumerate(positions) for position in own]
    assert plan.num_checkpoints == len(wanted)
    assert [stop - start for start, stop in pairwise(plan.checkpoint_cu_starts)] == [len(own) for own in positions]

    written = []
    for rank_plan in rank_plans(plan):
        rows = plan.checkpoint_rows(rank_plan.rank)
        assert list(rows) == sorted(rows) and len(rows) == len(rank_plan.checkpoints)
        assert [c.row for c in rank_plan.checkpoints] == list(range(len(rows)))
        assert [c[:2] for c in rank_plan.checkpoints] == sorted(c[:2] for c in rank_plan.checkpoints)
        for checkpoint, row in zip(rank_plan.checkpoints, rows, strict=True):
            item = rank_plan.items[checkpoint.item]
            assert 1 <= checkpoint.tokens <= item.num_tokens
            position = item.start - plan.seq_starts[item.sequence] + checkpoint.tokens
            assert (item.sequence, position) == wanted[row]
        written += rows
    assert sorted(written) == list(range(len(wanted)))


@quick
@given(plan_arguments())
def test_lanes_divide_a_ranks_items_and_change_nothing_else(arguments: dict[str, Any]) -> None:
    plan = plan_prefill(**arguments)
    lanes = arguments["lanes_per_rank"]
    own = {"ownership": [plan.token_ranges(rank) for rank in range(plan.world_size)], "opens": plan.opens}
    single = plan_prefill(**{**arguments, "lanes_per_rank": 1, **grid_of(plan), **own})
    for rank_plan, unlaned in zip(rank_plans(plan), rank_plans(single), strict=True):
        assert len(rank_plan.lanes) == lanes
        assert list(chain.from_iterable(rank_plan.lanes)) == list(range(len(rank_plan.items)))
        assert all(rank_plan.items[i].lane == lane for lane, own in enumerate(rank_plan.lanes) for i in own)
        assert [item._replace(lane=0) for item in rank_plan.items] == list(unlaned.items)
        longest = max((item.num_tokens for item in rank_plan.items), default=0)
        share = rank_plan.num_tokens / lanes
        tokens = [sum(rank_plan.items[i].num_tokens for i in own) for own in rank_plan.lanes]
        assert all(abs(n - share) <= longest for n in tokens)


@quick
@given(batches, st.integers(1, 9), st.sampled_from([None, 64, 128, 320]), st.sampled_from([None, 64, 256]))
def test_contiguous_shares_are_runs_on_the_grid(
    seq_lens: list[int], world_size: int, length: int | None, first: int | None
) -> None:
    first = length and first
    plan = plan_prefill(
        seq_lens, world_size=world_size, cp_chunk_len=length, first_cp_chunk_len=first, fixup="chain", **HEADS
    )
    assert plan.reproducible
    reached = 0
    for rank in range(world_size):
        ranges = plan.token_ranges(rank)
        assert len(ranges) <= 1 and (not ranges or ranges[0][0] == reached)
        reached = ranges[0][1] if ranges else reached
    assert reached == plan.num_tokens_total


@quick
@given(batches, st.integers(1, 9), st.sampled_from([64, 128]), st.sampled_from([None, 64, 256]))
def test_zigzag_gives_a_rank_its_two_parts(
    seq_lens: list[int], world_size: int, length: int, first: int | None
) -> None:
    grid = {"cp_chunk_len": length, "first_cp_chunk_len": first}
    plan = plan_prefill(seq_lens, world_size=world_size, ownership="zigzag", fixup="chain", **grid, **HEADS)
    assert plan.reproducible
    parts = 2 * world_size
    for sequence, length in enumerate(seq_lens):
        if length:
            chunks = chunks_of(plan, sequence)
            count = len(chunks)
            for part in range(parts):
                for chunk in chunks[part * count // parts : (part + 1) * count // parts]:
                    assert chunk.rank == min(part, parts - 1 - part)


@quick
@given(st.data(), batches, st.integers(1, 5))
def test_explicit_ownership_is_kept(data: st.DataObject, seq_lens: list[int], world_size: int) -> None:
    ownership = data.draw(explicit_ownerships(sum(seq_lens), world_size))
    plan = plan_prefill(seq_lens, world_size=world_size, ownership=ownership, cp_chunk_len=64, **HEADS)
    for rank, own in enumerate(ownership):
        tokens = [t for start, stop in plan.token_ranges(rank) for t in range(start, stop)]
        assert tokens == sorted(t for start, stop in own for t in range(start, stop))


@quick
@given(plan_arguments(), plan_arguments())
def test_digest_is_equal_where_inputs_are(one: dict[str, Any], other: dict[str, Any]) -> None:
    plan, again, different = plan_prefill(**one), plan_prefill(**one), plan_prefill(**other)
    assert plan.digest == again.digest and plan == again and hash(plan) == hash(again)
    # what was resolved is what counts: asking for it by name changes nothing
    resolved = {**grid_of(plan), "fixup": "auto" if plan.fixup == "local" else plan.fixup}
    resolved |= {"opens": plan.opens, "fold_span": plan.fold_span, "finish": plan.finish}
    named = plan_prefill(**{**one, **resolved})
    # but for where contiguous ownership is cut: ranks share a grid that was asked for, whatever that costs
    assert (named.digest == plan.digest) == (list(named.runs) == list(plan.runs))
    assert named.digest == plan.digest or one["ownership"] == "contiguous"
    shapes = [(p.seq_lens, p.cp_chunks, p.fixup, p.num_checkpoints, p.lanes_per_rank) for p in (plan, different)]
    if shapes[0] != shapes[1]:
        assert plan.digest != different.digest and plan != different


@quick
@given(plans)
def test_predictions_cover_every_stage_and_rank(plan: PrefillPlan) -> None:
    assert list(plan.predicted) == ["precompute_t", "precompute_mn", "state_fixup", "cp_prefill"]
    for rank_plan in rank_plans(plan):
        t, mn, fixup, prefill = (plan.predicted[stage][rank_plan.rank] for stage in plan.predicted)
        assert (t > 0) == (prefill > 0) == (rank_plan.num_tokens > 0)
        assert (mn > 0) == (rank_plan.num_maps > 0)  # stage 2 is for what passes a state on
        crosses = any(s.previous is not None or s.next is not None for s in rank_plan.segments)
        if plan.finish == "entry_late":  # an exchange is part of stage 4
            assert (fixup > 0) == any(s.num_items > 1 for s in rank_plan.segments)
        else:
            assert (fixup > 0) == (crosses or rank_plan.num_maps > 0)
    assert set(plan.fixup_seconds) == ({"chain", "all_gather", "head_sharded", "tree"} if plan.crosses_ranks else set())
    assert plan.explain()
