"""Schedules, without processes: that they deliver what is needed, and that no ownership can deadlock."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gdncp.collectives.chain import row_blocks
from gdncp.collectives.schedule import (
    all_routes,
    arrivals,
    chain_rounds,
    crossing_routes,
    head_range,
    manifests,
    own_links,
    tree_rounds,
)
from gdncp.plan import PrefillPlan
from tests.distributed.affine import CP_CHUNK_LEN, make_plan

Round = tuple[list[tuple[int, Any]], list[tuple[int, Any]]]  # (peer, message) sent, (peer, message) received


@st.composite
def plans(draw: st.DrawFn) -> PrefillPlan:
    """Any cuts on the grid, any owner for each piece: a sequence may visit a rank many times."""
    world_size = draw(st.integers(1, 6))
    seq_lens = [CP_CHUNK_LEN * n for n in draw(st.lists(st.integers(0, 12), min_size=1, max_size=5))]
    if draw(st.booleans()) or not sum(seq_lens):
        return make_plan(seq_lens, world_size, draw(st.sampled_from(["contiguous", "zigzag"])))
    total = sum(seq_lens)
    inner = draw(st.sets(st.integers(1, total - 1).map(lambda t: t // CP_CHUNK_LEN * CP_CHUNK_LEN), max_size=20))
    ranges: list[list[tuple[int, int]]] = [[] for _ in range(world_size)]
    for piece in pairwise(sorted({0, total, *inner})):
        ranges[draw(st.integers(0, world_size - 1))].append(piece)
    return make_plan(seq_lens, world_size, ranges)


def walk(ranks: Sequence[Sequence[Round]]) -> None:
    """Walk all ranks through their rounds where no message is buffered: a round ends once every message in it has met
    its other end, and messages between two ranks meet in the order in which both list them.  Fail if that gets stuck.
    """
    at = [0] * len(ranks)
    ends = {(rank, r): set() for rank, rounds in enumerate(ranks) for r in range(len(rounds))}
    while any(at[rank] < len(rounds) for rank, rounds in enumerate(ranks)):
        moved = False
        for source, rounds in enumerate(ranks):
            if at[source] == len(rounds):
                continue
            sends = rounds[at[source]][0]
            for target, message in sends:
                if at[target] < len(ranks[target]) and (source, message) in ranks[target][at[target]][1]:
                    ends[source, at[source]].add(("sent", target, message))
                    ends[target, at[target]].add(("received", source, message))
            for target in {target for target, _ in sends}:
                if at[target] < len(ranks[target]):
                    listed = [m for peer, m in ranks[target][at[target]][1] if peer == source]
                    assert listed == [m for peer, m in sends if peer == target], "two ranks list messages differently"
        for rank, rounds in enumerate(ranks):
            if at[rank] < len(rounds) and len(ends[rank, at[rank]]) == sum(map(len, rounds[at[rank]])):
                at[rank] += 1
                moved = True
        assert moved, f"stuck in rounds {at}"


@settings(max_examples=60, deadline=None)
@given(plan=plans(), num_blocks=st.integers(1, 4))
def test_a_chain_hands_every_state_on_without_a_circle_of_waiting_ranks(plan, num_blocks):
    ranks: list[list[Round]] = []
    for rank in range(plan.world_size):
        arrived = set()
        rounds: list[Round] = []
        for folds, receives in chain_rounds(plan, rank, num_blocks):
            for link, block in folds:
                assert link.rank == rank and (link.starts or (link, block) in arrived), "folded before it arrived"
            arrived |= set(receives)
            sends = [(link.next_rank, (link.sequence, link.depth, block)) for link, block in folds]
            lands = [(link.previous_rank, (link.sequence, link.depth - 1, block)) for link, block in receives]
            rounds.append((sends, lands))
        wanted = {(link, b) for link in own_links(plan, rank) if not link.starts for b in range(num_blocks)}
        assert arrived == wanted
        ranks.append(rounds)
    walk(ranks)


@settings(max_examples=60, deadline=None)
@given(plan=plans())
def test_a_tree_gives_every_link_all_that_precedes_it(plan):
    rounds = [tree_rounds(plan, rank) for rank in range(plan.world_size)]
    walk(
        [
            [
                (
                    [(t.target.rank, (t.source.sequence, t.source.depth)) for t in sends],
                    [(t.source.rank, (t.source.sequence, t.source.depth)) for t in receives],
                )
                for sends, receives in own
            ]
            for own in rounds
        ]
    )
    held = {link: (link.depth, link.depth + 1) for route in crossing_routes(plan) for link in route}  # links [from, to)
    for number, transfers in enumerate(zip(*rounds, strict=True)):
        before = held.copy()
        if number == 0:
            held = {}
        for transfer in (t for own in transfers for t in own.receives):
            start, stop = before[transfer.source]
            assert transfer.whole == (start > 0), (
                "what begins at the start is a state; anything else needs a transition"
            )
            if number == 0:
                held[transfer.target] = start, stop
            else:
                assert stop == before[transfer.target][0], "composed maps have to meet"
                held[transfer.target] = start, before[transfer.target][1]
    assert held == {link: (0, link.depth) for route in crossing_routes(plan) for link in route[1:]}
    longest = max((len(route) for route in crossing_routes(plan)), default=2)
    assert len(rounds[0]) == 1 + (longest - 2).bit_length()


@settings(max_examples=60, deadline=None)
@given(plan=plans())
def test_links_know_their_rows_and_manifests_list_each_map_once(plan):
    for rank in range(plan.world_size):
        share = plan.rank_plan(rank)
        for link in own_links(plan, rank):
            rows = [row for row in share.map_rows[link.item :][: link.num_maps]]
            assert rows == list(range(link.row, link.row + link.num_maps))
            assert {share.items[link.item + j].sequence for j in range(link.num_maps)} <= {link.sequence}
            assert share.items[link.item].is_first == link.starts
        manifest = manifests(plan)[rank]
        sizes = [(p.link.num_maps - p.link.starts, p.link.num_maps) for p in manifest.parcels]
        assert [p.transition for p in manifest.parcels] == list(accumulate((t for t, _ in sizes), initial=0))[:-1]
        assert [p.local_state for p in manifest.parcels] == list(accumulate((n for _, n in sizes), initial=0))[:-1]
        assert manifest[1:] == (sum(t for t, _ in sizes), sum(n for _, n in sizes))
    shipped = [parcel.link for manifest in manifests(plan) for parcel in manifest.parcels]
    assert sorted(shipped, key=repr) == sorted((k for r in crossing_routes(plan) for k in r[:-1]), key=repr)
    assert sum(map(len, arrivals(plan))) == sum(len(route) - 1 for route in all_routes(plan))


def test_straddling_sequences_do_not_wait_for_one_another():
    """Eight ranks, a sequence over each of the seven borders: every state moves in the first round."""
    length = 2 * CP_CHUNK_LEN
    plan = make_plan([length // 2, *[length] * 7, length // 2], 8)
    assert len(crossing_routes(plan)) == 7
    assert all(len(chain_rounds(plan, rank, 1)) == 1 for rank in range(8))


@pytest.mark.parametrize("world_size", [1, 3, 8])
@pytest.mark.parametrize("num_heads", [1, 5, 8, 32])
def test_heads_are_shared_out_once_and_evenly(num_heads, world_size):
    shares = [head_range(rank, world_size, num_heads) for rank in range(world_size)]
    assert [h for start, stop in shares for h in range(start, stop)] == list(range(num_heads))
    assert max(b - a for a, b in shares) - min(b - a for a, b in shares) <= 1


def test_blocks_cut_v_at_multiples_of_what_the_fold_folds():
    assert row_blocks(128, bytes_per_row=1, block_rows=32, min_block_bytes=1 << 20) == [slice(0, 128)]
    assert row_blocks(80, 512, 32, 1) == [slice(0, 32), slice(32, 64), slice(64, 80)]
    assert row_blocks(128, 32 * 128 * 4, 32, 1 << 20) == [slice(0, 64), slice(64, 128)]
