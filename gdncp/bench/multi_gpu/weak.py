"""Weak scaling: W times the tokens on W ranks against one rank's on one, captured where that is possible."""

from __future__ import annotations

from typing import Any

from gdncp.bench.cases import Case, Shape
from gdncp.bench.multi_gpu import times
from gdncp.bench.multi_gpu.book import Book
from gdncp.bench.multi_gpu.clock import RankClock
from gdncp.bench.multi_gpu.ours import Planned, half_lives
from gdncp.bench.multi_gpu.presets import GATES, Preset


def run(book: Book, preset: Preset, clock: RankClock) -> None:
    size, per_rank = book.ranks.size, preset.weak_tokens
    for gates in GATES:
        name = f"weak scaling, {gates}"
        if not book.room_for(name):
            continue
        with book.failures_of(name):
            row: dict[str, Any] = {"tokens_per_rank": per_rank, "gates": gates}
            for who, world_size, tokens in (("one", 1, per_rank), ("all", size, per_rank * size)):
                case = Case(Shape(tokens, 1, *preset.heads[0], preset.head_dim), gates, preset.dtype, book.ranks.device)
                sets = times.input_sets(case)
                for told in (False, True):
                    choice = {"head_half_lives": half_lives(sets[0])} if told else {}
                    found = times.measure(
                        clock, Planned(book.ranks, case, sets, preset, world_size, **choice).calls, preset
                    )
                    row[f"{who}_told_ms" if told else f"{who}_ms"] = found.get("graph_ms", found["eager_ms"])
            row["efficiency"] = min(row["one_ms"], row["one_told_ms"]) / min(row["all_ms"], row["all_told_ms"])
            book.add("weak", row)
            book.say(f"{name}: {row['efficiency']:.0%}")
