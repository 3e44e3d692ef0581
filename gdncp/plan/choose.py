"""What the planner chooses by predicted time: a fixup, and one of two plans; which CP chunks: `grid_search.py`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from gdncp.plan import cost
from gdncp.plan.checks import CHUNK
from gdncp.plan.overlap import EXCHANGE_WORKERS
from gdncp.plan.profiles import CostProfile
from gdncp.plan.stage_model import StageModel

if TYPE_CHECKING:
    from gdncp.plan.prefill_plan import PrefillPlan

LEAST = 4 * CHUNK  # a shorter CP chunk is not chosen: what the model leaves out (tails, small launches) eats its gain
GAIN = 0.03  # nor a split that gains less: what the model gets wrong
_CLEARLY = 0.9  # the model cannot tell fixups apart that differ by less


def typical_half_lives(num_heads: int) -> list[float]:
    """Log-spaced from 4 to 16384 tokens, the spread of trained layers: most heads forget, and some do not."""
    return [4.0 * 4096 ** (head / max(num_heads - 1, 1)) for head in range(num_heads)]


def fresh_half_lives(num_heads: int) -> list[float]:
    """A few tokens, as where layers are initialised: no head remembers a CP chunk."""
    return [8.0] * num_heads


def choose_fixup(load: cost.FixupLoad, profile: CostProfile, require_reproducible: bool) -> str:
    """The cheapest strategy.  A tree, which associates maps by rank and so ties bits to ranks, has to win clearly."""
    return _cheapest(cost.fixup_seconds(profile, load), require_reproducible)


def _cheapest(seconds: Mapping[str, float], require_reproducible: bool) -> str:
    in_order = min((name for name in seconds if name != "tree"), key=seconds.__getitem__)  # on a tie the first named
    return "tree" if not require_reproducible and seconds["tree"] < _CLEARLY * seconds[in_order] else in_order


def choose_plan(
    usual: PrefillPlan, others: Iterable[PrefillPlan], gates: Sequence[Sequence[float] | None], gain: float = GAIN
) -> PrefillPlan:
    """The plan that is least behind the best of all, whichever of these half-lives the heads have.

    gain: what another than the usual one has to gain.
    """
    plans = [usual, *others]
    seconds = [[cost.total_seconds(plan, half_lives) for half_lives in gates] for plan in plans]
    best = [min(of_all) for of_all in zip(*seconds, strict=True)]
    behind = [max(own / least for own, least in zip(mine, best, strict=True)) for mine in seconds]
    least = min(behind)
    return plans[behind.index(least)] if least < (1 - gain) * behind[0] else usual


def local_seconds(model: StageModel, depth: int, num_maps: int, spans: bool = True) -> list[float]:
    """Of maps that a rank folds by itself; `spans`: also with composed maps of 2, 4, 8 ... CP chunks."""
    folded = (model.profile, depth, num_maps, model.num_heads, model.head_dim)
    most = depth.bit_length() if spans else 1
    return [cost.local_seconds(*folded, 1 << i) for i in range(max(most, 1))]


def crossing_seconds(
    profile: CostProfile, fixup: str, require_reproducible: bool, spans: bool = False
) -> Callable[[cost.FixupLoad], float]:
    """What a fixup that crosses ranks takes, by the strategy asked for; `spans`: maps may be composed before."""
    known: dict[cost.FixupLoad, float] = {}  # many ways to cut are alike

    def flat(load: cost.FixupLoad) -> float:
        seconds = cost.fixup_seconds(profile, load)
        return seconds[_cheapest(seconds, require_reproducible) if fixup == "auto" else fixup]

    def seconds(load: cost.FixupLoad) -> float:
        if load not in known:
            known[load] = fastest(load)
        return known[load]

    def fastest(load: cost.FixupLoad) -> float:
        if not spans or load.maps_per_rank < 2:
            return flat(load)
        span = 1 << (load.maps_per_rank.bit_length() - 1)
        composed = load._replace(
            num_maps=math.ceil(load.num_maps / span),
            depth=math.ceil(load.depth / span),
            maps_per_rank=math.ceil(load.maps_per_rank / span),
            fold_span=span,
            cp_chunks_per_rank=load.maps_per_rank,
        )
        return min(flat(load), flat(composed))

    return seconds


def leaves_workers(plan: PrefillPlan) -> bool:
    """Whether stage 4 leaves workers to an exchange beside it, whose kernels else wait until its first units end."""
    pieces = plan.pieces
    most = np.bincount(pieces.rank, weights=pieces.num_items).max()
    return bool(most * plan.num_state_heads + EXCHANGE_WORKERS <= plan.profile.workers)


def finer(plan: PrefillPlan) -> list[int]:
    """CP chunk lengths below the plan's of which a rank has one, two and four waves."""
    wave = max(plan.profile.workers // plan.num_state_heads, 1)
    lengths = [round_up(plan.num_tokens_total / plan.world_size / (wave * k)) for k in (1, 2, 4)]
    return [length for length in lengths if LEAST <= length < plan.cp_chunk_len]


def half(cp_chunk_len: int) -> int:
    """Half as long, on the grid of 64-token chunks."""
    return round_up(cp_chunk_len / 2)


def unsplit(longest: int) -> int:
    """The CP chunk length that leaves a sequence whole."""
    return round_up(longest)


def balanced(longest: int) -> int:
    """√(64·L) tokens a CP chunk: as many CP chunks to fold as 64-token chunks to scan in each (FlashInfer's rule)."""
    return round_up(math.isqrt(CHUNK * longest))


def round_up(tokens: float) -> int:
    return max(math.ceil(tokens / CHUNK), 1) * CHUNK
