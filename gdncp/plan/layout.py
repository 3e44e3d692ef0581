"""Ownership and grid to tables: cuts, parts, and one rank's CP chunks and checkpoints.

A sequence's grid lies at its start, and at its start + first + m · length (`Grid`). Ownership may cut it elsewhere: the
CP chunk then ends at the cut, and the next one runs from there to the next grid point.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gdncp.plan.model import CpChunk, RankCheckpoint, RankPlan, Segment

Ints = npt.NDArray[np.int64]
TokenRanges = tuple[tuple[tuple[int, int], ...], ...]  # per rank: half-open ranges of global tokens


class Grid(NamedTuple):
    """Where a sequence is cut, in positions from its start: cells of `length` tokens behind one of `first`."""

    first: int
    length: int

    def cell(self, position: int) -> int:
        """The cell that holds the token at `position`."""
        return (position - self.first) // self.length + 1 if position >= self.first else 0

    def start(self, cell: int) -> int:
        return self.first + (cell - 1) * self.length if cell else 0

    def count(self, tokens: int) -> int:
        """Cells of a sequence; an empty one has one too."""
        return self.cell(tokens - 1) + 1

    def cells(self, positions: Ints) -> Ints:
        """`cell` of each."""
        first, length = self._int64()
        return np.maximum((positions - first) // length + 1, 0)

    def starts(self, cells: Ints) -> Ints:
        """`start` of each."""
        first, length = self._int64()
        return np.where(cells > 0, first + (cells - 1) * length, 0)

    def _int64(self) -> tuple[int, int]:
        """The same for any position that there is."""
        return min(self.first, 1 << 61), min(self.length, 1 << 61)

    def span(self, fold_span: int) -> Grid:
        """Spans of so many cells."""
        return Grid(self.first + (fold_span - 1) * self.length, fold_span * self.length)


def span_bounds(segment: Segment, fold_span: int) -> list[tuple[int, int]]:
    """The spans of a segment as (first, end) of its CP chunks; spans are counted from the sequence's start."""
    to_next = fold_span - segment.first_ordinal % fold_span
    bounds = [0, *range(to_next, segment.num_items, fold_span), segment.num_items]
    return list(pairwise(bounds))


def num_spans(segment: Segment, fold_span: int) -> int:
    return (segment.first_ordinal + segment.num_items - 1) // fold_span - segment.first_ordinal // fold_span + 1


def sequence_starts(seq_lens: Sequence[int]) -> tuple[int, ...]:
    """First global token of each sequence, then the number of tokens."""
    return tuple(accumulate(seq_lens, initial=0))


@lru_cache(1 << 8)  # models are compared on one grid
def contiguous_cuts(seq_starts: tuple[int, ...], world_size: int, grid: Grid) -> tuple[int, ...]:
    """World size + 1 bounds: near-equal shares of the packed tokens, snapped to the nearest grid point (ties: low)."""
    num_tokens = seq_starts[-1]
    cuts = [0]
    for rank in range(1, world_size):
        ideal = rank * num_tokens // world_size
        sequence = bisect_right(seq_starts, ideal) - 1
        if seq_starts[sequence] == ideal:  # also past the last token
            cuts.append(ideal)
            continue
        start, stop = seq_starts[sequence], seq_starts[sequence + 1]
        cell = grid.cell(ideal - start)
        low, high = start + grid.start(cell), min(start + grid.start(cell + 1), stop)
        cuts.append(low if ideal - low <= high - ideal else high)
    return (*cuts, num_tokens)


def zigzag_parts(chunks: int, world_size: int) -> list[tuple[int, int, int]]:
    """The parts of a sequence of so many CP chunks that are not empty: (first CP chunk, end, rank)."""
    parts = 2 * world_size
    result = []
    first = 0
    while first < chunks:
        part = ((first + 1) * parts - 1) // chunks  # the one that holds CP chunk `first`
        end = (part + 1) * chunks // parts
        result.append((first, end, min(part, parts - 1 - part)))
        first = end
    return result


def build_rank_plan(
    rank: int,
    segments: Sequence[Segment],  # of this rank, in order
    *,
    seq_starts: Sequence[int],
    grid: Grid,
    num_lanes: int,
    checkpoint_every_n_tokens: int,
    checkpoint_positions: Sequence[Sequence[int]] | None,
) -> RankPlan:
    num_tokens = sum(segment.num_tokens for segment in segments)
    items: list[CpChunk] = []
    checkpoints: list[RankCheckpoint] = []
    offset = 0
    for segment in segments:
        seq_start = seq_starts[segment.sequence]
        bounds = _chunk_bounds(segment, seq_start, grid)
        last = len(bounds) - 2 if segment.next is None else -1
        for i, (start, stop) in enumerate(pairwise(bounds)):
            # the lane in whose share of the tokens the CP chunk's middle lies
            lane = min((2 * offset + stop - start) * num_lanes // (2 * num_tokens or 1), num_lanes - 1)
            index, ordinal = segment.first_chunk + i, segment.first_ordinal + i
            items.append(CpChunk(index, segment.sequence, ordinal, start, stop, rank, lane, offset, i == last))
            offset += stop - start
        _, positions = segment_checkpoints(segment, seq_start, checkpoint_every_n_tokens, checkpoint_positions)
        for position in positions:
            token = seq_start + position - 1  # the last token that the state has seen
            cell = grid.cell(position - 1) - grid.cell(segment.start - seq_start)
            row = len(checkpoints)
            checkpoints.append(RankCheckpoint(segment.first_item + cell, token + 1 - bounds[cell], row))

    lanes: list[list[int]] = [[] for _ in range(num_lanes)]
    map_rows: list[int] = []
    final_rows: list[int] = []
    final_sequences: list[int] = []
    num_maps = 0
    for i, item in enumerate(items):
        lanes[item.lane].append(i)
        map_rows.append(-1 if item.is_last else num_maps)
        final_rows.append(len(final_sequences) if item.is_last else -1)
        if item.is_last:
            final_sequences.append(item.sequence)
        else:
            num_maps += 1
    return RankPlan(
        rank=rank,
        items=tuple(items),
        map_rows=tuple(map_rows),
        num_maps=num_maps,
        segments=tuple(segments),
        lanes=tuple(map(tuple, lanes)),
        checkpoints=tuple(checkpoints),
        final_rows=tuple(final_rows),
        final_sequences=tuple(final_sequences),
    )


def _chunk_bounds(segment: Segment, seq_start: int, grid: Grid) -> list[int]:
    """Bounds of a segment's CP chunks, one more than there are; [start, start] for an empty sequence."""
    next_grid = seq_start + grid.start(grid.cell(segment.start - seq_start) + 1)
    return [segment.start, *range(next_grid, segment.stop, grid.length), segment.stop]


def segment_checkpoints(
    segment: Segment, seq_start: int, every_n_tokens: int, positions: Sequence[Sequence[int]] | None
) -> tuple[int, Sequence[int]]:
    """(rows of its sequence before the segment, positions in the sequence of those after tokens of the segment)."""
    low, high = segment.start - seq_start, segment.stop - seq_start  # positions in (low, high]
    if positions is not None:
        of_sequence = positions[segment.sequence]
        first = bisect_right(of_sequence, low)
        return first, of_sequence[first : bisect_left(of_sequence, high + 1)]
    if every_n_tokens:
        first = low // every_n_tokens
        return first, range((first + 1) * every_n_tokens, high + 1, every_n_tokens)
    return 0, ()
