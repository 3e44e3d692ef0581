"""Fixup by two all-to-alls: each rank gets all maps of its share of the heads, folds them from the start of every
crossing sequence, and sends each segment's entry state back.

Volume per rank does not grow with the world.  Shares are uneven where the heads do not divide; a rank may have none.
"""

from __future__ import annotations

import torch

from gdncp.backends.base import AffineMaps, Fold
from gdncp.collectives.folding import Run, fold_inside, fold_runs
from gdncp.collectives.parcels import MapViews, pack, parcel_steps
from gdncp.collectives.schedule import (
    Manifest,
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
    num_heads, v_dim, k_dim = entry_states.shape[1:]
    world = range(plan.world_size)
    shares = [head_range(r, plan.world_size, num_heads) for r in world]
    heads = [stop - start for start, stop in shares]
    own_heads = heads[rank]

    def per_head(manifest: Manifest) -> int:
        return (manifest.num_transitions * k_dim + manifest.num_local_states * v_dim) * k_dim

    def views(flat: torch.Tensor, manifest: Manifest, heads: int) -> MapViews:
        # heads outermost, so that a share of the heads is one piece of the buffer
        by_head = flat.view(heads, per_head(manifest))
        transitions, local_states = by_head.split(
            [manifest.num_transitions * k_dim * k_dim, manifest.num_local_states * v_dim * k_dim], dim=1
        )
        return MapViews(
            transitions.unflatten(1, (manifest.num_transitions, k_dim, k_dim)).transpose(0, 1),
            local_states.unflatten(1, (manifest.num_local_states, v_dim, k_dim)).transpose(0, 1),
        )

    own = manifests(plan)[rank]
    packed = entry_states.new_empty(num_heads * per_head(own))
    pack(own, maps, views(packed, own, num_heads))
    out_splits = [own_heads * per_head(manifest) for manifest in manifests(plan)]
    exchange = wire.all_to_all(packed, [h * per_head(own) for h in heads], out_splits)
    fold_inside((link for link in links_to_fill(plan, rank) if link.starts), maps, entry_states, fold)  # meanwhile

    received = exchange.wait().split(out_splits)
    # what goes back: per rank, the entry states of its links for this rank's heads, heads outermost
    counts = [len(arrivals(plan)[r]) for r in world]
    answer_splits = [own_heads * count * v_dim * k_dim for count in counts]
    answer = entry_states.new_empty(sum(answer_splits))
    if own_heads:
        shipped = [views(received[r], manifests(plan)[r], own_heads) for r in world]
        answers = [flat.view(own_heads, -1, v_dim, k_dim) for flat in answer.split(answer_splits)]
        place = {link: answers[r][:, j] for r in world for j, link in enumerate(arrivals(plan)[r])}
        runs = []
        for route, parcels in zip(crossing_routes(plan), parcel_routes(plan), strict=True):
            steps = []
            for parcel, successor in zip(parcels, route[1:], strict=True):
                steps += parcel_steps(parcel, shipped[parcel.link.rank], place[successor])
            runs.append(Run(None, steps))
        fold_runs(runs, fold)

    entries = wire.all_to_all(answer, answer_splits, [h * counts[rank] * v_dim * k_dim for h in heads]).wait()
    entries = entries.view(num_heads, counts[rank], v_dim, k_dim)
    for j, link in enumerate(arrivals(plan)[rank]):
        entry_states[link.item].copy_(entries[:, j])
    fold_inside(arrivals(plan)[rank], maps, entry_states, fold)
