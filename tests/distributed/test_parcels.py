"""Maps on their way through a flat buffer: packed, sent and unpacked, every map is where its sequence has it."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch

from gdncp.backends.base import AffineMaps
from gdncp.collectives import all_gather, head_sharded
from gdncp.collectives.parcels import Pieces, Shape, pack, pieces_on, shape_of, unpack
from gdncp.collectives.schedule import crossing_routes
from gdncp.plan import PrefillPlan
from tests.distributed.affine import make_plan, random_ranges, same_bits

CPU, WORLD, HEADS = torch.device("cpu"), 3, 5
SEQ_LENS = [64 * 9 + 1, 0, 64 * 4, 30, 64 * 12]
OWNERSHIPS: list[Any] = ["contiguous", "zigzag", random_ranges(SEQ_LENS, range(WORLD), WORLD, seed=1)]
# aligned; not; transitions larger than local states; local states that begin behind a gap
both_dims = pytest.mark.parametrize("k_dim, v_dim", [(16, 80), (16, 16), (12, 4), (6, 10), (3, 5)])


def _maps_of_ranks(plan: PrefillPlan, k_dim: int, v_dim: int) -> list[AffineMaps]:
    generator = torch.Generator().manual_seed(0)
    of_ranks = []
    for rank in range(WORLD):
        # one row more than the plan has
        maps = AffineMaps.empty(plan.rank_plan(rank).num_maps + 1, HEADS, k_dim, v_dim, CPU)
        maps.transition.copy_(torch.randn(maps.transition.shape, generator=generator))
        maps.local_state.copy_(torch.randn(maps.local_state.shape, generator=generator))
        of_ranks.append(maps)
    return of_ranks


def _packed(tables: Any, maps: AffineMaps, size: int) -> torch.Tensor:
    flat = torch.full((size,), torch.nan)
    pack(tables.packed, maps, flat)
    return flat


def _check(unpacked: AffineMaps, row: int, links: Any, of_ranks: list[AffineMaps], heads: slice) -> int:
    for link in links:
        for j in range(link.num_maps):
            maps = of_ranks[link.rank]
            assert torch.equal(unpacked.local_state[row], maps.local_state[link.row + j, heads])
            if not (link.starts and j == 0):
                assert torch.equal(unpacked.transition[row], maps.transition[link.row + j, heads])
            row += 1
    return row


@both_dims
@pytest.mark.parametrize("ownership", OWNERSHIPS, ids=["contiguous", "zigzag", "anywhere"])
def test_gathered_maps_precede_their_segments(ownership: Any, k_dim: int, v_dim: int) -> None:
    plan = make_plan(SEQ_LENS, WORLD, ownership, "all_gather")
    of_ranks = _maps_of_ranks(plan, k_dim, v_dim)
    tables = [all_gather.tables_on(plan, r, CPU, *shape_of(of_ranks[r].scratch.layout)) for r in range(WORLD)]
    gathered = torch.stack([_packed(t, m, t.size) for t, m in zip(tables, of_ranks, strict=True)])
    for rank, table in enumerate(tables):
        maps = unpack(table.unpacked, gathered, table.num_unpacked, Shape(HEADS, k_dim, v_dim))
        row = 0
        for route in crossing_routes(plan):
            last = max((link.depth for link in route if link.rank == rank), default=0)
            row = _check(maps, row, route[:last], of_ranks, slice(None))
        assert row == table.num_unpacked


@both_dims
@pytest.mark.parametrize("ownership", OWNERSHIPS, ids=["contiguous", "zigzag", "anywhere"])
def test_each_rank_gets_its_heads_of_all_maps_that_cross(ownership: Any, k_dim: int, v_dim: int) -> None:
    plan = make_plan(SEQ_LENS, WORLD, ownership, "head_sharded")
    of_ranks = _maps_of_ranks(plan, k_dim, v_dim)
    tables = [head_sharded.tables_on(plan, r, CPU, *shape_of(of_ranks[r].scratch.layout)) for r in range(WORLD)]
    sent = [_packed(t, m, sum(t.there.sent)).split(t.there.sent) for t, m in zip(tables, of_ranks, strict=True)]
    bounds = [0, *accumulate(table.share.num_heads for table in tables)]
    assert bounds[-1] == HEADS
    for rank, table in enumerate(tables):
        assert [t.there.sent[rank] for t in tables] == table.there.received
        assert [t.back.sent[rank] for t in tables] == table.back.received
        received = torch.cat([pieces[rank] for pieces in sent])
        maps = unpack(table.unpacked, received, table.num_unpacked, table.share)
        row = 0
        for route in crossing_routes(plan):
            row = _check(maps, row, route[:-1], of_ranks, slice(bounds[rank], bounds[rank + 1]))
        assert row == table.num_unpacked


def test_pieces_are_copied_in_the_largest_units_that_fit() -> None:
    source = torch.arange(60.0)
    pieces = pieces_on([(48, 12), (0, 24)], CPU)
    assert pieces.unit == 12 and pieces.rows.tolist() == [4, 0, 1]
    out = torch.zeros(40)
    pieces.gather(source, out)
    assert torch.equal(out, torch.cat([source[48:], source[:24], torch.zeros(4)]))
    back = torch.zeros(60)
    pieces.scatter(out, back)
    assert torch.equal(back, torch.where((source < 24) | (source >= 48), source, 0.0))
    pieces_on([], CPU).gather(source, out[:0])  # nothing


@pytest.mark.parametrize("unit", [12, 6, 7])
def test_copies_keep_every_bit(unit: int) -> None:
    """Of NaN with a payload, of infinities and of −0 too: they are moved, not read as numbers."""
    patterns = [0x7F800001, 0x7FC12345, 0x7F800000, -(1 << 31), 1, 0x7F7FFFFF, 0]
    source = torch.tensor(patterns, dtype=torch.int32).repeat(unit).view(torch.float32)
    pieces = Pieces(unit, torch.arange(7).flip(0))
    out, back = torch.empty_like(source), torch.empty_like(source)
    pieces.gather(source, out)
    assert same_bits(out, source.view(7, unit).flip(0).flatten())
    for deterministic in (False, True):
        torch.use_deterministic_algorithms(deterministic)
        try:
            pieces.scatter(out, back)
        finally:
            torch.use_deterministic_algorithms(False)
        assert same_bits(back, source)
