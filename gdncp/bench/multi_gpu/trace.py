"""Chrome traces of a few calls, one file a rank, and what they say: NCCL's kernels and what ran beside them."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from gdncp.bench.cases import Case, Shape
from gdncp.bench.multi_gpu.book import Book
from gdncp.bench.multi_gpu.clock import RankClock
from gdncp.bench.multi_gpu.ours import Planned
from gdncp.bench.multi_gpu.presets import GATES, Preset
from gdncp.bench.multi_gpu.variants import LANES

CALLS = 3
# What is traced, as arguments of `plan_prefill`: an exchange of all maps, long enough to be worth hiding, by one lane
# and by two, for one kind of gates.
LANES_OF = "forget"
TRACED: dict[str, dict[str, Any]] = {
    "auto": {},
    "all_gather": {"fixup": "all_gather"},
    "all_gather, 2 lanes": {"fixup": "all_gather"} | LANES,
}
Span = tuple[float, float]  # start and end, µs


def run(book: Book, preset: Preset) -> None:
    """Of the first heads and the preset's length, eager and captured, for each kind of gates."""
    ranks = book.ranks
    if not ranks.captures:
        book.skip("traces", "they are of NCCL's kernels")
        return
    clock = RankClock(ranks.group, ranks.device)
    for gates in GATES:
        for variant, choice in TRACED.items():
            name = f"trace, {gates}, {variant}"
            if (variant == "auto" or gates == LANES_OF) and book.room_for(name):
                with book.failures_of(name):
                    _trace(book, preset, clock, gates, variant, choice)


def _trace(book: Book, preset: Preset, clock: RankClock, gates: str, variant: str, choice: dict[str, Any]) -> None:
    ranks = book.ranks
    case = Case(Shape(preset.trace_tokens, 1, *preset.heads[0], preset.head_dim), gates, preset.dtype, ranks.device)
    ours = Planned(ranks, case, [case.tokens(seed=1)], preset, ranks.size, **choice)
    (call,) = ours.calls
    call()
    about = {"tokens": preset.trace_tokens, "gates": gates, "variant": variant}
    for kind, again in (("captured", clock.capture(call)), ("eager", call)):
        file = re.sub("[^a-z0-9_]+", "_", f"trace_{gates}_{variant}_{kind}")
        path = book.folder / f"{file}.rank{ranks.rank}.json.gz"
        record(clock, again, path)
        found = ranks.together(exchange_of(read_kernels(path), CALLS))
        book.add("traces", about | {"kind": kind, "ranks": found})
        book.say(f"trace, {gates}, {variant}, {kind}: {found[0]}")


def record(clock: RankClock, call: Callable[[], Any], path: Path) -> None:
    """A few calls, each after an alignment, whose own kernel is told from the call's by coming before its marker."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    for measured in (False, True):  # the first one loads the profiler
        with torch.profiler.profile(activities=activities) as profile:
            for _ in range(CALLS if measured else 1):
                clock.align()
                call()
                torch.cuda.synchronize()
    profile.export_chrome_trace(str(path))


def read_kernels(path: Path) -> list[tuple[str, Span]]:
    """(name, span) of every kernel and copy on the device, in order of their starts."""
    with gzip.open(path, "rt") as text:
        events = json.load(text)["traceEvents"]
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    found = [(e["name"], (float(e["ts"]), float(e["ts"]) + float(e["dur"]))) for e in events if e.get("cat") in kinds]
    return sorted(found, key=lambda kernel: kernel[1])


def exchange_of(kernels: list[tuple[str, Span]], num_calls: int) -> dict[str, float]:
    """Per call, in µs: NCCL's kernels, how much of that others run beside, the rest, folds of runs, and the whole call.

    A call begins after the alignment: `_sleep`'s kernel, then one of NCCL's.  NCCL's kernels, and folds by mail, wait
    for the peer, and that wait is in these figures.
    """
    calls: list[list[tuple[str, Span]]] = []
    for name, span in kernels:
        if "spin" in name or "sleep" in name:
            calls.append([])
        elif calls:
            calls[-1].append((name, span))
    nccl = beside = folds = whole = 0.0
    for call in calls:
        first = next((i for i, (name, _) in enumerate(call) if is_nccl(name)), None)
        inside = [] if first is None else call[first + 1 :]
        if not inside:
            continue
        exchanges, others = _union(s for n, s in inside if is_nccl(n)), _union(s for n, s in inside if not is_nccl(n))
        nccl += sum(b - a for a, b in exchanges)
        beside += _overlap(exchanges, others)
        folds += sum(b - a for name, (a, b) in inside if "fold_runs" in name)
        whole += max(b for _, (_, b) in inside) - min(a for _, (a, _) in inside)
    n = max(1, num_calls)
    exposed = nccl - beside
    found = {"nccl_us": nccl, "overlapped_us": beside, "exposed_us": exposed, "fold_us": folds, "call_us": whole}
    return {name: us / n for name, us in found.items()}


def is_nccl(name: str) -> bool:
    return "nccl" in name.lower()


def _union(spans: Iterable[Span]) -> list[Span]:
    merged: list[Span] = []
    for start, stop in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        else:
            merged.append((start, stop))
    return merged


def _overlap(first: list[Span], second: list[Span]) -> float:
    return sum(max(0.0, min(b, d) - max(a, c)) for a, b in first for c, d in second)
