"""`final_state="all"`: from each rank's final states to all of them on every rank, in one exchange."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import torch.distributed as dist

from gdncp.collectives.fixup import check_group
from gdncp.collectives.wire import Wire
from gdncp.plan import PrefillPlan


class _Stretch(NamedTuple):
    """Sequences that follow each other and end on one rank."""

    rank: int
    row: int  # the first one's row among the rank's final states
    sequence: int
    length: int


@lru_cache(256)
def _stretches(plan: PrefillPlan) -> tuple[_Stretch, ...]:
    rows = [0] * plan.world_size
    stretches: list[_Stretch] = []
    for sequence in range(plan.num_sequences):
        owner = plan.final_state_owner(sequence)
        if stretches and stretches[-1].rank == owner:
            stretches[-1] = stretches[-1]._replace(length=stretches[-1].length + 1)
        else:
            stretches.append(_Stretch(owner, rows[owner], sequence, 1))
        rows[owner] += 1
    return tuple(stretches)


def share_final_states(
    plan: PrefillPlan, rank: int, final_states: torch.Tensor, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Every sequence's final state on every rank, with the bits of its owner.  Every rank of the group calls it.

    Args:
        final_states: [rows, H, V, K], row i that of sequence `plan.rank_plan(rank).final_sequences[i]`; rows past those
            are not read.
        group: None: the default group; not needed at world size 1.

    Returns:
        [num_sequences, H, V, K]; at world size 1 a view of `final_states`.

    Raises:
        ValueError, RuntimeError: as `state_fixup`.
    """
    if plan.world_size == 1:
        return final_states[: plan.num_sequences]  # one rank ends all sequences, in their order
    check_group(plan, rank, group)
    stretches = _stretches(plan)
    counts = [sum(s.length for s in stretches if s.rank == r) for r in range(plan.world_size)]
    wire = Wire(group, final_states.device, "sharing final states by all_gather")
    shape = final_states.shape[1:]
    padded = final_states.new_empty(max(counts), *shape)
    padded[: counts[rank]].copy_(final_states[: counts[rank]])
    gathered = wire.all_gather(padded.flatten()).wait().view(plan.world_size, -1, *shape)
    shared = final_states.new_empty(plan.num_sequences, *shape)
    for source, row, sequence, length in stretches:
        shared[sequence : sequence + length].copy_(gathered[source, row : row + length])
    return shared
