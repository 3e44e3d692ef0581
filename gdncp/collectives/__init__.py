"""What ranks say to each other: the state fixup, the sharing of final states, and agreement before either.

Read `fixup.py` first; then `schedule.py` (who sends what, as pure functions of the plan) and one file per strategy.
"""

from gdncp.collectives.agreement import agree, agree_or_raise, compare_digest_once
from gdncp.collectives.final_states import share_final_states
from gdncp.collectives.fixup import LOCAL, FixupStats, fold_here, state_fixup
from gdncp.collectives.spans import compose

__all__ = [
    "LOCAL",
    "FixupStats",
    "agree",
    "agree_or_raise",
    "compare_digest_once",
    "compose",
    "fold_here",
    "share_final_states",
    "state_fixup",
]
