"""What the planner chooses by predicted time: the CP chunk length and the fixup."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from gdncp.plan import cost, layout
from gdncp.plan.checks import CHUNK

_LEAST = 4 * CHUNK  # a shorter CP chunk is not chosen: what the model leaves out (tails, small launches) eats its gain
_GROUPS = 32  # sequences are costed in at most this many groups of like length


def choose_fixup(load: cost.FixupLoad, profile: cost.CostProfile, require_reproducible: bool) -> str:
    """The cheapest strategy."""
    seconds = cost.fixup_seconds(profile, load)
    if require_reproducible:  # a tree associates maps by rank
        del seconds["tree"]
    return min(seconds, key=lambda strategy: seconds[strategy])  # on a tie the first named


def choose_cp_chunk_len(
    seq_lens: Sequence[int],
    world_size: int,
    ownership: str | layout.TokenRanges,
    model: cost.StageModel,
    *,
    lanes_per_rank: int = 1,
    fixup: str = "auto",
    require_reproducible: bool = False,
) -> int:
    """The length of least predicted time among some dozens; of equals the longest, so that nothing is cut in vain."""
    if not any(seq_lens):
        return CHUNK
    search = _Search(seq_lens, world_size, ownership, model, fixup, require_reproducible)
    best, least = 0, math.inf
    for length in search.candidates(lanes_per_rank):
        seconds = search.seconds(length)
        if seconds < least * (1 - 1e-9):
            best, least = length, seconds
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
        model: cost.StageModel,
        fixup: str,
        require_reproducible: bool,
    ) -> None:
        self.seq_starts = layout.sequence_starts(seq_lens)
        self.world_size = world_size
        self.ownership = ownership
        self.model = model
        self.fixup = fixup
        self.require_reproducible = require_reproducible
        self.longest = max(seq_lens)
        self.share = self.seq_starts[-1] / world_size  # tokens of a rank
        self.groups = _groups(seq_lens)

    def candidates(self, lanes: int) -> list[int]:
        """Longest first: whole sequences, fractions of a rank's share and of a zigzag part, powers of two."""
        pieces = [lanes * k for k in (1, 2, 3, 4, 6, 8, 12, 16, 32)]
        whole = _round_up(self.longest)
        lengths = {whole, *(_round_up(self.share / k) for k in pieces), *(1 << k for k in range(6, 21))}
        if self.ownership == "zigzag":
            lengths |= {_round_up(self.longest / (2 * self.world_size * k)) for k in pieces}
        if not isinstance(self.ownership, str):  # keep the cuts on the grid, where some grid has them
            grid = math.gcd(*_cuts_within(self.seq_starts, self.ownership))
            if grid and grid % CHUNK == 0:
                return sorted({grid, *(n for n in lengths if grid % n == 0)}, reverse=True)
        # a few CP chunks a rank, or what fills its workers: tables stay small
        pieces_per_rank = max(32, 4 * self.model.profile.workers // self.model.num_heads) * lanes
        most = len(self.seq_starts) + self.world_size * pieces_per_rank
        few = [n for n in lengths if _LEAST <= n < whole and self.seq_starts[-1] // n <= most]
        return sorted({whole, *few}, reverse=True)

    def seconds(self, length: int) -> float:
        """All stages on the fullest rank, whose work is taken to be its share of the tokens."""
        items = []
        for tokens, count in self.groups:
            cells = -(-tokens // length)
            kinds = [(_chunks(tokens - (cells - 1) * length), cells == 1, True, count)]
            if cells > 1:
                kinds.append((_chunks(length), True, False, count))
            if cells > 2:
                kinds.append((_chunks(length), False, False, count * (cells - 2)))
            for chunks, is_first, is_last, times in kinds:
                item = self.model.item(chunks, is_first, is_last)
                items.append(item._replace(t=item.t * times, scan=item.scan * times, prefill=item.prefill * times))
        fullest = self.fullest(length) / self.seq_starts[-1]
        return sum(self.model.stages(items, fullest)) + self.fixup_seconds(length, fullest)

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
        model, zigzag = self.model, self.ownership == "zigzag"
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
