"""A plan as a picture: which sequences run where.  The terminal and the SVG file draw the same one.

A row is a lane of a rank, and a block of it one CP chunk, as wide as its tokens; CP chunks too narrow for that are
joined.  Rows and legend are capped, so that the picture of any plan can be read; what is left out is counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import NamedTuple

from gdncp.plan.explain import _bytes, _count, _seconds
from gdncp.plan.model import CpChunk, Segment
from gdncp.plan.prefill_plan import PrefillPlan

# Fill and text.  Okabe and Ito's colours, which people of every colour vision tell apart.
COLOURS = (
    ("#56b4e9", "#000000"),
    ("#e69f00", "#000000"),
    ("#009e73", "#000000"),
    ("#f0e442", "#000000"),
    ("#cc79a7", "#000000"),
    ("#0072b2", "#ffffff"),
    ("#d55e00", "#000000"),
)
SEVERAL = ("#b8b8b8", "#000000")  # sequences in one block
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"

ENTERS, JOINED, MIXED = "state enters", "CP chunks joined", "sequences joined"  # what a block may show

Line = tuple[str, ...]


class Block(NamedTuple):
    """Neighbouring CP chunks drawn as one, columns [left, right) of its row."""

    chunks: tuple[CpChunk, ...]
    left: int
    right: int
    num_entering: int  # states that come from another rank to these CP chunks

    @property
    def sequence(self) -> int | None:
        """None: several."""
        first = self.chunks[0].sequence
        return first if self.chunks[-1].sequence == first else None

    @property
    def num_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks)

    def labels(self) -> list[str]:
        """What to write in it, the longest first."""
        number = len(self.chunks)
        if self.sequence is not None:
            return [f"{self.sequence}", *([f"x{number}"] if number > 1 else [])]
        names = sorted({chunk.sequence for chunk in self.chunks})
        number = len(names)
        which = [f"{number} sequences, {names[0]}-{names[-1]}"] if names[-1] - names[0] < number else []
        return [*which, f"{number} sequences", f"{number} seqs", f"{number}"]


@dataclass(frozen=True)
class Row:
    """A lane, or where `blocks` is empty, words about ranks and lanes that have none."""

    label: str
    blocks: tuple[Block, ...]
    num_tokens: int
    text: str = ""


@dataclass(frozen=True)
class Entry:
    """A sequence in the legend."""

    sequence: int
    text: str


@dataclass(frozen=True)
class Picture:
    title: str
    facts: tuple[str, ...]
    columns: int
    rows: tuple[Row, ...]
    notes: dict[str, str]  # ENTERS, JOINED and MIXED, as far as the map has them: what they mean
    legend: tuple[Entry, ...]
    legend_more: str  # the sequences that `legend` leaves out; "" where it has all
    colours: dict[int, int]  # sequence -> colour, of those that have a block of their own
    letters: dict[int, int]
    times: tuple[Line, ...]  # a table: the head, then a line a stage
    exchange: str


def draw(plan: PrefillPlan, *, columns: int, narrowest: int, max_rows: int, max_entries: int) -> Picture:
    """The picture of a plan, `columns` wide (characters or pixels), no block under `narrowest`."""
    rows = _cap(_rows(plan, columns, narrowest), max_rows)
    blocks = [block for row in rows for block in row.blocks]
    beside = [(a.sequence, b.sequence) for row in rows for a, b in pairwise(row.blocks)]
    shown = sorted({block.sequence for block in blocks if block.sequence is not None})
    legend, more = _legend(plan, shown, max_entries)
    return Picture(
        title=f"prefill plan {plan.digest[:12]}",
        facts=_facts(plan),
        columns=columns,
        rows=rows,
        notes=_notes(blocks),
        legend=legend,
        legend_more=more,
        colours=_unlike(shown, beside, len(COLOURS)),
        letters=_unlike(shown, beside, len(LETTERS)),
        times=_times(plan),
        exchange=_exchange(plan),
    )


# ---- the map


def _rows(plan: PrefillPlan, columns: int, narrowest: int) -> list[Row]:
    lanes = [_lanes(plan, rank) for rank in range(plan.world_size)]
    longest = max(sum(chunk.num_tokens for chunk in lane) for of_rank in lanes for lane in of_rank)
    entering = {segment.first_chunk for segment in plan.segments if segment.previous is not None}
    rows = []
    for empty, ranks in groupby(range(plan.world_size), key=lambda rank: not plan.num_tokens(rank)):
        if empty:
            rows.append(Row(_ranks(list(ranks)), (), 0, "no tokens"))
            continue
        for rank in ranks:
            for number, lane in enumerate(lanes[rank]):
                label = f"rank {rank}" + (f" lane {number}" if plan.cp_chunk_lanes > 1 else "")
                blocks = _blocks(lane, columns / longest, narrowest, entering)
                tokens = sum(chunk.num_tokens for chunk in lane)
                rows.append(Row(label, blocks, tokens, "" if blocks else "no tokens"))
    return rows


def _lanes(plan: PrefillPlan, rank: int) -> list[list[CpChunk]]:
    """Per lane: its CP chunks that have tokens, ascending."""
    share = plan.rank_plan(rank)
    return [[share.items[i] for i in lane if share.items[i].num_tokens] for lane in share.lanes]


def _cap(rows: list[Row], max_rows: int) -> tuple[Row, ...]:
    """The first rows and the last; one row of words stands for those between."""
    if len(rows) <= max_rows:
        return tuple(rows)
    left_out = rows[max_rows - 2 : -1]
    tokens = sum(row.num_tokens for row in left_out)
    text = f"… {len(left_out):,} more, from {left_out[0].label} to {left_out[-1].label}: {tokens:,} tokens"
    return (*rows[: max_rows - 2], Row("", (), tokens, text), rows[-1])


def _blocks(lane: Sequence[CpChunk], scale: float, narrowest: int, entering: set[int]) -> tuple[Block, ...]:
    total = sum(chunk.num_tokens for chunk in lane)
    if not total:
        return ()
    room = max(round(total * scale), narrowest)
    threshold = narrowest / scale  # tokens
    while len(pieces := _pieces(lane, threshold, entering)) * narrowest > room:
        threshold *= 2
    edges = _edges([sum(chunk.num_tokens for chunk in piece) for piece in pieces], scale, narrowest, room)
    return tuple(
        Block(tuple(piece), left, right, sum(chunk.index in entering for chunk in piece))
        for piece, (left, right) in zip(pieces, pairwise(edges), strict=True)
    )


def _pieces(lane: Sequence[CpChunk], threshold: float, entering: set[int]) -> list[list[CpChunk]]:
    """CP chunks of at least `threshold` tokens one by one; narrower neighbours joined, first within their sequence."""
    runs = [[lane[0]]]
    for before, chunk in pairwise(lane):
        goes_on = before.sequence == chunk.sequence and before.stop == chunk.start and chunk.index not in entering
        if goes_on and max(before.num_tokens, chunk.num_tokens) < threshold:
            runs[-1].append(chunk)
        else:
            runs.append([chunk])
    pieces: list[list[CpChunk]] = []
    after_narrow = False
    for run in runs:
        narrow = sum(chunk.num_tokens for chunk in run) < threshold
        if narrow and after_narrow:
            pieces[-1] += run
        else:
            pieces.append(run)
        after_narrow = narrow
    return pieces


def _edges(tokens: Iterable[int], scale: float, narrowest: int, room: int) -> list[int]:
    """Where blocks start and end: at their tokens as nearly as the least width lets them."""
    edges, reached = [0], 0
    for number in tokens:
        reached += number
        edges.append(max(round(reached * scale), edges[-1] + narrowest))
    limit = room
    for i in range(len(edges) - 1, 0, -1):
        edges[i] = min(edges[i], limit)
        limit = edges[i] - narrowest
    return edges


def _unlike(sequences: Iterable[int], beside: Iterable[tuple[int | None, int | None]], number: int) -> dict[int, int]:
    """One of `number` marks for each sequence, in turn, but another than its neighbours' where there is one."""
    neighbours: dict[int | None, set[int | None]] = {}
    for a, b in beside:
        if a != b:
            neighbours.setdefault(a, set()).add(b)
            neighbours.setdefault(b, set()).add(a)
    marks: dict[int, int] = {}
    for turn, sequence in enumerate(sequences):
        taken = {marks[other] for other in neighbours.get(sequence, ()) if other in marks}
        in_turn = [(turn + i) % number for i in range(number)]
        marks[sequence] = next((mark for mark in in_turn if mark not in taken), in_turn[0])
    return marks


# ---- words


def _facts(plan: PrefillPlan) -> tuple[str, ...]:
    first = f", a sequence's first of {plan.first_cp_chunk_len:,}" if len(set(plan.grid)) > 1 else ""
    ranks = _count(plan.world_size, "rank") + f", {plan.ownership} ownership"
    if plan.lanes_per_rank > 1:
        by_heads = plan.lanes_by == "heads"
        ranks += f", {_count(len(plan.head_groups), 'lane')} of heads" if by_heads else f", {plan.lanes_per_rank} lanes"
        ranks += " each"
    late = ", entry_late" if plan.finish == "entry_late" else ""
    return (
        f"{_count(plan.num_sequences, 'sequence')}, {_count(plan.num_tokens_total, 'token')} on {ranks}",
        f"{_count(plan.num_cp_chunks, 'CP chunk')} of up to {plan.cp_chunk_len:,} tokens{first}",
        f"fixup {plan.fixup}{late}; {'reproducible' if plan.reproducible else 'not reproducible'}",
    )


def _notes(blocks: Sequence[Block]) -> dict[str, str]:
    has = {
        ENTERS: any(block.num_entering for block in blocks),
        JOINED: any(block.sequence is not None and len(block.chunks) > 1 for block in blocks),
        MIXED: any(block.sequence is None for block in blocks),
    }
    words = {
        ENTERS: "a state enters from the rank before it in the sequence",
        JOINED: "N narrow CP chunks of one sequence, drawn as one",
        MIXED: "several sequences, each too narrow to be told apart",
    }
    return {sign: text for sign, text in words.items() if has[sign]}


def _legend(plan: PrefillPlan, shown: Sequence[int], max_entries: int) -> tuple[tuple[Entry, ...], str]:
    """The longest of the sequences that have a block of their own; then what the others are."""
    longest = sorted(shown, key=lambda sequence: -plan.seq_lens[sequence])[:max_entries]
    segments: dict[int, list[Segment]] = {sequence: [] for sequence in longest}
    for segment in plan.segments:
        if segment.sequence in segments:
            segments[segment.sequence].append(segment)
    entries = []
    for sequence in sorted(longest):
        tokens = _count(plan.seq_lens[sequence], "token")
        chunks = _count(sum(segment.num_items for segment in segments[sequence]), "CP chunk")
        where = _ranks(sorted({segment.rank for segment in segments[sequence]}))
        entries.append(Entry(sequence, f"sequence {sequence}: {tokens}, {chunks}, {where}"))
    others = [length for sequence, length in enumerate(plan.seq_lens) if sequence not in segments]
    filled = [length for length in others if length]
    parts = []
    if filled:
        low, high = min(filled), max(filled)
        each = f"{low:,}" if low == high else f"{low:,} to {high:,}"
        parts.append(f"{len(filled):,} {'more' if entries else 'sequences'} of {each} tokens")
    if len(filled) < len(others):
        parts.append(f"{len(others) - len(filled):,} empty")
    return tuple(entries), f"… {', '.join(parts)}" if parts else ""


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    gaps = ranks[-1] - ranks[0] >= len(ranks)
    return f"{len(ranks)} of " * gaps + f"ranks {ranks[0]}-{ranks[-1]}"


def _times(plan: PrefillPlan) -> tuple[Line, ...]:
    """Per stage the predicted time of the slowest and fastest rank; balance: the mean over all ranks / the slowest."""
    lines: list[Line] = [("predicted", "slowest rank", "fastest rank", "balance")]
    total = [sum(stages) for stages in zip(*plan.predicted.values(), strict=True)]
    for stage, of_rank in [*plan.predicted.items(), ("total", total)]:
        high, low = max(of_rank), min(of_rank)
        balance = f"{100 * sum(of_rank) / len(of_rank) / high:.1f} %" if high else "-"
        lines.append((stage, f"{_seconds(high)} (rank {of_rank.index(high)})" if high else "-", _seconds(low), balance))
    return tuple(lines)


def _exchange(plan: PrefillPlan) -> str:
    costs = f"costs of {plan.profile.name}"
    if not plan.crosses_ranks:
        return f"{costs}; no state crosses ranks: nothing is sent"
    places = sum(segment.next is not None for segment in plan.segments)
    sent = plan.fixup_bytes
    return (
        f"{costs}; fixup {plan.fixup}: states cross ranks in {_count(places, 'place')}, "
        f"{_bytes(sum(sent))} sent in all, {_bytes(max(sent))} by the rank that sends most"
    )
