"""Fixup by one all-gather: every map that a later rank needs goes to all; each rank folds what precedes its segments.

Volume per rank grows with the world; one collective, and no rank waits for another's fold.
"""

from __future__ import annotations

import torch

from gdncp.backends.base import AffineMaps, Fold
from gdncp.collectives.folding import Run, fold_inside, fold_runs
from gdncp.collectives.parcels import MapViews, pack, parcel_steps
from gdncp.collectives.schedule import Manifest, arrivals, crossing_routes, links_to_fill, manifests, parcel_routes
from gdncp.collectives.wire import Wire
from gdncp.plan import PrefillPlan


def run(wire: Wire, plan: PrefillPlan, rank: int, maps: AffineMaps, entry_states: torch.Tensor, fold: Fold) -> None:
    num_heads, v_dim, k_dim = entry_states.shape[1:]

    def views(flat: torch.Tensor, manifest: Manifest) -> MapViews:
        split = manifest.num_transitions * num_heads * k_dim * k_dim
        stop = split + manifest.num_local_states * num_heads * v_dim * k_dim
        return MapViews(
            flat[:split].view(-1, num_heads, k_dim, k_dim), flat[split:stop].view(-1, num_heads, v_dim, k_dim)
        )

    # what a collective gathers has one size: that of the rank that ships most
    size = max(m.num_transitions * k_dim + m.num_local_states * v_dim for m in manifests(plan)) * num_heads * k_dim
    packed = entry_states.new_empty(size)
    pack(manifests(plan)[rank], maps, views(packed, manifests(plan)[rank]))
    gathering = wire.all_gather(packed)
    fold_inside((link for link in links_to_fill(plan, rank) if link.starts), maps, entry_states, fold)  # meanwhile

    gathered = gathering.wait()
    shipped = [views(gathered[source], manifest) for source, manifest in enumerate(manifests(plan))]
    runs = []
    for route, parcels in zip(crossing_routes(plan), parcel_routes(plan), strict=True):
        steps = []
        wanted = max((link.depth for link in route if link.rank == rank), default=0)
        for parcel, successor in zip(parcels[:wanted], route[1:], strict=False):
            out = entry_states[successor.item] if successor.rank == rank else None
            steps += parcel_steps(parcel, shipped[parcel.link.rank], out)
        if steps:
            runs.append(Run(None, steps))
    fold_runs(runs, fold)
    fold_inside(arrivals(plan)[rank], maps, entry_states, fold)
