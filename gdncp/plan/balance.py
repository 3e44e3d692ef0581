"""Where contiguous ownership cuts the packed tokens: predicted time evened out over ranks, few sequences cut.

Tokens differ in what they cost: a sequence's first CP chunk opens, its last one takes no part in stage 2, heads that
forget leave most of stage 2 out.  And ranks wait for each other where states cross: what counts is the slowest rank
before the exchange, the exchange, and the slowest rank after it.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, combinations_with_replacement, pairwise

from gdncp.plan import cost
from gdncp.plan.checks import CHUNK
from gdncp.plan.layout import Grid, contiguous_cuts
from gdncp.plan.stage_model import Kind, StageModel, StageSeconds, kinds_of_run

FEW = 16  # sequences: so many are costed by the schedule of their units, more by the sums of their work
_NEAR = 0.015  # of a rank's share: a cut so far from a sequence's end moves there
_MOVES = 16  # of cuts, at most, in search of something better
_GAIN = 1e-3  # what a move has to gain
_EVEN = 0.005  # of the mean rank's time, that the slowest one may take longer without a search for something better
_MOST_REFINED = 16  # ranks
_SURELY = 1.05  # times what was found: what takes at least so long is not looked at
_MOST_TRIED = 300  # ways to cut: where there are no more, all are tried

Cuts = list[int]  # world size + 1 bounds in packed tokens


class Balance:
    """Cuts of packed sequences for one world size, grid and model of the stages."""

    def __init__(
        self,
        seq_starts: Sequence[int],
        world_size: int,
        grid: Grid,
        model: StageModel,
        fixup_seconds: Callable[[cost.FixupLoad], float] | None,  # None: an exchange costs nothing
        points: Grid | None = None,  # of the grid's, where cuts may be; None: all
    ) -> None:
        self._starts, self._world_size, self._grid, self._model = seq_starts, world_size, grid, model
        self._points = points or grid
        self._ends = frozenset(seq_starts)
        self._fixup_seconds = fixup_seconds or (lambda load: 0.0)
        self._exact = len(seq_starts) - 1 <= FEW
        self._totals: dict[tuple[int, ...], float] = {}
        self._known: dict[tuple[int, int], tuple[float, float]] = {}
        self._stages: dict[tuple[tuple[Kind, int], ...], StageSeconds] = {}
        self._works: dict[Kind, tuple[float, float]] = {}
        works: dict[int, tuple[float, float]] = {}  # of sequences of so many chunks
        for start, stop in pairwise(seq_starts):
            if (chunks := _chunks(stop - start)) not in works:
                works[chunks] = self._work(start, stop, start, stop)
        each = [works[_chunks(stop - start)] for start, stop in pairwise(seq_starts)]
        self._whole = {chunks: before + after for chunks, (before, after) in works.items()}
        self._first = self._work_of(Kind(_chunks(grid.first), True, False))
        self._middle = self._work_of(Kind(_chunks(grid.length), False, False))
        self._cells = self._points.length // grid.length  # between two places for a cut
        self._to_first, self._to_next = (self._work_of_cells(self._cells, own) for own in (self._first, self._middle))
        self._cumulative = [list(accumulate(column, initial=0.0)) for column in zip(*each, strict=True)]
        self._work_before = [a + b for a, b in zip(*self._cumulative, strict=True)]

    def cuts(self, *, refined: bool = True) -> Cuts:
        """The best found: of least predicted time; of equals, the one that cuts fewer sequences.

        refined: also move cuts of few sequences about, as long as it helps.
        """
        if self._world_size == 1:
            return [0, self._starts[-1]]
        best, equal = self._snapped(_NEAR), [*contiguous_cuts(self._starts, self._world_size, self._points)]
        if equal != best:
            best = self._best([best, equal])
        longest, most = max(self._whole.values()), _SURELY * self.seconds(best) * self._model.profile.workers
        if longest <= most and self._least_of_whole(whole := self._snapped(math.inf)) <= most:
            best = self._best([best, whole])
        if self._exact and refined and self._world_size <= _MOST_REFINED and not self._least(best):
            found = self._all()  # of few, some share the work less evenly and save more of the exchange
            if not (found or self._even(best)):
                found = [self._improved(best, 0.0)]
            best = self._best([best, *found])
        # ranks without tokens come last: those that exchange states are near each other
        filled = list(dict.fromkeys(best))
        return filled + [best[-1]] * (len(best) - len(filled))

    def seconds(self, cuts: Cuts) -> float:
        """Until the last rank is done: the slowest before the exchange, the exchange, the slowest after it."""
        key = tuple(cuts)
        if key not in self._totals:
            self._totals[key] = self._seconds(cuts)
        return self._totals[key]

    def _seconds(self, cuts: Cuts) -> float:
        load = self._load(cuts)
        before = after = alone = 0.0
        for start, stop in pairwise(cuts):
            own = self._rank_seconds(start, stop)
            if start < stop and not (start in self._ends and stop in self._ends):
                before = max(before, own[0])
                after = max(after, own[1])
            else:
                alone = max(alone, sum(own))
        return max(before + self._fixup_seconds(load) + after, alone) if load.num_hops else alone

    def _even(self, cuts: Cuts) -> bool:
        """Whether no rank computes much longer than the mean, so that other cuts can only save some of the exchange."""
        each = [self._rank_seconds(start, stop) for start, stop in pairwise(cuts)]
        slowest = max(before for before, _ in each) + max(after for _, after in each)
        return self._near_mean(slowest, cuts)

    def _least(self, cuts: Cuts) -> bool:
        """Whether that is so with the exchange too, so that nothing can be gained by other cuts."""
        return self._near_mean(self.seconds(cuts), cuts)

    def _near_mean(self, seconds: float, cuts: Cuts) -> bool:
        each = (sum(self._rank_seconds(start, stop)) for start, stop in pairwise(cuts))
        return seconds * (len(cuts) - 1) <= (1 + _EVEN) * sum(each)

    def _least_of_whole(self, cuts: Cuts) -> float:
        """Worker-seconds of the fullest rank, with cuts where sequences end."""
        at = [bisect_left(self._starts, cut) for cut in cuts]
        before, after = ([column[i] for i in at] for column in self._cumulative)
        works = (b - a + d - c for (a, b), (c, d) in zip(pairwise(before), pairwise(after), strict=True))
        return max(works)

    def _best(self, ways: Sequence[Cuts]) -> Cuts:
        """Of least seconds, to three digits; then of fewest sequences that are cut; then of the most even tokens."""
        seconds = [float(f"{self.seconds(cuts):.3g}") for cuts in ways]
        least = min(seconds)
        equal = [cuts for cuts, own in zip(ways, seconds, strict=True) if own == least]
        return equal[0] if len(equal) == 1 else min(equal, key=self._order)

    def _order(self, cuts: Cuts) -> tuple[int, int]:
        split = {self._sequence(cut) for cut in cuts if cut not in self._ends}
        return len(split), sum((stop - start) ** 2 for start, stop in pairwise(cuts))

    # ---- where cuts may be

    def _sequence(self, token: int) -> int:
        """The sequence of a token, or the last one for the end."""
        return bisect_right(self._starts, token, 0, len(self._starts) - 1) - 1

    def _snapped(self, near: float) -> Cuts:
        """Near-equal work, cut where sequences end if that is within `near` of a rank's share, else on the grid."""
        totals = self._work_before
        share = totals[-1] / self._world_size
        cuts = [0]
        for rank in range(1, self._world_size):
            wanted = rank * share
            after = min(bisect_left(totals, wanted), len(totals) - 1)
            ends = after
            if after and abs(totals[after - 1] - wanted) <= abs(totals[after] - wanted):
                ends = after - 1
            if abs(totals[ends] - wanted) <= near * share:
                cut = self._starts[ends]
            else:
                cut = self._inside(after - 1, wanted - totals[after - 1])
            cuts.append(max(cut, cuts[-1]))
        return [*cuts, self._starts[-1]]

    def _inside(self, sequence: int, work: float) -> int:
        """The grid point of a sequence that has nearest to so much work before it."""
        start, stop = self._starts[sequence], self._starts[sequence + 1]
        last = self._points.count(stop - start) - 1
        cell = 0  # the last one that begins with no more work before it
        if last and work >= self._to_first:
            cell = min(1 + int((work - self._to_first) / self._to_next), last) if last > 1 and self._to_next else last
        lower = self._work_of_cells(cell * self._cells, self._first)
        if cell < last:
            upper = self._work_of_cells((cell + 1) * self._cells, self._first)
        else:
            upper = self._whole[_chunks(stop - start)]
        if work - lower > upper - work:
            cell += 1
        return min(start + self._points.start(cell), stop)

    def _work_of_cells(self, cells: int, first: tuple[float, float]) -> float:
        """Work of so many whole cells of the grid, of which the first takes so long; none is a sequence's last."""
        if cells < 2:
            return cells * (first[0] + first[1])
        between, (before, after) = cells - 2, self._middle  # added up as `_work` does
        return (first[0] + between * before + before) + (first[1] + between * after + after)

    def _all(self) -> list[Cuts]:
        """Every way to cut, or nothing where that is too many."""
        starts, grid, inner = self._starts, self._points, self._world_size - 1
        counts = [grid.count(stop - start) for start, stop in pairwise(starts)]
        if math.comb(sum(counts) + inner, inner) > _MOST_TRIED:
            return []
        points = {
            start + grid.start(cell) for start, count in zip(starts, counts, strict=False) for cell in range(count)
        }
        return [[0, *cuts, starts[-1]] for cuts in combinations_with_replacement(sorted({*points, starts[-1]}), inner)]

    def _beside(self, cut: int, step: int, near: float) -> int | None:
        """The next place for a cut, up or down; of whole sequences alone where `near` is infinite."""
        i = bisect_left(self._starts, cut)
        if near or cut in self._ends:
            here = i + step if cut in self._ends else i - (step < 0)
            while 0 < here < len(self._starts) - 1 and self._starts[here] == cut:  # empty sequences
                here += step
            if not 0 <= here < len(self._starts):
                return None
            if near:
                return self._starts[here]
        sequence = self._sequence(cut if step > 0 else cut - 1)
        start, stop = self._starts[sequence], self._starts[sequence + 1]
        cell = self._points.cell(cut - start) + 1 if step > 0 else self._points.cell(cut - 1 - start)
        return min(start + self._points.start(cell), stop)

    # ---- moving them

    def _improved(self, cuts: Cuts, near: float) -> Cuts:
        best, least = cuts, self.seconds(cuts)
        for _ in range(_MOVES):
            found = min(self._moves(best, near), key=self.seconds, default=best)
            if (seconds := self.seconds(found)) >= least * (1 - _GAIN):
                break
            best, least = found, seconds
        return best

    def _moves(self, cuts: Cuts, near: float) -> Iterator[Cuts]:
        """One cut moved, or neighbouring cuts together, as one rank hands work to another."""
        inner = len(cuts) - 1
        for step in (-1, 1):
            moved = [self._beside(cut, step, near) for cut in cuts]
            for first in range(1, inner):
                for stop in range(first + 1, inner + 1):
                    middle = [cut for cut in moved[first:stop] if cut is not None]
                    if len(middle) < stop - first:
                        break
                    trial = [*cuts[:first], *middle, *cuts[stop:]]
                    if all(a <= b for a, b in pairwise(trial[first - 1 : stop + 1])):
                        yield trial

    # ---- what ranks take

    def _rank_seconds(self, start: int, stop: int) -> tuple[float, float]:
        """(stages 1 and 2, stage 4) of a rank that holds [start, stop)."""
        if (start, stop) not in self._known:
            if self._exact:
                self._known[start, stop] = self._schedule(start, stop)
            else:
                first, last = self._before(start), self._before(stop)
                workers = self._model.profile.workers
                self._known[start, stop] = ((last[0] - first[0]) / workers, (last[1] - first[1]) / workers)
        return self._known[start, stop]

    def _schedule(self, start: int, stop: int) -> tuple[float, float]:
        """The folds of sequences that cross no rank among stages 1 and 2."""
        kinds: tuple[tuple[Kind, int], ...] = ()
        depth = maps = 0
        token = start
        while token < stop:
            sequence = self._sequence(token)
            seq_start, seq_stop = self._starts[sequence], self._starts[sequence + 1]
            end = min(seq_stop, stop)
            kinds += kinds_of_run(self._grid, token - seq_start, end - seq_start, seq_stop - seq_start)
            if token == seq_start and end == seq_stop:
                inside = self._grid.count(seq_stop - seq_start) - 1
                depth, maps = max(depth, inside), maps + inside
            token = end
        if kinds not in self._stages:  # most ranks are like others
            counts: dict[Kind, int] = {}
            for kind, count in kinds:
                counts[kind] = counts.get(kind, 0) + count
            self._stages[kinds] = self._model.seconds(counts)
        t, mn, prefill = self._stages[kinds]
        fold = 0.0
        if maps:
            model = self._model
            fold = cost.fold_seconds(model.profile, depth, maps, model.num_heads, model.head_dim)
        return t + mn + fold, prefill

    def _before(self, token: int) -> tuple[float, float]:
        """Work of all tokens before this one."""
        sequence = self._sequence(token)
        begin, end = self._starts[sequence], self._starts[sequence + 1]
        own = self._work(begin, end, begin, token)
        return self._cumulative[0][sequence] + own[0], self._cumulative[1][sequence] + own[1]

    def _work(self, begin: int, end: int, start: int, stop: int) -> tuple[float, float]:
        """Worker-seconds of stages 1 and 2, and of stage 4, of the run [start, stop) of the sequence [begin, end)."""
        before = after = 0.0
        for kind, count in kinds_of_run(self._grid, start - begin, stop - begin, end - begin):
            own = self._work_of(kind)
            before += count * own[0]
            after += count * own[1]
        return before, after

    def _work_of(self, kind: Kind) -> tuple[float, float]:
        if kind not in self._works:
            self._works[kind] = self._model.work(kind)
        return self._works[kind]

    def _load(self, cuts: Cuts) -> cost.FixupLoad:
        """What crosses: a rank's run can go on elsewhere with its last sequence alone."""
        hops = most_hops = depth = num_maps = most_maps = 0
        before = -1
        for start, stop in pairwise(cuts):
            if start == stop or stop in self._ends:
                continue
            sequence = self._sequence(stop)
            seq_start = self._starts[sequence]
            cells = self._grid.cell(stop - 1 - seq_start) - self._grid.cell(max(start - seq_start, 0)) + 1
            hops = hops + 1 if sequence == before else 1
            if sequence != before:
                depth = max(depth, self._grid.count(self._starts[sequence + 1] - seq_start) - 1)
            before = sequence
            num_maps, most_maps, most_hops = num_maps + cells, max(most_maps, cells), max(most_hops, hops)
        model = self._model
        return cost.FixupLoad(
            self._world_size, most_hops, num_maps, depth, most_maps, 1, model.num_heads, model.head_dim
        )


def _chunks(tokens: int) -> int:
    return -(-tokens // CHUNK)
