"""Whether a rank's heads are divided among lanes, so that one group's exchange runs beside another's scans.

Groups' exchanges follow each other, each starts and waits as long as one of all heads does, and a group's units fill
fewer workers: it depends on what runs beside what, so `gdncp.simulate` is asked, and only where the exchange takes long
enough for lanes to gain anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from gdncp.plan import cost

if TYPE_CHECKING:
    from gdncp.plan.prefill_plan import PrefillPlan

LANES = 2  # four never were better than two by the simulation: their exchanges follow each other
LEAST_GAIN = 0.03  # what the model gets wrong
MOST_RANKS, MOST_CP_CHUNKS = 64, 1024  # of more a simulation takes longer than a plan may

Gates = Sequence[Sequence[float] | None]


def choose_lanes(plan: PrefillPlan, finer: Callable[[], PrefillPlan | None], gates: Gates) -> PrefillPlan:
    """The plan, or one with lanes of heads where that is simulated to be faster by `LEAST_GAIN`; it says why.

    finer: the same with CP chunks half as long, of which half the heads fill as many workers; None: there is none.
    gates: half-lives that the layer may have; the plan is the one that is least behind, whichever it has.
    """
    reason = _no_use(plan, gates)
    if reason:
        return replace(plan, lanes_reason=f"one: {reason}")
    of_grids = [of_grid for of_grid in (plan, finer()) if of_grid is not None]
    ones = [_seconds(of_grid, gates) for of_grid in of_grids]
    lanes = [replace(of_grid, lanes_per_rank=LANES, lanes_by="heads") for of_grid in of_grids]
    twos = [_seconds(with_lanes, gates) for with_lanes in lanes]
    best = [min(each) for each in zip(*ones, *twos, strict=True)]

    def behind(seconds: Sequence[float]) -> float:
        return max(own / least for own, least in zip(seconds, best, strict=True))

    # what a finer grid gains without lanes is not theirs
    one, two = min(ones, key=behind), min(twos, key=behind)
    chosen = lanes[twos.index(two)]
    grid = "" if chosen.grid == plan.grid else f" with CP chunks of {chosen.cp_chunk_len:,} tokens"
    if behind(two) < (1 - LEAST_GAIN) * behind(one):
        reason = f"{LANES} of heads, which hide some of the exchange: {_milliseconds(two)}{grid}, simulated, for "
        return replace(chosen, lanes_reason=f"{reason}{_milliseconds(one)} with one")
    reason = f"one: {LANES} of heads are simulated to take {_milliseconds(two)}{grid}, and one {_milliseconds(one)}"
    return replace(plan, lanes_reason=f"{reason}; they have to gain {LEAST_GAIN:.0%}")


def _no_use(plan: PrefillPlan, gates: Gates) -> str | None:
    """Why lanes cannot gain anything, or nobody asks."""
    if not plan.crosses_ranks:
        return "nothing crosses ranks, so there is no exchange to hide"
    if plan.num_k_heads < LANES:
        return "all heads share a key head"
    if plan.profile.workers == 1:
        return "nothing runs beside an exchange on one worker"
    exchange = plan.fixup_seconds[plan.fixup]
    share = max(exchange / cost.total_seconds(plan, half_lives) for half_lives in gates)
    if share < LEAST_GAIN:
        return f"the exchange is {share:.1%} of the predicted time, and lanes of heads have to gain {LEAST_GAIN:.0%}"
    if plan.world_size > MOST_RANKS or plan.num_cp_chunks > MOST_CP_CHUNKS:
        return f"not simulated for more than {MOST_RANKS} ranks or {MOST_CP_CHUNKS:,} CP chunks"
    return None


def _seconds(plan: PrefillPlan, gates: Gates) -> list[float]:
    """For each of the gates."""
    from gdncp.simulate.schemes import simulate_plan  # imports torch, which planning else does not need

    of_gates = [None if half_lives is None else tuple(half_lives) for half_lives in gates]
    return [simulate_plan(replace(plan, head_half_lives=half_lives)).seconds for half_lives in of_gates]


def _milliseconds(seconds: Sequence[float]) -> str:
    return " or ".join(f"{value * 1e3:.3g}" for value in seconds) + " ms"
