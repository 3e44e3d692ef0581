"""What `measure_links` found, beside what the cost model says of the same exchanges."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from gdncp.calibrate.fit import Measurement
from gdncp.plan import CostProfile
from gdncp.simulate.machine import Machine

NEAR = ("collective_s", "message_s", "bytes_per_s")
FAR = ("node_message_s", "node_bytes_per_s", "node_peer_s")


def with_nodes(base: CostProfile, world_size: int, local_world_size: int) -> CostProfile:
    """A profile whose nodes have as many ranks as these; within one node the base's stay, as none was seen to end."""
    return replace(base, ranks_per_node=local_world_size) if world_size > local_world_size else base


def costs_to_fit(world_size: int, local_world_size: int) -> tuple[str, ...]:
    """Of ranks in one node, or in several."""
    return NEAR + FAR if world_size > local_world_size else NEAR


def exchange_measurements(found: dict[str, Any]) -> list[Measurement]:
    """One a size and exchange: as captured in a CUDA graph where that was measured, else as called."""
    world_size = found["world_size"]
    result = []
    for name, kinds in found["exchanges"].items():
        kind = "captured" if "captured" in kinds else "eager"
        for row in kinds[kind]["rows"]:
            case = f"{row['bytes']:,} bytes, {world_size} ranks, {kind}"
            result.append(Measurement(name, case, row["seconds"], _prediction(name, row["bytes"], world_size)))
    return result


def _prediction(name: str, size: int, world_size: int) -> Callable[[CostProfile], float]:
    """Of an exchange into which each rank puts `size` bytes."""

    def seconds(profile: CostProfile) -> float:
        machine = Machine(profile, world_size)
        if name == "all_gather":
            return machine.all_gather_seconds(size)
        if name == "all_to_all":
            return machine.all_to_all_seconds([size // world_size] * world_size, [1] * world_size)
        if machine.one_node:  # a ring: in several nodes some rank's neighbour is in another, and all wait for it
            return profile.message_s + size / profile.bytes_per_s
        return profile.node_message_s + size / profile.node_bytes_per_s

    return seconds
