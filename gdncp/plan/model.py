"""What a plan is: frozen tables of ints that every rank computes alike.  Pure Python, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class CpChunk(NamedTuple):
    """A run of tokens of one sequence that is scanned from a zero state on its own: the unit of context parallelism."""

    index: int  # type: ignore[assignment]  # (hides tuple.index) its place in `plan.cp_chunks`: sequences in order, then CP chunks in order
    sequence: int
    ordinal: int  # which CP chunk of its sequence, from 0
    start: int  # global tokens, half-open; start == stop for an empty sequence
    stop: int
    rank: int
    lane: int
    offset: int  # row of its first token in its rank's tensors
    is_last: bool  # no CP chunk of the sequence follows: it passes nothing on and writes the final state

    @property
    def is_first(self) -> bool:
        return self.ordinal == 0

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start


class Segment(NamedTuple):
    """A maximal run of consecutive CP chunks of one sequence on one rank; what a fixup hands states between."""

    index: int  # type: ignore[assignment]  # its place in `plan.segments`: sequences in order, then segments in order
    sequence: int
    rank: int
    first_item: int  # its CP chunks are items [first_item, stop_item) of the rank's `RankPlan.items`
    stop_item: int
    previous: int | None  # the segment of the same sequence before this one, on another rank; None: the sequence starts
    next: int | None
    start: int  # global tokens, half-open
    stop: int
    first_chunk: int  # its CP chunks are `plan.cp_chunks[first_chunk : first_chunk + num_items]`
    first_ordinal: int  # ordinal of its first CP chunk within the sequence

    @property
    def num_items(self) -> int:
        return self.stop_item - self.first_item

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start


class TokenRun(NamedTuple):
    """A maximal run of global tokens [start, stop) on one rank, across sequences."""

    start: int
    stop: int
    rank: int


class RankCheckpoint(NamedTuple):
    """One state checkpoint that a rank writes."""

    item: int  # index into `RankPlan.items`
    tokens: int  # tokens of that CP chunk that the state has seen, 1 ... num_tokens
    row: int  # row in the rank's checkpoint tensor; the global row is `plan.checkpoint_rows(rank)[row]`


@dataclass(frozen=True)
class RankPlan:
    """One rank's share of a plan.  An item is a CP chunk of this rank; items lie in ascending global token order."""

    rank: int
    items: tuple[CpChunk, ...]
    map_rows: tuple[int, ...]  # per item: its row among the rank's affine maps; -1 where it passes nothing on (is_last)
    num_maps: int
    segments: tuple[Segment, ...]  # of this rank, in order
    lanes: tuple[tuple[int, ...], ...]  # per lane: its items
    checkpoints: tuple[RankCheckpoint, ...]  # sorted by (item, tokens)
    final_rows: tuple[int, ...]  # per item: its row among the rank's final states; -1 unless is_last
    final_sequences: tuple[int, ...]  # the sequences that end here: final row -> sequence

    @property
    def num_tokens(self) -> int:
        return sum(item.num_tokens for item in self.items)
