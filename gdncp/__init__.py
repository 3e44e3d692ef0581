"""Context-parallel prefill of Gated DeltaNet layers over GPUs, streams and CPU ranks."""

from gdncp.api import finish, fixup, prefill, summarise, warmup
from gdncp.flashinfer_api import chunk_gated_delta_rule
from gdncp.layout import release_captured
from gdncp.plan import PrefillPlan, plan_prefill
from gdncp.reference import decode_step, gated_delta_rule_reference
from gdncp.stages import EntryStates, PrefillResult, Summary

__version__ = "0.1.0"

__all__ = [
    "EntryStates",
    "PrefillPlan",
    "PrefillResult",
    "Summary",
    "chunk_gated_delta_rule",
    "decode_step",
    "finish",
    "fixup",
    "gated_delta_rule_reference",
    "plan_prefill",
    "prefill",
    "release_captured",
    "summarise",
    "warmup",
]
