"""One run: every case on every engine, first right, then timed; rows as they will be in the JSON."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch

from gdncp.bench.cases import Case, Tokens
from gdncp.bench.engines import Bound, Engine, Result
from gdncp.bench.ours import Ours
from gdncp.bench.peers import peers
from gdncp.bench.reference import Truth, errors, truth
from gdncp.bench.timing import Clock, Sample, host_microseconds, interleave

SCHEMA = 1  # of the JSON
# Of the worst sequence and head, relative L2.  The contract for bf16 is 5e-3, and 1e-2 is plainly wrong: between them,
# so that a peer that rounds once more than we do is still timed (its error is in the table).
TOLERANCE = {torch.bfloat16: 8e-3, torch.float16: 8e-3, torch.float32: 1e-4}

MIN_SETS, MAX_SETS = 3, 16  # input sets to rotate over
CACHES = 3  # the sets together are this many times the L2 cache, so that no call finds its inputs there
ROUND_MS = 30.0  # device time of one engine in one round, about
MIN_CALLS, MAX_CALLS = 3, 30  # in a round
HOST_CALLS = 21
MAX_HOLD_MS = 50.0  # an engine that takes longer to enqueue waits for its host, and shows it
STAGE_CALLS = 11


@dataclass
class Row:
    """One engine on one case.  Absent figures are None."""

    seq_len: int
    num_seqs: int
    num_k_heads: int
    num_v_heads: int
    head_dim: int
    dtype: str
    gates: str
    engine: str
    ours: bool
    status: str = "ok"  # or "wrong" (no times), "failed", "rejected"
    reason: str | None = None
    reference: str | None = None
    output_error: float | None = None  # relative L2 over all tokens and heads
    output_error_worst: float | None = None  # of the worst sequence and head
    state_error: float | None = None
    state_error_worst: float | None = None
    gpu_ms: float | None = None  # the smaller of the next two
    events_ms: float | None = None  # between device events around eager calls, the stream held busy before the first
    graph_ms: float | None = None  # of a call in a CUDA graph of one call per input set
    graph_reason: str | None = None  # why there is no graph
    events_ms_rounds: list[float] = field(default_factory=list)
    graph_ms_rounds: list[float] = field(default_factory=list)
    host_us: float | None = None  # until an eager call returns, the device idle when it begins
    first_call_s: float | None = None  # compilation included
    peak_bytes: int | None = None  # beyond the inputs, results included
    scratch_per_token_head: float | None = None  # bytes per token and value head, results apart
    floor_ms: float | None = None
    floor_by: str | None = None  # "tensor cores" or "HBM"
    floor_share: float | None = None  # floor_ms / gpu_ms
    stages_ms: dict[str, float] | None = None
    detail: dict[str, Any] = field(default_factory=dict)
    clocks: dict[str, str | None] = field(default_factory=dict)


@dataclass
class Options:
    rounds: int = 5
    tolerance: float | None = None  # None: by dtype
    stages: bool = False
    only_first_calls: bool = False  # compile and stop
    deadline: float = math.inf  # on time.monotonic()


class DeviceLost(RuntimeError):
    """The device answers no more (after an illegal access, say): nothing that follows would mean anything."""

    rows: Sequence[Row] = ()  # what the case at hand gave before


def all_engines(cp_chunk_len: int | None = None) -> list[Engine]:
    return [*(Ours(name, cp_chunk_len) for name in ("hopper", "triton", "torch")), *peers()]


def chosen(engines: Sequence[Engine], names: Sequence[str]) -> list[Engine]:
    """The engines that `names` name, whole ("flashinfer:cp") or by library ("flashinfer").  ValueError if none."""
    for name in names:
        if not any(name in (engine.name, engine.name.split(":")[0]) for engine in engines):
            raise ValueError(f"engines must be among {', '.join(engine.name for engine in engines)}, got {name!r}")
    return [engine for engine in engines if engine.name in names or engine.name.split(":")[0] in names]


@dataclass
class _Entry:
    """An engine that gave the right results on the case at hand, with its times so far."""

    row: Row
    bound: Bound
    num_calls: int = MIN_CALLS
    hold_ms: float = 0.0
    replay: Callable[[], Any] | None = None


def new_row(case: Case, engine: Engine) -> Row:
    s = case.shape
    dtype = str(case.dtype).removeprefix("torch.")
    return Row(
        s.seq_len, s.num_seqs, s.num_k_heads, s.num_v_heads, s.head_dim, dtype, case.gates, engine.name, engine.ours
    )


def run_case(
    case: Case,
    engines: Sequence[Engine],
    clock: Clock,
    options: Options,
    *,
    ceilings: dict[str, float],
    l2_bytes: int = 0,
) -> tuple[list[Row], list[str]]:
    """Rows of one case, and the names of the engines that the deadline left out.  Raises DeviceLost."""
    rows: list[Row] = []
    try:
        left_out = _run_engines(case, engines, clock, options, l2_bytes, rows)
    except DeviceLost as lost:
        lost.rows = rows
        raise
    for row in rows:
        _against_floor(row, case, ceilings)
    return rows, left_out


def _run_engines(
    case: Case, engines: Sequence[Engine], clock: Clock, options: Options, l2_bytes: int, rows: list[Row]
) -> list[str]:
    """Append a row for each engine; return the names of those left out."""
    sets = [case.tokens(seed=1)] if options.only_first_calls else list(_input_sets(case, l2_bytes))
    true = None if options.only_first_calls else truth(case, sets[0])
    entries, left_out = [], []
    for engine in engines:
        if time.monotonic() > options.deadline:
            left_out.append(engine.name)
            continue
        row = new_row(case, engine)
        rows.append(row)
        reason = engine.rejection_reason(case)
        if reason is not None:
            row.status, row.reason = "rejected", reason
            continue
        with _failures_of(row, clock):
            bound = _first_calls(row, case, engine, sets, clock)
            if true is not None and _is_right(row, case, bound.calls[0](), true, options):
                entries.append(_Entry(row, bound))
    for entry in entries:
        assert true is not None
        with _failures_of(entry.row, clock):
            _prepare_timing(entry, case, clock, options, true)
    _time([entry for entry in entries if entry.row.status == "ok"], clock, options.rounds)
    return left_out


def _input_sets(case: Case, l2_bytes: int) -> Iterator[Tokens]:
    first = case.tokens(seed=1)
    yield first
    for i in range(1, min(MAX_SETS, max(MIN_SETS, -(-CACHES * l2_bytes // first.num_bytes)))):
        yield case.tokens(seed=1 + i)


@contextmanager
def _failures_of(row: Row, clock: Clock) -> Iterator[None]:
    """What an engine raises is its row's; a device that is gone afterwards ends the run."""
    try:
        yield
    except Exception as error:
        row.status, row.reason = "failed", summary_of(error)
        try:
            clock.synchronize()
        except Exception as lost:
            raise DeviceLost(f"{row.engine}: {row.reason}") from lost


def summary_of(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:400]}"


def _first_calls(row: Row, case: Case, engine: Engine, sets: Sequence[Tokens], clock: Clock) -> Bound:
    """Bind, call on every input set, and measure memory; what the library keeps for itself counts as scratch."""
    before = clock.allocated()
    start = time.perf_counter()
    bound = engine.bind(case, sets)
    result = bound.calls[0]()
    clock.synchronize()
    row.first_call_s = time.perf_counter() - start
    row.detail = bound.detail
    result_bytes = sum(x.numel() * x.element_size() for x in result)
    del result
    for call in bound.calls[1:]:
        call()
    peak = clock.peak(bound.calls[-1])  # so that what is checked next has to overwrite another set's results
    if peak:
        row.peak_bytes = peak - before
        row.scratch_per_token_head = (peak - before - result_bytes) / (case.shape.num_tokens * case.shape.num_v_heads)
    return bound


def _is_right(row: Row, case: Case, result: Result, true: Truth, options: Options) -> bool:
    """Fill in the errors; what is wrong gets no time."""
    expected = (true.output.shape, true.final_state.shape)
    if (result.output.shape, result.final_state.shape) != expected:
        row.status, row.reason = "wrong", f"results of shapes {tuple(x.shape for x in result)}, not {expected}"
        return False
    error = errors(case, result.output, result.final_state, true)
    row.reference = true.by
    row.output_error, row.output_error_worst, row.state_error, row.state_error_worst = error
    tolerance = TOLERANCE[case.dtype] if options.tolerance is None else options.tolerance
    if not error.worst <= tolerance:
        row.status, row.reason = "wrong", f"error of {error.worst:.2g} in the worst sequence and head"
        return False
    return True


def _prepare_timing(entry: _Entry, case: Case, clock: Clock, options: Options, true: Truth) -> None:
    """How many calls a round takes, host time, stage times, and the graph, whose results are checked as well."""
    row, calls = entry.row, entry.bound.calls
    if clock.host_matters:
        row.host_us = host_microseconds(clock, calls, HOST_CALLS)
        entry.hold_ms = min(MAX_HOLD_MS, 2 * row.host_us / 1e3)
    typical = max(1e-3, sorted(clock.times(calls, 3, entry.hold_ms))[1])
    entry.num_calls = int(min(MAX_CALLS, max(MIN_CALLS, ROUND_MS / typical)))
    if options.stages and entry.bound.stages is not None:
        row.stages_ms = _stages(entry.bound.stages, clock, entry.hold_ms)
    try:
        # the first set goes last: the graph's last results are those that have a reference
        replay, result = clock.capture(calls[::-1])
        replay()
        clock.synchronize()
    except Exception as error:  # capture is optional
        row.graph_reason = summary_of(error)
        clock.synchronize()
        return
    entry.replay = replay
    if not _is_right(row, case, result, true, options):
        row.reason = f"in a graph: {row.reason}"


def _stages(stages: Callable[[], dict[str, float]], clock: Clock, hold_ms: float) -> dict[str, float]:
    """Median ms per stage."""
    found: dict[str, list[float]] = {}
    for _ in range(STAGE_CALLS):
        clock.hold(hold_ms)
        for name, seconds in stages().items():
            found.setdefault(name, []).append(1e3 * seconds)
    return {name: Sample([times]).median or 0.0 for name, times in found.items()}


def _time(entries: Sequence[_Entry], clock: Clock, rounds: int) -> None:
    """All engines in turn, round after round; eager calls and graphs are separate measures."""
    measures: dict[tuple[str, int], Callable[[], Sequence[float]]] = {}
    for i, entry in enumerate(entries):
        measures["events", i] = partial(_round, entry, clock, entry.bound.calls, entry.num_calls)
        if entry.replay is not None:
            repeats = max(MIN_CALLS, -(-entry.num_calls // len(entry.bound.calls)))
            measures["graph", i] = partial(_round, entry, clock, [entry.replay], repeats)
    samples = interleave(measures, rounds)
    for i, entry in enumerate(entries):
        if entry.row.status != "ok":
            continue
        row, sets = entry.row, len(entry.bound.calls)
        row.events_ms, row.events_ms_rounds = samples["events", i].median, samples["events", i].medians
        if ("graph", i) in samples:
            row.graph_ms_rounds = [ms / sets for ms in samples["graph", i].medians]
            row.graph_ms = Sample([row.graph_ms_rounds]).median
        row.gpu_ms = min((x for x in (row.events_ms, row.graph_ms) if x is not None), default=None)


def _round(entry: _Entry, clock: Clock, calls: Sequence[Callable[[], Any]], count: int) -> list[float]:
    """One round's times; the first call, which follows another engine's, is left out."""
    times: list[float] = []
    if entry.row.status == "ok":
        with _failures_of(entry.row, clock):
            times = clock.times(calls, count + 1, entry.hold_ms)[1:]
    return times


def _against_floor(row: Row, case: Case, ceilings: dict[str, float]) -> None:
    """The least time: tensor-core operations at the measured rate, or bytes at the measured bandwidth."""
    if not ceilings:
        return
    size = torch.empty(0, dtype=case.dtype).element_size()
    by_flops = 1e3 * case.shape.tensor_flops() / ceilings["flops"]
    by_bytes = 1e3 * case.shape.hbm_bytes(size) / ceilings["bytes"]
    row.floor_ms = max(by_flops, by_bytes)
    row.floor_by = "tensor cores" if by_flops >= by_bytes else "HBM"
    if row.gpu_ms:
        row.floor_share = row.floor_ms / row.gpu_ms


def document(
    environment: dict[str, Any], rows: Sequence[Row], absent: dict[str, str], left_out: Sequence[str], **more: Any
) -> dict[str, Any]:
    """The JSON of a run."""
    return {
        "schema": SCHEMA,
        "environment": environment,
        **more,
        "absent": absent,
        "left_out": list(left_out),
        "rows": [asdict(row) for row in rows],
    }
