"""Token runs and segments of a whole plan as columns: tens of thousands of them are planned in a few milliseconds.

Objects are made of them where somebody asks, for one rank or for all.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from gdncp.plan.layout import Grid, Ints, TokenRanges, zigzag_parts
from gdncp.plan.model import Segment, TokenRun


@dataclass(frozen=True, eq=False)
class Runs:
    """Maximal runs of global tokens on one rank, in token order, without gaps.  All int64 [runs]."""

    start: Ints
    stop: Ints
    rank: Ints

    @classmethod
    def merged(cls, start: Ints, stop: Ints, rank: Ints) -> Runs:
        """From pieces in token order without gaps: neighbours on one rank become one, empty ones are left out."""
        filled = start < stop
        start, stop, rank = start[filled], stop[filled], rank[filled]
        begins = np.ones(len(rank), dtype=bool)
        begins[1:] = rank[1:] != rank[:-1]
        ends = np.append(begins[1:], True)[: len(rank)]
        return cls(start[begins], stop[ends], rank[begins])

    @classmethod
    def of_pieces(cls, pieces: Iterable[tuple[int, int, int]]) -> Runs:
        """The same from (start, stop, rank)."""
        return cls.merged(*np.array([*pieces], dtype=np.int64).reshape(-1, 3).T)

    def __iter__(self) -> Iterator[TokenRun]:
        return map(TokenRun._make, zip(self.start.tolist(), self.stop.tolist(), self.rank.tolist(), strict=True))

    def of_rank(self, rank: int) -> tuple[tuple[int, int], ...]:
        """Its half-open ranges of tokens."""
        own = self.rank == rank
        return tuple(zip(self.start[own].tolist(), self.stop[own].tolist(), strict=True))


def contiguous_runs(cuts: Sequence[int]) -> Runs:
    """World size + 1 bounds."""
    bounds = np.array(cuts, dtype=np.int64)
    return Runs.merged(bounds[:-1], bounds[1:], np.arange(len(cuts) - 1))


@lru_cache(1 << 10)
def zigzag_table(chunks: int, world_size: int) -> Ints:
    """`zigzag_parts` as rows: first CP chunk, end, rank."""
    return np.array(zigzag_parts(chunks, world_size), dtype=np.int64)


def zigzag_runs(seq_starts: Sequence[int], world_size: int, grid: Grid) -> Runs:
    """Per sequence of C CP chunks: part i is CP chunks [i·C//2W, (i+1)·C//2W); rank r holds parts r and 2W−1−r."""
    starts = np.array(seq_starts, dtype=np.int64)
    begin, stop = starts[:-1], starts[1:]
    counts, which = np.unique(grid.cells(stop - begin - 1) + 1, return_inverse=True)
    known = [zigzag_table(count, world_size) for count in counts.tolist()]
    parts = np.concatenate([known[i] for i in which.tolist()])
    times = np.array([len(own) for own in known])[which]
    begin, stop = np.repeat(begin, times), np.repeat(stop, times)
    low, high = (begin + grid.starts(parts[:, i]) for i in range(2))
    return Runs.merged(low, np.minimum(high, stop), parts[:, 2])


def explicit_runs(ranges: TokenRanges) -> Runs:
    """Ranges that are known to partition the tokens."""
    return Runs.of_pieces(sorted((start, stop, rank) for rank, own in enumerate(ranges) for start, stop in own))


@dataclass(frozen=True, eq=False)
class Segments:
    """Every sequence cut where its tokens change rank; sequences in order, then segments in order.  All [segments].

    An empty sequence is one segment, on the rank of the next token, or the last rank.  Fields: see `Segment`.
    """

    sequence: Ints
    rank: Ints
    start: Ints
    stop: Ints
    num_items: Ints
    is_first: npt.NDArray[np.bool_]  # of its sequence
    is_last: npt.NDArray[np.bool_]
    off_grid: npt.NDArray[np.bool_]  # it goes on elsewhere, and is cut off its sequence's grid

    @classmethod
    def build(
        cls, seq_starts: Sequence[int], runs: Runs, world_size: int, grid: Grid, points: Grid | None = None
    ) -> Segments:
        """points: of the grid's, where ownership may cut; None: all."""
        starts = np.array(seq_starts, dtype=np.int64)
        seq_start, seq_stop = starts[:-1], starts[1:]
        filled = np.flatnonzero(seq_start < seq_stop)
        start = np.union1d(seq_start[filled], runs.start)
        stop = np.append(start[1:], starts[-1])[: len(start)]
        sequence = filled[np.searchsorted(seq_start[filled], start, side="right") - 1] if len(filled) else start
        empty = np.flatnonzero(seq_start == seq_stop)
        if len(empty):
            sequence = np.concatenate([sequence, empty])
            start, stop = (np.concatenate([x, seq_start[empty]]) for x in (start, stop))
            order = np.argsort(sequence, kind="stable")
            sequence, start, stop = sequence[order], start[order], stop[order]
        at = np.searchsorted(runs.start, start, side="right") - 1
        rank = np.where(start < starts[-1], runs.rank[at] if len(runs.rank) else 0, world_size - 1)

        begin = seq_start[sequence]
        first_cell = grid.cells(start - begin)
        num_items = np.where(start < stop, grid.cells(stop - 1 - begin) - first_cell, 0) + 1
        is_last = stop == seq_stop[sequence]
        points = points or grid
        off_grid = ~is_last & (points.starts(points.cells(stop - begin)) != stop - begin)
        return cls(sequence, rank, start, stop, num_items, start == begin, is_last, off_grid)

    def __len__(self) -> int:
        return len(self.sequence)

    @cached_property
    def all(self) -> tuple[Segment, ...]:
        """As objects."""
        return self.make()

    def make(self, rank: int | None = None) -> tuple[Segment, ...]:
        """As objects: all, or those of a rank."""
        own = np.arange(len(self)) if rank is None else np.flatnonzero(self.rank == rank)
        items = self._first_item[own]
        chunk, ordinal = self.first_chunk[own], self._first_ordinal[own]
        previous = np.where(self.is_first[own], -1, own - 1)
        following = np.where(self.is_last[own], -1, own + 1)
        columns = [own, self.sequence[own], self.rank[own], items, items + self.num_items[own]]
        links = [[None if i < 0 else i for i in link.tolist()] for link in (previous, following)]
        rest = [self.start[own], self.stop[own], chunk, ordinal]
        with no_collection():
            fields = [*(c.tolist() for c in columns), *links, *(c.tolist() for c in rest)]
            return tuple(map(Segment._make, zip(*fields, strict=True)))

    def num_spans(self, fold_span: int) -> Ints:
        """Spans that its CP chunks are in."""
        first = self._first_ordinal
        return (first + self.num_items - 1) // fold_span - first // fold_span + 1

    @cached_property
    def first_chunk(self) -> Ints:
        """CP chunks before it, over all ranks."""
        return np.cumsum(self.num_items) - self.num_items

    @property
    def _first_ordinal(self) -> Ints:
        """CP chunks of its sequence before it."""
        return self.first_chunk - self.first_chunk[self.is_first][np.cumsum(self.is_first) - 1]

    @cached_property
    def _first_item(self) -> Ints:
        """CP chunks of its rank before it."""
        order = np.argsort(self.rank, kind="stable")
        counts, ranks = self.num_items[order], self.rank[order]
        before = np.cumsum(counts) - counts
        first = np.empty(len(self), dtype=np.int64)
        first[order] = before - before[np.searchsorted(ranks, ranks)]
        return first


@contextmanager
def no_collection() -> Iterator[None]:
    """Making thousands of tuples, of which few are in a cycle, would have the collector walk them time and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
