"""What stage 4 takes beside the exchange (`finish="entry_late"`)."""

from __future__ import annotations

from collections import Counter

from gdncp.plan.checks import CHUNK
from gdncp.plan.model import RankPlan
from gdncp.plan.stage_model import Kind, StageModel


def prefill_beside(model: StageModel, share: RankPlan, cp_chunk_len: int, exchange: float) -> float:
    """Seconds of a rank's stage 4, of an exchange of so many seconds too; 0: the rank takes no part in it.

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
    return model.prefill_beside(early, late, exchange)
