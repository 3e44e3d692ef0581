"""The grid of CP chunks of least predicted time, among some dozens."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from gdncp.plan import columns, cost, layout
from gdncp.plan.balance import FEW, Balance
from gdncp.plan.checks import CHUNK
from gdncp.plan.choose import GAIN, LEAST, crossing_seconds, local_seconds, round_up
from gdncp.plan.stage_model import Kind, StageModel

_PATIENCE = 24  # grids that are tried one after the other in vain
_MANY = 16  # cells from which a first one may leave the last one short
_GROUPS = 32  # sequences are costed in at most this many groups of like length
_REFINED = 12  # grids for whose counts of CP chunks first ones of other lengths are tried,
_REFINABLE = 1.15  # and which are not further behind the best
_FIRST_RATIOS = tuple(k / 20 for k in range(8, 33))  # of a first CP chunk to the others
# of several ranks fewer, as each takes longer to cost
_REFINED_OF_RANKS, _FIRST_RATIOS_OF_RANKS = 4, tuple(k / 20 for k in range(4, 33, 3))
_MOST_NEAR, _NEAR = 6, 1.1  # grids of which whole plans are compared
_WORLDS = (1, 2, 4, 8)  # for which a grid is chosen that may not depend on the world size: those of one node


class GridSearch:
    """Grids of CP chunks for one batch and world, compared by what models predict.

    What a rank has to do does not depend on the model: it is worked out once for all gates and ways to open.
    """

    def __init__(
        self,
        seq_lens: Sequence[int],
        world_size: int,
        ownership: str | layout.TokenRanges,
        model: StageModel,  # of any gates
        *,
        lanes_per_rank: int = 1,
        fixup: str = "auto",
        require_reproducible: bool = False,
    ) -> None:
        """require_reproducible: where ownership is cut on the grid, the same for every world size: that of least time
        times ranks, over the worlds of one node.
        """
        worlds = _WORLDS if require_reproducible and isinstance(ownership, str) else (world_size,)
        self._longest = max(seq_lens)
        self._searches = [_Search(seq_lens, world, ownership, fixup, require_reproducible, model) for world in worlds]
        lanes = 1 if require_reproducible else lanes_per_rank
        lengths = set().union(*(search.candidates(lanes) for search in self._searches))
        self._grids = [layout.Grid(length, length) for length in sorted(lengths, reverse=True)]
        self._refines = not require_reproducible and (worlds == (1,) or self._searches[0].few)
        self._of_one_rank = worlds == (1,)

    def best(self, models: Sequence[StageModel], spans: bool = False) -> list[layout.Grid]:
        """The grid of least predicted time among some dozens; of equals the coarsest, so that nothing is cut in vain.

        Behind it, of few sequences on several ranks, what is predicted to be near it: how ranks share a grid is then
        only worked out roughly, and whole plans may tell otherwise.

        models: of the gates that the layer may have. The grid is the one that is least far behind what would be best if
            it were known which of them it has.
        spans: maps may be composed over spans of CP chunks, so that many CP chunks cost less between ranks.

        First CP chunks may be longer or shorter than the others: stage 2's launch ends when the longest of them, of
        stage 4, and of the N and M of the others do. On several ranks that is so for contiguous ownership of few
        sequences, where all ranks would wait for the first one's.
        """
        costs, grids = [_Costs(self._searches, model, spans) for model in models], list(self._grids)
        if self._refines:
            if self._of_one_rank:
                few, tried, ratios = _REFINED, None, _FIRST_RATIOS
            else:
                few, tried, ratios = _REFINED_OF_RANKS, 2 * _REFINED_OF_RANKS, _FIRST_RATIOS_OF_RANKS
            grids += _unequal(self._longest, _promising(grids, costs, few, tried), ratios)
        if len(costs) == 1:
            found = _least(grids, costs[0].bound, costs[0].seconds, GAIN)
            return [found, *self._near(found, grids, costs, costs[0].known)]
        best = [cost.seconds(_least(grids, cost.bound, cost.seconds)) for cost in costs]

        def behind(values: Iterable[float]) -> float:
            return max(value / own for value, own in zip(values, best, strict=True))

        def known(grid: layout.Grid) -> float:
            return behind(cost.known(grid) for cost in costs)

        found = _least(
            grids,
            lambda grid: behind(cost.bound(grid) for cost in costs),
            lambda grid: behind(cost.seconds(grid) for cost in costs),
            GAIN,
            known,
        )
        return [found, *self._near(found, grids, costs, known)]

    def _near(
        self,
        best: layout.Grid,
        grids: Sequence[layout.Grid],
        costs: Sequence[_Costs],
        value: Callable[[layout.Grid], float],
    ) -> list[layout.Grid]:
        """Some that were worked out for all gates and are not far behind the best, by value."""
        if not (self._refines and self._searches[0].few):
            return []
        values = {grid: value(grid) for grid in grids if grid != best and all(cost.known(grid) for cost in costs)}
        near = [grid for grid, found in values.items() if found < _NEAR * value(best)]
        return sorted(near, key=values.__getitem__)[:_MOST_NEAR]


def _least(
    grids: Sequence[layout.Grid],
    bound: Callable[[layout.Grid], float],
    value: Callable[[layout.Grid], float],
    least_gain: float = 0.0,
    known: Callable[[layout.Grid], float] = lambda grid: -math.inf,
) -> layout.Grid:
    """The grid of least value, or the first of all where no other gains so much.

    known: what the value is not below, by what is known already.
    """
    best, *others = grids
    limit = (1 - least_gain) * value(best)
    in_vain = 0
    for grid in sorted(others, key=bound):  # stable: of equals the first
        if bound(grid) > limit or in_vain == _PATIENCE:
            break
        in_vain += 1
        if known(grid) < limit and (found := value(grid)) < limit * (1 - 1e-9):
            best, limit, in_vain = grid, found, 0
    return best


class _Costs:
    """Predicted time by one model, times ranks, over all searches."""

    def __init__(self, searches: Sequence[_Search], model: StageModel, spans: bool) -> None:
        self._searches, self._model, self._with_spans = searches, model, spans
        self._bounds: dict[layout.Grid, float] = {}
        self._seconds: dict[layout.Grid, float] = {}

    def bound(self, grid: layout.Grid) -> float:
        """Below `seconds`, or near it, and cheaper."""
        if grid not in self._bounds:
            self._bounds[grid] = sum(
                s.world_size * (s.least_seconds(grid, self._model) + s.fixup(grid, self._with_spans))
                for s in self._searches
            )
        return self._bounds[grid]

    def seconds(self, grid: layout.Grid) -> float:
        if grid not in self._seconds:
            self._seconds[grid] = sum(
                s.world_size * s.seconds(grid, self._model, self._with_spans) for s in self._searches
            )
        return self._seconds[grid]

    def known(self, grid: layout.Grid) -> float:
        """`seconds` if they were asked for before, else 0."""
        return self._seconds.get(grid, 0.0)


def _promising(grids: Sequence[layout.Grid], costs: Sequence[_Costs], few: int, tried: int | None) -> list[layout.Grid]:
    """The few of these whose first cells are worth refining, best first.

    tried: of how many times are predicted, those of least bound; None: of all, as a bound knows of no partial waves.
    """

    def bound(grid: layout.Grid) -> float:
        return sum(cost.bound(grid) for cost in costs)

    def seconds(grid: layout.Grid) -> float:
        return sum(cost.seconds(grid) for cost in costs)

    limit = _REFINABLE * seconds(_least(grids, bound, seconds))
    near = [grid for grid in sorted(grids, key=bound) if bound(grid) <= limit]
    return sorted(near[:tried], key=seconds)[:few]


def _unequal(longest: int, grids: Sequence[layout.Grid], ratios: Sequence[float]) -> list[layout.Grid]:
    """Grids of as many cells as these, of which the first is not equal to the others, and the last full or nearly."""
    refined = []
    for count in dict.fromkeys(grid.count(longest) for grid in grids):
        for ratio in ratios if count > 1 else ():
            length = round_up(longest / (count - 1 + ratio))
            full = round_up(longest) - (count - 1) * length  # of many cells each is rounded, and this bears it all
            for first in {full, round_up(ratio * length)} if count > _MANY else {full}:
                if min(first, length) >= LEAST and first != length:
                    refined.append(layout.Grid(first, length))
    return list(dict.fromkeys(refined))


class _Shape(NamedTuple):
    """What the fullest rank has to do, which is taken to be its share of the tokens."""

    kinds: dict[Kind, float]  # of its CP chunks, longest first
    depth: int  # maps along one sequence
    num_maps: int  # that it folds by itself
    load: cost.FixupLoad | None  # of the exchange; None: nothing crosses ranks


class _Search:
    """What a rank has to do as a function of the grid, from sums over groups of sequences: no plan is built."""

    def __init__(
        self,
        seq_lens: Sequence[int],
        world_size: int,
        ownership: str | layout.TokenRanges,
        fixup: str,
        require_reproducible: bool,
        model: StageModel,  # whichever: gates do not matter here
    ) -> None:
        self.seq_starts = layout.sequence_starts(seq_lens)
        self.world_size = world_size
        self.ownership = ownership
        self.crossing = [crossing_seconds(model.profile, fixup, require_reproducible, spans) for spans in (False, True)]
        self.model = model
        self.longest = max(seq_lens)
        self.share = self.seq_starts[-1] / world_size  # tokens of a rank
        self.groups = _groups(seq_lens)
        self.few = world_size > 1 and ownership == "contiguous" and len(seq_lens) * world_size <= FEW
        self._shapes: dict[layout.Grid, _Shape] = {}
        self._least: dict[tuple[layout.Grid, StageModel], float] = {}

    def candidates(self, lanes: int) -> set[int]:
        """Whole sequences, fractions of a sequence, of a rank's share and of a zigzag part, powers of two."""
        filling = -(-self.model.profile.workers // self.model.num_heads)  # CP chunks whose heads fill a rank's workers
        pieces = {lanes * k for k in range(1, min(4 * filling + 2, 128) + 1)}
        parts = [self.longest, self.share]
        if self.ownership == "zigzag":
            parts.append(self.longest / (2 * self.world_size))
        whole = round_up(self.longest)
        lengths = {whole, *(round_up(part / k) for part in parts for k in pieces), *(1 << k for k in range(6, 21))}
        if not isinstance(self.ownership, str):  # keep the cuts on the grid, where some grid has them
            grid = math.gcd(*_cuts_within(self.seq_starts, self.ownership))
            if grid and grid % CHUNK == 0:
                return {grid, *(n for n in lengths if grid % n == 0)}
        # a few CP chunks a rank, or what fills its workers: tables stay small
        most = len(self.seq_starts) + self.world_size * max(32, 4 * filling) * lanes
        return {whole, *(n for n in lengths if LEAST <= n < whole and self.seq_starts[-1] // n <= most)}

    def seconds(self, grid: layout.Grid, model: StageModel, spans: bool) -> float:
        if not self.few:
            return sum(model.seconds(self.shape(grid).kinds)) + self.fixup(grid, spans)
        balance = Balance(self.seq_starts, self.world_size, grid, model, self.crossing[spans])
        return balance.seconds(balance.cuts(refined=False))

    def least_seconds(self, grid: layout.Grid, model: StageModel) -> float:
        """Of stages 1, 2 and 4."""
        if (grid, model) not in self._least:
            self._least[grid, model] = model.least_seconds(self.shape(grid).kinds)
        return self._least[grid, model]

    def fixup(self, grid: layout.Grid, spans: bool) -> float:
        """Seconds of stage 3."""
        shape = self.shape(grid)
        fold = min(local_seconds(self.model, shape.depth, shape.num_maps, spans and not shape.load))
        return fold + self.crossing[spans](shape.load) if shape.load else fold

    def shape(self, grid: layout.Grid) -> _Shape:
        if grid not in self._shapes:
            self._shapes[grid] = self._shape(grid)
        return self._shapes[grid]

    def _shape(self, grid: layout.Grid) -> _Shape:
        share = self.fullest(grid) / self.seq_starts[-1]
        kinds: dict[Kind, float] = {}
        for tokens, count in self.groups:
            cells = grid.count(tokens)
            own = [(Kind(_chunks(tokens - grid.start(cells - 1)), cells == 1, True), 1)]
            if cells > 1:
                own.append((Kind(_chunks(grid.first), True, False), 1))
            if cells > 2:
                own.append((Kind(_chunks(grid.length), False, False), cells - 2))
            for kind, times in own:
                kinds[kind] = kinds.get(kind, 0.0) + times * count * share
        # sorted once for all models, as they take them
        return _Shape(dict(sorted(kinds.items(), reverse=True)), *self._maps(grid, share))

    def fullest(self, grid: layout.Grid) -> int:
        """Tokens of the rank that has most."""
        if self.ownership == "contiguous":
            cuts = layout.contiguous_cuts(self.seq_starts, self.world_size, grid)
            return max(stop - start for start, stop in pairwise(cuts))
        if self.ownership == "zigzag":
            tables = [columns.zigzag_table(grid.count(tokens), self.world_size) for tokens, _ in self.groups]
            first, end, rank = np.concatenate(tables).T
            tokens, count = np.repeat(np.array(self.groups), list(map(len, tables)), axis=0).T
            own = count * (np.minimum(grid.starts(end), tokens) - grid.starts(first))
            return int(np.bincount(rank, weights=own).max())
        tokens_of = [0] * self.world_size
        assert not isinstance(self.ownership, str)
        for start, stop, of_rank in columns.explicit_runs(self.ownership):
            tokens_of[of_rank] += stop - start
        return max(tokens_of)

    def _maps(self, grid: layout.Grid, fullest: float) -> tuple[int, int, cost.FixupLoad | None]:
        """Of a `_Shape`; fullest: the rank's share."""
        model, zigzag = self.model, self.ownership == "zigzag"
        hops = depth = 0
        crossing = local = handed_on = 0.0  # maps, maps, states
        for tokens, count in self.groups:
            maps = grid.count(tokens) - 1
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
        num_maps = math.ceil(local * fullest)
        if not hops:
            return depth, num_maps, None
        load = cost.FixupLoad(
            world_size=self.world_size,
            num_hops=hops,
            num_maps=math.ceil(crossing),
            depth=depth,
            maps_per_rank=math.ceil(crossing * fullest),
            states_per_rank=math.ceil(handed_on / self.world_size),
            num_heads=model.num_heads,
            head_dim=model.head_dim,
            # of many sequences cut in a few parts each some rank hands on more states than that, maybe too many
            by_mail=not zigzag or len(self.seq_starts) == 2,
        )
        return depth, num_maps, load


def _groups(seq_lens: Sequence[int]) -> list[tuple[int, int]]:
    """(tokens, how many) of sequences that are not empty, longest first; like lengths stand for their mean."""
    lengths = sorted(filter(None, seq_lens), reverse=True)
    size = -(-len(lengths) // _GROUPS)
    parts = [lengths[i : i + size] for i in range(0, len(lengths), size)]
    return [(round(sum(part) / len(part)), len(part)) for part in parts]


def _cuts_within(seq_starts: Sequence[int], ranges: layout.TokenRanges) -> list[int]:
    """Positions within sequences at which explicit ownership cuts them."""
    grid = layout.Grid(CHUNK, CHUNK)
    segments = columns.Segments.build(seq_starts, columns.explicit_runs(ranges), len(ranges), grid)
    return [segment.stop - seq_starts[segment.sequence] for segment in segments.make() if segment.next is not None]


def _chunks(tokens: int) -> int:
    return -(-tokens // CHUNK)
