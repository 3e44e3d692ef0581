"""Fixup by one all-gather: every map that a later rank needs goes to all; each rank folds what precedes its segments.

Volume per rank grows with the world; one collective, and no rank waits for another's fold.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch

from gdncp.backends.base import AffineMaps, Fold
from gdncp.collectives.folding import Stretch, Stretches, fold_stretches, inside, stretches_on
from gdncp.collectives.parcels import Pieces, Shape, pack, packed, pieces_on, shape_of, unpack, unpacked
from gdncp.collectives.schedule import Parcel, arrivals, crossing_routes, links_to_fill, manifests, parcel_routes
from gdncp.collectives.wire import Wire
from gdncp.plan import PrefillPlan


def run(wire: Wire, plan: PrefillPlan, rank: int, maps: AffineMaps, entry_states: torch.Tensor, fold: Fold) -> None:
    shape, local_offset = shape_of(maps.scratch.layout)
    tables = tables_on(plan, rank, entry_states.device, shape, local_offset)
    outgoing = entry_states.new_empty(tables.size)
    pack(tables.packed, maps, outgoing)
    gathering = wire.all_gather(outgoing)
    fold_stretches(tables.starting, maps, entry_states, fold)  # meanwhile

    gathered = gathering.wait()
    if tables.num_unpacked:
        before = unpack(tables.unpacked, gathered, tables.num_unpacked, shape)
        fold_stretches(tables.before, before, entry_states, fold, exits=entry_states)
    fold_stretches(tables.arriving, maps, entry_states, fold)


class Tables(NamedTuple):
    """What a rank packs, unpacks and folds, by rows on its device."""

    size: int  # elements that each rank ships: as many as the one that has most
    packed: Pieces
    starting: Stretches  # inside its segments that start a sequence
    num_unpacked: int
    unpacked: Pieces  # the maps before its segments
    before: Stretches  # through those, to each segment's entry state
    arriving: Stretches  # inside its other segments


@lru_cache(256)  # plans are compared by their digest
def tables_on(plan: PrefillPlan, rank: int, device: torch.device, shape: Shape, local_offset: int) -> Tables:
    """Copied to the device once, without waiting for it."""
    size = max(map(shape.shipped, manifests(plan)))
    routes: list[Sequence[Parcel]] = []
    before: list[Stretch] = []
    for route, parcels in zip(crossing_routes(plan), parcel_routes(plan), strict=True):
        own = [link for link in route[1:] if link.rank == rank]
        if own:
            map_row = sum(parcel.link.num_maps for parcels in routes for parcel in parcels)
            preceding = list(accumulate((link.num_maps for link in route), initial=0))
            # from the sequence's start for each of them: side by side that takes as long as for the last one
            before += [Stretch(0, map_row, preceding[link.depth], 1, 0, link.item) for link in own]
            routes.append(parcels[: own[-1].depth])
    num_unpacked, pieces = unpacked(routes, manifests(plan), range(0, size * plan.world_size, size), shape)
    return Tables(
        size,
        pieces_on(packed(manifests(plan)[rank], (0, shape.num_heads), shape, local_offset), device),
        stretches_on(inside(link for link in links_to_fill(plan, rank) if link.starts), device),
        num_unpacked,
        pieces_on(pieces, device),
        stretches_on(before, device),
        stretches_on(inside(arrivals(plan)[rank]), device),
    )
