"""The planner: pure host code, no torch.  Ints in, frozen tables out."""

from gdncp.plan.model import CpChunk, RankCheckpoint, RankPlan, Segment, TokenRun
from gdncp.plan.planner import plan_prefill
from gdncp.plan.prefill_plan import PrefillPlan
from gdncp.plan.profiles import PROFILES, CostProfile

__all__ = [
    "PROFILES",
    "CostProfile",
    "CpChunk",
    "PrefillPlan",
    "RankCheckpoint",
    "RankPlan",
    "Segment",
    "TokenRun",
    "plan_prefill",
]
