"""How much of stage 4 can run beside the exchange, and whether `finish="entry_late"` gains by it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gdncp.plan.checks import CHUNK
from gdncp.plan.model import RankPlan
from gdncp.plan.stage_model import Kind, StageModel

if TYPE_CHECKING:
    from gdncp.plan.prefill_plan import PrefillPlan


def prefill_parts(model: StageModel, share: RankPlan, cp_chunk_len: int) -> tuple[float, float]:
    """Seconds of stage 4's launch beside the exchange and of the one behind it, 0 where there is none.

    A head is taken to forget where it does so within a whole CP chunk.
    """
    early: Counter[Kind] = Counter()  # pairs of CP chunk and head
    late: Counter[Kind] = Counter()
    forget = model.forgetting_heads(cp_chunk_len)
    for segment in share.segments:
        for i, item in enumerate(share.items[segment.first_item : segment.stop_item]):
            kind = Kind(-(-item.num_tokens // CHUNK), item.is_first, item.is_last)
            known = model.num_heads if segment.previous is None else forget if i else 0
            early[kind] += known
            late[kind] += model.num_heads - known
    return model.prefill_seconds(early), model.prefill_seconds(late)


def entry_late_gains(plan: PrefillPlan, gates: Sequence[Sequence[float] | None]) -> bool:
    """Whether the slowest rank is done earlier, on average over such half-lives; from sums over tokens, no schedule.

    Where one call uses the whole device nothing runs beside an exchange.
    """
    profile = plan.profile
    if not plan.crosses_ranks or profile.workers == 1:
        return False
    crossing = plan.fixup_seconds[plan.fixup]
    tokens: list[list[int]] = [[0, 0, 0] for _ in range(plan.world_size)]  # known to all heads, to some, to none
    for segment in plan.segments:
        of_rank, count = tokens[segment.rank], segment.num_tokens
        if segment.previous is not None:
            first = min(plan.cp_chunk_len, count)
            of_rank[1] += count - first
            of_rank[2] += first
        else:
            opened = profile.opens and (segment.next is not None or segment.num_items > 1)
            of_rank[0] += count - min(plan.first_cp_chunk_len, count) * opened
    gain = 0.0
    for half_lives in gates:
        model = StageModel(
            profile, plan.num_state_heads, plan.num_k_heads, plan.head_dim, half_lives, plan.forget_below
        )
        forget = model.forgetting_heads(plan.cp_chunk_len)
        second = model.scale * profile.tile_prefill_s / (CHUNK * profile.workers)  # of a token and head
        slowest_first = slowest_late = 0.0
        for known, follows, waits in tokens:
            before = second * (known * model.num_heads + follows * forget)
            behind = second * (follows * (model.num_heads - forget) + waits * model.num_heads)
            launches = profile.launch_s + profile.unit_s if before and behind else 0.0
            slowest_first = max(slowest_first, crossing + before + behind)
            slowest_late = max(slowest_late, max(crossing, before) + behind + launches)
        gain += slowest_first - slowest_late
    return gain > 0
