"""A plan in words and tables, for a person."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gdncp.plan.prefill_plan import PrefillPlan


def explain(plan: PrefillPlan) -> str:
    return f"{plan.num_sequences} sequences, {plan.num_tokens_total} tokens, {plan.world_size} ranks"
