"""What the planner chooses by predicted time: the CP chunk length and the fixup."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from gdncp.plan import cost, layout
from gdncp.plan.checks import CHUNK
from gdncp.plan.profiles import CostProfile
from gdncp.plan.stage_model import Kind, StageModel

_LEAST = 4 * CHUNK  # a shorter CP chunk is not chosen: what the model leaves out (tails, small launches) eats its gain
_GAIN = 0.03  # nor a split that gains less: what the model gets wrong
_GROUPS = 32  # sequences are costed in at most this many groups of like length
_WORLDS = (1, 2, 4, 8)  # for which a grid is chosen that may not depend on the world size: those of one node


def typical_half_lives(num_heads: int) -> list[float]:
    """Log-spaced from 4 to 16384 tokens, the spread of trained layers: most heads forget, and some do not."""
    return [4.0 * 4096 ** (head / max(num_heads - 1, 1)) for head in range(num_heads)]


def choose_fixup(load: cost.FixupLoad, profile: CostProfile, require_reproducible: bool) -> str:
    """The cheapest strategy."""
    seconds = cost.fixup_seconds(profile, load)
    if require_reproducible:  # a tree associates maps by rank
        del seconds["tree"]
    return min(seconds, key=lambda strategy: seconds[strategy])  # on a tie the first named


def choose_cp_chunk_len(
    seq_lens: Sequence[int],
    world_size: int,
    ownership: str | layout.TokenRanges,
    models: Sequence[StageModel],
    *,
    lanes_per_rank: int = 1,
    fixup: str = "auto",
    require_reproducible: bool = False,
) -> int:
    """The length of least predicted time among some dozens; of equals the longest, so that nothing is cut in vain.

    models: of the gates that the layer may have; what counts is their sum.
    require_reproducible: where ownership is cut on the grid, the same for every world size: that of least time times
        ranks, over the worlds of one node.
    """
    if not any(seq_lens):
        return CHUNK
    worlds = _WORLDS if require_reproducible and isinstance(ownership, str) else (world_size,)
    searches = [_Search(seq_lens, world, ownership, models, fixup, require_reproducible) for world in worlds]

    def least(length: int) -> float:
        return sum(search.world_size * search.least_seconds(length) for search in searches)

    def seconds(length: int) -> float:
        return sum(search.world_size * search.seconds(length) for search in searches)

    lengths = set().union(*(search.candidates(lanes_per_rank) for search in searches))
    best = max(lengths)
    limit = (1 - _GAIN) * seconds(best) if best >= max(seq_lens) else math.inf
    for bound, length in sorted((least(length), -length) for length in lengths - {best}):
        if bound > limit:
            break
        if (found := seconds(-length)) < limit * (1 - 1e-9):
            best, limit = -length, found
    return best


def unsplit(longest: int) -> int:
    """The CP chunk length that leaves a sequence whole."""
    return _round_up(longest)


def balanced(longest: int) -> int:
    """√(64·L) tokens a CP chunk: as many CP chunks to fold as 64-token chunks to scan in each (FlashInfer's rule)."""
    return _round_up(math.isqrt(CHUNK * longest))


class _Search:
    """Predicted time as a function of the CP chunk length, from sums over groups of sequences: no plan is built."""

    def __init__(
        self,
        seq_lens: Sequence[int],
        world_size: int,
        ownership: str | layout.TokenRanges,
        models: Sequence[StageModel],
        fixup: str,
        require_reproducible: bool,
    ) -> None:
        self.seq_starts = layout.sequence_starts(seq_lens)
        self.world_size = world_size
        self.ownership = ownership
        self.models = models
        self.fixup = fixup
        self.require_reproducible = require_reproducible
        self.longest = max(seq_lens)
        self.share = self.seq_starts[-1] / world_size  # tokens of a rank
        self.groups = _groups(seq_lens)

    def candidates(self, lanes: int) -> set[int]:
        """Whole sequences, fractions of a sequence, of a rank's share and of a zigzag part, powers of two."""
        model = self.models[0]
        filling = -(-model.profile.workers // model.num_heads)  # CP chunks whose heads fill a rank's workers
        pieces = {lanes * k for k in range(1, min(4 * filling + 2, 128) + 1)}
        parts = [self.longest, self.share]
        if self.ownership == "zigzag":
            parts.append(self.longest / (2 * self.world_size))
        whole = _round_up(self.longest)
        lengths = {whole, *(_round_up(part / k) for part in parts for k in pieces), *(1 << k for k in range(6, 21))}
        if not isinstance(self.ownership, str):  # keep the cuts on the grid, where some grid has them
            grid = math.gcd(*_cuts_within(self.seq_starts, self.ownership))
            if grid and grid % CHUNK == 0:
                return {grid, *(n for n in lengths if grid % n == 0)}
        # a few CP chunks a rank, or what fills its workers: tables stay small
        most = len(self.seq_starts) + self.world_size * max(32, 4 * filling) * lanes
        return {whole, *(n for n in lengths if _LEAST <= n < whole and self.seq_starts[-1] // n <= most)}

    def seconds(self, length: int) -> float:
        """All stages on the fullest rank, whose work is taken to be its share of the tokens; mean over the models."""
        kinds, fullest = self.kinds(length)
        stages = sum(sum(model.seconds(kinds)) for model in self.models) / len(self.models)
        return stages + self.fixup_seconds(length, fullest)

    def least_seconds(self, length: int) -> float:
        """A lower bound on `seconds` that takes no schedule."""
        kinds, fullest = self.kinds(length)
        stages = sum(model.least_seconds(kinds) for model in self.models) / len(self.models)
        return stages + self.fixup_seconds(length, fullest)

    def kinds(self, length: int) -> tuple[dict[Kind, float], float]:
        """The CP chunks of the fullest rank, and its share of all tokens."""
        fullest = self.fullest(length) / self.seq_starts[-1]
        kinds: dict[Kind, float] = {}
        for tokens, count in self.groups:
            cells = -(-tokens // length)
            own = [(Kind(_chunks(tokens - (cells - 1) * length), cells == 1, True), 1)]
            if cells > 1:
                own.append((Kind(_chunks(length), True, False), 1))
            if cells > 2:
                own.append((Kind(_chunks(length), False, False), cells - 2))
            for kind, times in own:
                kinds[kind] = kinds.get(kind, 0.0) + times * count * fullest
        return kinds, fullest

    def fullest(self, length: int) -> int:
        """Tokens of the rank that has most."""
        if self.ownership == "contiguous":
            cuts = layout.contiguous_cuts(self.seq_starts, self.world_size, length)
            return max(stop - start for start, stop in pairwise(cuts))
        tokens_of = [0] * self.world_size
        if self.ownership == "zigzag":
            for tokens, count in self.groups:
                for first, end, rank in layout.zigzag_parts(-(-tokens // length), self.world_size):
                    tokens_of[rank] += count * (min(end * length, tokens) - first * length)
        else:
            assert not isinstance(self.ownership, str)
            for start, stop, rank in layout.explicit_runs(self.ownership):
                tokens_of[rank] += stop - start
        return max(tokens_of)

    def fixup_seconds(self, length: int, fullest: float) -> float:
        model, zigzag = self.models[0], self.ownership == "zigzag"
        hops = depth = 0
        crossing = local = handed_on = 0.0  # maps, maps, states
        for tokens, count in self.groups:
            maps = -(-tokens // length) - 1
            ranks = tokens / self.share  # that it spans; a short sequence straddles a cut with this probability
            depth = max(depth, maps)
            if maps and self.world_size > 1:
                hops_here = min(maps, 2 * self.world_size - 1 if zigzag else max(math.ceil(ranks) - 1, 1))
                straddle = count if zigzag else count * min(ranks, 1)
                hops = max(hops, hops_here)
                crossing += straddle * maps
                local += (count - straddle) * maps
                handed_on += straddle * hops_here
            else:
                local += count * maps
        fold = cost.fold_seconds(model.profile, depth, math.ceil(local * fullest), model.num_heads, model.head_dim)
        if not hops:
            return fold
        load = cost.FixupLoad(
            world_size=self.world_size,
            num_hops=hops,
            num_maps=math.ceil(crossing),
            depth=depth,
            maps_per_rank=math.ceil(crossing * fullest),
            states_per_rank=math.ceil(handed_on / self.world_size),
            num_heads=model.num_heads,
            head_dim=model.head_dim,
        )
        fixup = self.fixup
        if fixup == "auto":
            fixup = choose_fixup(load, model.profile, self.require_reproducible)
        return fold + cost.fixup_seconds(model.profile, load)[fixup]


def _groups(seq_lens: Sequence[int]) -> list[tuple[int, int]]:
    """(tokens, how many) of sequences that are not empty, longest first; like lengths stand for their mean."""
    lengths = sorted(filter(None, seq_lens), reverse=True)
    size = -(-len(lengths) // _GROUPS)
    parts = [lengths[i : i + size] for i in range(0, len(lengths), size)]
    return [(round(sum(part) / len(part)), len(part)) for part in parts]


def _cuts_within(seq_starts: Sequence[int], ranges: layout.TokenRanges) -> list[int]:
    """Positions within sequences at which explicit ownership cuts them."""
    segments = layout.build_segments(seq_starts, layout.explicit_runs(ranges), len(ranges), CHUNK)
    return [segment.stop - seq_starts[segment.sequence] for segment in segments if segment.next is not None]


def _round_up(tokens: float) -> int:
    return max(math.ceil(tokens / CHUNK), 1) * CHUNK


def _chunks(tokens: int) -> int:
    return -(-tokens // CHUNK)
