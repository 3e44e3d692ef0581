"""The planner: pure host code, no torch.  Ints in, frozen tables out."""

from gdncp.plan.model import CpChunk, RankCheckpoint, RankPlan, Segment, TokenRun
from gdncp.plan.planner import plan_prefill
from gdncp.plan.prefill_plan import PrefillPlan
from gdncp.plan.profiles import LINKS, PROFILES, CostProfile, Link, default_profile, find_profile

__all__ = [
    "LINKS",
    "PROFILES",
    "CostProfile",
    "CpChunk",
    "Link",
    "PrefillPlan",
    "RankCheckpoint",
    "RankPlan",
    "Segment",
    "TokenRun",
    "default_profile",
    "find_profile",
    "plan_prefill",
]
