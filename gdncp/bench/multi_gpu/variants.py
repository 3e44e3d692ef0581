"""The choices of a plan that a run goes through; those that this version of `plan_prefill` has."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from gdncp import plan_prefill

FIXUPS = ("chain", "all_gather", "head_sharded", "tree")
OWNERSHIPS = ("contiguous", "zigzag", "explicit")
FINISHES = ("entry_first", "entry_late")
LANES: dict[str, Any] = {"lanes_per_rank": 2, "lanes_by": "heads"}  # one group's exchange beside the other's scans
CUT_EVERY = 4  # CP chunks between the cuts of explicit ownership, so that spans of 2 and 4 are left whole

_PARAMETERS = inspect.signature(plan_prefill).parameters


def finishes() -> list[dict[str, Any]]:
    """Arguments of `plan_prefill` for each way to finish; one empty set where the plan has no choice."""
    return [{"finish": name} for name in FINISHES] if "finish" in _PARAMETERS else [{}]


def fold_spans() -> list[dict[str, Any]]:
    """The plan's own span, and spans of two CP chunks where there are such."""
    return [{}, {"fold_span": 2}] if "fold_span" in _PARAMETERS else [{}]


def explicit_ranges(seq_lens: Sequence[int], world_size: int, cp_chunk_len: int) -> list[list[tuple[int, int]]]:
    """Uneven, scattered shares cut on the grid; of three ranks and more, the last holds nothing."""
    step, cuts, start = CUT_EVERY * cp_chunk_len, {0}, 0
    for length in seq_lens:
        cuts |= {start + m for m in range(step, length, step)} | {start + length}
        start += length
    holders = max(1, world_size - 1) if world_size > 2 else world_size
    ranges: list[list[tuple[int, int]]] = [[] for _ in range(world_size)]
    for i, piece in enumerate(pairwise(sorted(cuts))):
        ranges[(i * i + i // 3) % holders].append(piece)
    return ranges


def every_choice(seq_lens: Sequence[int], world_size: int, cp_chunk_len: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, arguments of `plan_prefill`) of every fixup, ownership, finish and span."""
    ranges = explicit_ranges(seq_lens, world_size, cp_chunk_len)
    for span in fold_spans():
        for fixup in FIXUPS:
            for ownership in OWNERSHIPS:
                for finish in finishes():
                    given = {"ownership": ranges if ownership == "explicit" else ownership, "fixup": fixup}
                    words = (fixup, ownership, *(f"{k}={v}" for k, v in (finish | span).items()))
                    yield " ".join(words), given | finish | span
