"""Fixup by two all-to-alls: each rank gets all maps of its share of the heads, folds them from the start of every
crossing sequence, and sends each segment's entry state back.

Volume per rank does not grow with the world.  Shares are uneven where the heads do not divide; a rank may have none.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch

from gdncp.backends.base import AffineMaps, Fold
from gdncp.collectives.folding import Stretch, Stretches, fold_stretches, inside, stretches_on
from gdncp.collectives.parcels import Pieces, Shape, pack, packed, pieces_on, shape_of, unpack, unpacked
from gdncp.collectives.schedule import (
    arrivals,
    crossing_routes,
    head_range,
    links_to_fill,
    manifests,
    parcel_routes,
)
from gdncp.collectives.wire import Wire
from gdncp.plan import PrefillPlan


def run(wire: Wire, plan: PrefillPlan, rank: int, maps: AffineMaps, entry_states: torch.Tensor, fold: Fold) -> None:
    shape, local_offset = shape_of(maps.scratch.layout)
    tables = tables_on(plan, rank, entry_states.device, shape, local_offset)
    outgoing = entry_states.new_empty(sum(tables.there.sent))
    pack(tables.packed, maps, outgoing)
    exchange = wire.all_to_all(outgoing, *tables.there)
    fold_stretches(tables.starting, maps, entry_states, fold)  # meanwhile

    received = exchange.wait()
    answer = entry_states.new_empty(sum(tables.back.sent))
    share = tables.share
    if share.num_heads:
        crossing = unpack(tables.unpacked, received, tables.num_unpacked, share)
        states = entry_states.new_empty(tables.num_unpacked + 1, share.num_heads, share.v_dim, share.k_dim)
        fold_stretches(tables.crossing, crossing, states, fold)
        tables.answered.gather(states, answer)

    tables.entries.scatter(wire.all_to_all(answer, *tables.back).wait(), entry_states)
    fold_stretches(tables.arriving, maps, entry_states, fold)


class Splits(NamedTuple):
    """Elements of an all-to-all, per rank."""

    sent: list[int]
    received: list[int]


class Tables(NamedTuple):
    """What a rank packs, sends, unpacks and folds, by rows on its device."""

    share: Shape  # the heads that it folds
    there: Splits
    packed: Pieces
    starting: Stretches  # inside its segments that start a sequence
    num_unpacked: int
    unpacked: Pieces  # the maps of all crossing sequences
    crossing: Stretches  # through those, to the state after each of them
    answered: Pieces  # of those states: per rank, the entry states of its segments
    back: Splits
    entries: Pieces  # of this rank's entry states: what comes back, per rank the heads of its share
    arriving: Stretches  # inside its segments that do not start a sequence


@lru_cache(256)  # plans are compared by their digest
def tables_on(plan: PrefillPlan, rank: int, device: torch.device, shape: Shape, local_offset: int) -> Tables:
    """Copied to the device once, without waiting for it."""
    world, shipped = range(plan.world_size), manifests(plan)
    heads = [head_range(r, plan.world_size, shape.num_heads) for r in world]
    shares = [shape._replace(num_heads=stop - start) for start, stop in heads]
    share, own = shares[rank], arrivals(plan)[rank]
    there = Splits([s.shipped(shipped[rank]) for s in shares], [share.shipped(manifest) for manifest in shipped])
    begins = [0, *accumulate(there.received)]
    num_unpacked, pieces = unpacked(parcel_routes(plan), shipped, begins, share)

    crossing, after, row = [], {}, 0  # after: by link, the row of the state that enters it
    for route in crossing_routes(plan):
        preceding = list(accumulate((link.num_maps for link in route[:-1]), initial=0))
        crossing.append(Stretch(row, row, preceding[-1], 1, preceding[-1]))
        after.update({link: row + preceding[link.depth] for link in route[1:]})
        row += preceding[-1]

    size = share.num_heads * share.local_state
    answered = [(after[link] * size, size) for links in arrivals(plan) for link in links]
    entries = [
        ((link.item * shape.num_heads + start) * shape.local_state, (stop - start) * shape.local_state)
        for start, stop in heads
        for link in own
    ]
    return Tables(
        share,
        there,
        pieces_on([piece for of in heads for piece in packed(shipped[rank], of, shape, local_offset)], device),
        stretches_on(inside(link for link in links_to_fill(plan, rank) if link.starts), device),
        num_unpacked,
        pieces_on(pieces, device),
        stretches_on(crossing, device),
        pieces_on(answered, device),
        Splits(
            [len(arrivals(plan)[r]) * size for r in world], [len(own) * s.num_heads * s.local_state for s in shares]
        ),
        pieces_on(entries, device),
        stretches_on(inside(own), device),
    )
