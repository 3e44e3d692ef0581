"""Maps in transit, for the strategies that ship them."""

from __future__ import annotations

from typing import NamedTuple

import torch

from gdncp.backends.base import AffineMaps
from gdncp.collectives.folding import Step, link_steps
from gdncp.collectives.schedule import Manifest, Parcel


class MapViews(NamedTuple):
    """One rank's shipped maps inside a flat buffer, of all heads or of some."""

    transitions: torch.Tensor  # [num_transitions, H', K, K]
    local_states: torch.Tensor  # [num_local_states, H', V, K]


def pack(manifest: Manifest, maps: AffineMaps, into: MapViews) -> None:
    """Copy what the manifest lists; `into` holds all heads."""
    for link, transition, local_state in manifest.parcels:
        stop = link.row + link.num_maps
        with_transition = link.num_maps - link.starts
        if with_transition:
            into.transitions[transition : transition + with_transition].copy_(
                maps.transition[stop - with_transition : stop]
            )
        into.local_states[local_state : local_state + link.num_maps].copy_(maps.local_state[link.row : stop])


def parcel_steps(parcel: Parcel, shipped: MapViews, exit_out: torch.Tensor | None) -> list[Step]:
    """A parcel's maps as steps; `exit_out` takes the state after its last one, the next link's entry state."""
    outs = [*[None] * (parcel.link.num_maps - 1), exit_out]
    return link_steps(
        parcel.link, shipped.transitions, parcel.transition, shipped.local_states, parcel.local_state, outs
    )
