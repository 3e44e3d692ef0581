"""Times: ours on all ranks and on one, eager and captured; what the exchange costs; predicted beside measured."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch

from gdncp.bench.cases import Case, Shape, Tokens
from gdncp.bench.multi_gpu import trace, weak
from gdncp.bench.multi_gpu.book import Book
from gdncp.bench.multi_gpu.clock import Call, RankClock
from gdncp.bench.multi_gpu.ours import Planned, half_lives
from gdncp.bench.multi_gpu.presets import GATES, Preset
from gdncp.bench.multi_gpu.ranks import Ranks
from gdncp.bench.multi_gpu.variants import FIXUPS, LANES, finishes
from gdncp.bench.run import TOLERANCE, summary_of

MANY_SETS_UP_TO = 131072  # tokens: three input sets, beyond that two
TARGET_MS, MAX_ITERATIONS = 100.0, 50
HOST_CALLS, STAGE_CALLS = 51, 7
MAX_HOLD_MS = 20.0
BY_MESSAGES = "auto, by NCCL"


def run(book: Book, preset: Preset) -> None:
    clock = RankClock(book.ranks.group, book.ranks.device)
    for i, shape in enumerate(preset.shapes):
        if i == len(preset.lengths) - 1:  # before other heads
            weak.run(book, preset, clock)
            trace.run(book, preset)
        for gates in GATES:
            _case(book, preset, clock, shape, gates)


def input_sets(case: Case) -> list[Tokens]:
    """The same on every rank."""
    return [case.tokens(seed=1 + i) for i in range(3 if case.shape.num_tokens <= MANY_SETS_UP_TO else 2)]


def _case(book: Book, preset: Preset, clock: RankClock, shape: Shape, gates: str) -> None:
    name = f"{shape} {gates}"
    if not book.room_for(name):
        return
    ranks, case = book.ranks, Case(shape, gates, preset.dtype, book.ranks.device)
    about = {"tokens": shape.num_tokens, "heads": shape.heads, "gates": gates}
    with book.failures_of(name):
        sets = input_sets(case)
        one = Planned(ranks, case, sets, preset, 1)
        book.add("one_gpu", about | measure(clock, one.calls, preset) | _about(one))
        one.calls[0]()
        for variant, choice in variants(preset, shape, sets[0], ranks.backend):
            if variant != "auto" and not book.room_for(f"{name}, {variant}"):
                break
            with book.failures_of(f"{name}, {variant}"):
                ours = Planned(ranks, case, sets, preset, ranks.size, **choice)
                row: dict[str, Any] = about | {"variant": variant} | _about(ours)
                with ours.by_messages() if variant == BY_MESSAGES else nullcontext():
                    row["transport"] = ours.calls[0]().fixup.transport
                row["error"] = error = max(ranks.together(_difference(ours, one)))
                if not error <= TOLERANCE[case.dtype]:
                    raise ValueError(f"{error:.2g} off one GPU: not timed")
                row |= measure(clock, ours.calls, preset)
                if variant == "auto":
                    row |= stages(ranks, clock, ours, row["host_us"] / 1e3)
                if variant in ("auto", BY_MESSAGES) and ranks.captures and ours.plan.crosses_ranks:
                    row |= exposed(ranks, clock, ours, preset, row["graph_ms"])
                book.add("times", row)
                if variant == "auto":
                    alone = _ms(book.found["one_gpu"][-1])
                    chosen = f"{row['fixup']}, CP chunk {row['cp_chunk_len']}, host {row['host_us']:.0f} us"
                    book.say(f"{name}: one {alone}, {ranks.size} ranks {_ms(row)}, {chosen}")


def variants(preset: Preset, shape: Shape, tokens: Tokens, backend: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, arguments of `plan_prefill`): the planner alone, told of the gates, and each of its choices by name.

    Also the planner's choice with states sent by NCCL, at the longest of the detailed lengths.
    """
    yield "auto", {}
    if (shape.num_k_heads, shape.num_v_heads) != preset.heads[0]:
        return
    if backend == "nccl" and shape.num_tokens == preset.detailed[-1]:
        yield BY_MESSAGES, {}
    yield "half-lives told", {"head_half_lives": half_lives(tokens)}
    if shape.num_tokens in preset.detailed:
        for fixup in FIXUPS[:3]:
            yield fixup, {"fixup": fixup}
            if shape.num_k_heads > 1:
                yield f"{fixup}, 2 lanes", {"fixup": fixup} | LANES
        for finish in finishes():
            if finish:
                yield finish["finish"], finish


def measure(clock: RankClock, calls: list[Call], preset: Preset) -> dict[str, Any]:
    """Host µs, eager ms, and captured ms (absent where nothing can be captured)."""
    calls[0]()  # whatever is done once
    host_us = clock.host_us(calls, HOST_CALLS if clock.has_events else 3)
    hold_ms = min(MAX_HOLD_MS, 2 * host_us / 1e3)
    typical = clock.times(calls, 3, hold_ms)[1]
    count = int(min(MAX_ITERATIONS, max(preset.min_iterations, TARGET_MS / max(typical, 1e-3))))
    row = {"host_us": host_us, "eager_ms": clock.median(calls, count, hold_ms), "iterations": count}
    if clock.has_events:
        row["graph_ms"] = _captured(clock, calls, count)
    return row


def _captured(clock: RankClock, calls: list[Call], count: int) -> float:
    replays = [clock.capture(call) for call in calls]
    return clock.median(replays, count)


def exposed(ranks: Ranks, clock: RankClock, ours: Planned, preset: Preset, graph_ms: float) -> dict[str, Any]:
    """What stage 3 adds to a captured call: its time less that of a graph of stages 1, 2 and 4 alone."""
    failure = None
    try:
        ours.calls_without_exchange[0]()
    except Exception as error:
        failure = summary_of(error)
    failures = [text for text in ranks.together(failure) if text]
    if failures:
        return {"without_fixup_failed": failures[0]}
    without = _captured(clock, ours.calls_without_exchange, preset.min_iterations)
    return {"without_fixup_ms": without, "exposed_us": 1e3 * (graph_ms - without)}


def stages(ranks: Ranks, clock: RankClock, ours: Planned, host_ms: float) -> dict[str, Any]:
    """Per stage: predicted ms by rank, and the median ms of each rank in eager calls, ranks aligned before each."""
    found: list[dict[str, float]] = []
    for _ in range(STAGE_CALLS):
        clock.align(min(MAX_HOLD_MS, 2 * host_ms))
        found.append({name: 1e3 * seconds for name, seconds in ours.stages().items()})
    names = list(found[0])
    medians = ranks.together({name: statistics.median(call[name] for call in found) for name in names})
    return {
        "measured_stages_ms": {name: [of_rank[name] for of_rank in medians] for name in names},
        "predicted_stages_ms": {name: [1e3 * s for s in seconds] for name, seconds in ours.plan.predicted.items()},
    }


def _about(planned: Planned) -> dict[str, Any]:
    plan = planned.plan
    return {
        "fixup": plan.fixup,
        "finish": getattr(plan, "finish", None),
        "fold_span": getattr(plan, "fold_span", None),
        "cp_chunk_len": min(plan.cp_chunk_len, max(plan.seq_lens)),
        "first_cp_chunk_len": min(plan.first_cp_chunk_len, max(plan.seq_lens)),
        "predicted_ms": 1e3 * max(sum(column) for column in zip(*plan.predicted.values(), strict=True)),
    }


def _difference(ours: Planned, one: Planned) -> float:
    """Relative L2 of this rank's outputs, and of the final state where it ends here, from those of one GPU."""
    pairs, start = [], 0
    for a, b in ours.plan.token_ranges(ours.rank):
        pairs.append((ours.output[start : start + b - a], one.output[a:b]))
        start += b - a
    if ours.plan.final_state_owner(0) == ours.rank:
        pairs.append((ours.states, one.states))
    worst = 0.0
    for x, y in pairs:
        total = torch.zeros(2, dtype=torch.float64, device=x.device)
        for rows_x, rows_y in zip(x.split(65536), y.split(65536), strict=True):  # bounds the memory
            total += torch.stack([(rows_x.float() - rows_y.float()).square().sum(), rows_y.float().square().sum()])
        worst = max(worst, float((total[0] / total[1].clamp(min=1e-30)).sqrt().nan_to_num(torch.inf)))
    return worst


def _ms(row: dict[str, Any]) -> str:
    return f"{row['graph_ms']:.3f} ms" if "graph_ms" in row else f"{row['eager_ms']:.3f} ms (eager)"
