"""Correctness: every fixup, ownership, finish and span, eager and captured, bitwise what one GPU gives; and right.

Each rank computes the world-size-1 result itself, with the same CP chunks, and compares its own rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

import gdncp
from gdncp.bench.cases import Case, Shape, Tokens
from gdncp.bench.multi_gpu.book import Book
from gdncp.bench.multi_gpu.presets import Preset
from gdncp.bench.multi_gpu.ranks import Ranks
from gdncp.bench.multi_gpu.small_cases import CP_CHUNK_LEN, SMALL_CASES, Inputs, SmallCase, make_inputs
from gdncp.bench.multi_gpu.variants import every_choice
from gdncp.bench.reference import chunked, errors
from gdncp.bench.run import summary_of
from gdncp.collectives import peer_memory

# The numeric contract: relative L2 per sequence (or row) and head.  bf16 with beta above 1: twice.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 5e-3, torch.float16: 5e-3}
UNDERFLOW = 1e-36  # what is smaller may be zero in fp32


def run(book: Book, preset: Preset) -> None:
    """The first kernel set on small cases and on a long one."""
    _small_cases(book, preset, preset.check_sets[:1])
    for gates in ("one", "forget"):
        name = f"{preset.large_check[0]} tokens, {gates}"
        if book.room_for(name):
            with book.failures_of(name):
                row = check_large(book.ranks, preset, gates)
                book.add("large", row)
                book.say(f"{name}: {summary(row)}")


def run_others(book: Book, preset: Preset) -> None:
    """The other sets on small cases: a part of its own, since each set has many variants to compile."""
    _small_cases(book, preset, preset.check_sets[1:])


def _small_cases(book: Book, preset: Preset, check_sets: Sequence[tuple[str, torch.dtype, int]]) -> None:
    for backend, dtype, dim in check_sets:
        for case in SMALL_CASES[: preset.num_small_cases]:
            name = f"{backend}, {case.name}"
            if book.room_for(name):
                with book.failures_of(name):
                    row = check_small(book.ranks, case, backend, dtype, dim)
                    book.add("small", {"backend": backend, "dtype": str(dtype).removeprefix("torch."), **row})
                    book.say(f"{name}: {summary(row)}; {row['error']:.1e} off the oracle")


def summary(row: dict[str, Any]) -> str:
    eager, captured = (
        f"{row[equal]} of {row[ran]}" for equal, ran in (("equal", "promised"), ("captured_equal", "captured"))
    )
    return f"{eager} equal, {captured} captured, {len(row['wrong'])} wrong"


@dataclass
class Held:
    """Where one call writes; what it writes in place can be put back."""

    output: torch.Tensor
    states: torch.Tensor  # [N, H, V, K], or the pool
    checkpoints: torch.Tensor | None
    arguments: dict[str, Any]
    fresh_states: torch.Tensor

    def reset(self) -> None:
        self.output.fill_(float("nan"))
        self.states.copy_(self.fresh_states)
        if self.checkpoints is not None:
            self.checkpoints.fill_(float("nan"))


def hold(case: SmallCase, inputs: Inputs, plan: gdncp.PrefillPlan, rank: int) -> Held:
    n, heads, dim = len(case.seq_lens), case.num_state_heads, inputs.initial.shape[-1]
    output = inputs.q.new_empty(plan.num_tokens(rank), heads, dim)
    rows = len(plan.checkpoint_rows(rank))
    checkpoints = inputs.initial.new_empty(rows, heads, dim, dim) if rows else None
    arguments: dict[str, Any] = {"output": output, "state_checkpoints": checkpoints}
    if case.states == "pool":
        states = inputs.initial.new_full((n + 3, heads, dim, dim), 7.0)
        slots = torch.tensor(slots_of(case), dtype=torch.int32, device=states.device)
        states[slots.long()] = inputs.initial
        arguments |= {"state_pool": states, "state_indices": slots}
    else:
        states = torch.zeros_like(inputs.initial)
        arguments["output_state"] = states
        if case.states == "given":
            arguments["initial_state"] = inputs.initial
    return Held(output, states, checkpoints, arguments, states.clone())


def slots_of(case: SmallCase) -> list[int]:
    """Scattered rows of a pool of three rows more than there are sequences."""
    n = len(case.seq_lens)
    return [n + 2 - (2 * i if 2 * i < n else 2 * (n - i) - 1) for i in range(n)]


def check_small(ranks: Ranks, case: SmallCase, backend: str, dtype: torch.dtype, dim: int) -> dict[str, Any]:
    """One row: how many configurations ran, how many had the bits of one GPU, which did not, and the error."""
    inputs = make_inputs(case, dtype, dim, ranks.device)
    oracle = gdncp.gated_delta_rule_reference(
        *inputs[:5],
        seq_lens=case.seq_lens,
        initial_state=inputs.initial,
        checkpoint_every_n_tokens=case.every,
        use_qk_l2norm_in_kernel=case.l2_norm,
        gate_space="log" if case.log_gates else "linear",
    )
    tolerance = TOLERANCE[dtype] * (2 if case.beta_max > 1 and dtype != torch.float32 else 1)

    def bind(plan: gdncp.PrefillPlan, rank: int) -> tuple[Callable[[], gdncp.PrefillResult], Held]:
        held, tokens = hold(case, inputs, plan, rank), inputs.tokens(plan, rank)

        def call() -> gdncp.PrefillResult:
            return gdncp.prefill(
                plan,
                *tokens,
                gate_space="log" if case.log_gates else "linear",
                use_qk_l2norm_in_kernel=case.l2_norm,
                final_state="all" if case.share else "owner",
                forget_below=case.forget_below,
                backend=backend,
                **held.arguments,
            )

        return call, held

    alone: dict[str, Held] = {}  # by span
    tally = Tally()
    worst = 0.0
    for name, choice in every_choice(case.seq_lens, ranks.size, CP_CHUNK_LEN):
        if ranks.out_of_time():
            tally.left_out += 1
            continue
        span = {key: value for key, value in choice.items() if key == "fold_span"}
        try:
            if str(span) not in alone:
                one = _plan(case, 1, dim, **span)
                call, alone[str(span)] = bind(one, 0)
                alone[str(span)].reset()
                call()
                worst = max(worst, off_oracle(case, one, 0, alone[str(span)], oracle))
            plan = _plan(case, ranks.size, dim, **choice)
            call, held = bind(plan, ranks.rank)
            # a capture takes a tenth of a second: of one ownership, and without spans
            also_captured = ranks.captures and choice["ownership"] == "contiguous" and not span
            for captured in (False, True) if also_captured else (False,):
                again = _captured(call, ranks) if captured else call
                held.reset()
                result = again()
                tally.sent_by(name, result)
                if plan.reproducible:
                    equal = same_rows(case, plan, ranks.rank, held, alone[str(span)])
                    tally.promised_one(name, captured, equal)
                else:
                    off = off_oracle(case, plan, ranks.rank, held, oracle)
                    tally.near_one(name, captured, off, tolerance)
        except Exception as error:  # most raise on every rank alike, and the next configuration can run
            tally.verdicts[name] = summary_of(error)
            ranks.synchronize()
    row = tally.together(ranks, worst)
    if not row["error"] <= tolerance:
        row["wrong"].append(f"one GPU is {row['error']:.2g} off the oracle, {tolerance:.0e} allowed")
    return {"case": case.name, "tolerance": tolerance, **row}


def _captured(call: Callable[[], Any], ranks: Ranks) -> Callable[[], None]:
    """A captured graph, which the first eager call has warmed up."""
    torch.cuda.synchronize(ranks.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        call()
    return graph.replay


def _plan(case: SmallCase, world_size: int, dim: int, **choice: Any) -> gdncp.PrefillPlan:
    q, k, v = case.heads
    return gdncp.plan_prefill(
        case.seq_lens,
        world_size=world_size,
        num_q_heads=q,
        num_k_heads=k,
        num_v_heads=v,
        head_dim=dim,
        cp_chunk_len=CP_CHUNK_LEN,
        checkpoint_every_n_tokens=case.every,
        **choice,
    )


class Tally:
    """What became of each configuration on this rank."""

    def __init__(self) -> None:
        self.promised = self.equal = self.captured = self.captured_equal = self.near = self.left_out = 0
        self.verdicts: dict[str, str] = {}  # of configurations that are not as promised
        self.farthest = 0.0  # of those that promise no bits
        self.transports: Counter[str] = Counter()  # what carried the states, eager
        self.by_mail: set[str] = set()  # configurations whose states went through peer memory

    def sent_by(self, name: str, result: gdncp.PrefillResult | None) -> None:
        """None: a graph's replay."""
        if result is not None:
            self.transports[result.fixup.transport] += 1
            if result.fixup.transport == peer_memory.NAME:
                self.by_mail.add(name)

    def promised_one(self, name: str, captured: bool, equal: bool) -> None:
        if captured:
            self.captured += 1
            self.captured_equal += equal
        else:
            self.promised += 1
            self.equal += equal
        if not equal:
            self.verdicts[f"{name}{' captured' if captured else ''}"] = "other bits than one GPU"

    def near_one(self, name: str, captured: bool, error: float, tolerance: float) -> None:
        self.near += 1
        self.farthest = max(self.farthest, error)
        if not error <= tolerance:
            self.verdicts[f"{name}{' captured' if captured else ''}"] = f"{error:.2g} off the oracle"

    def together(self, ranks: Ranks, worst: float) -> dict[str, Any]:
        """Over all ranks: a configuration is as good as on its worst rank."""
        everyone = ranks.together((self, worst))
        tallies = [tally for tally, _ in everyone]
        wrong = [f"rank {r}: {name}: {what}" for r, t in enumerate(tallies) for name, what in t.verdicts.items()]
        return {
            "promised": min(t.promised for t in tallies),
            "equal": min(t.equal for t in tallies),
            "captured": min(t.captured for t in tallies),
            "captured_equal": min(t.captured_equal for t in tallies),
            "without_promise": min(t.near for t in tallies),
            "without_promise_error": max(t.farthest for t in tallies),
            "left_out": max(t.left_out for t in tallies),
            "transports": dict(tallies[0].transports),
            "by_peer_memory": sorted(tallies[0].by_mail),
            "error": max(error for _, error in everyone),
            "wrong": wrong,
        }


def same_rows(case: SmallCase, plan: gdncp.PrefillPlan, rank: int, held: Held, alone: Held) -> bool:
    """Whether this rank's rows have the bits of one GPU, and the pool's other rows what they held."""
    ranges = plan.token_ranges(rank)
    equal = all(torch.equal(x, alone.output[a:b]) for x, (a, b) in zip(_output(plan, rank, held), ranges, strict=True))
    rows = _state_rows(case, plan, rank)
    equal &= torch.equal(held.states[rows], alone.states[rows])
    if case.states == "pool":
        others = [row for row in range(len(held.states)) if row not in slots_of(case)]
        equal &= torch.equal(held.states[others], held.fresh_states[others])
    if held.checkpoints is not None and alone.checkpoints is not None:
        equal &= torch.equal(held.checkpoints, alone.checkpoints[list(plan.checkpoint_rows(rank))])
    return equal


def _output(plan: gdncp.PrefillPlan, rank: int, held: Held) -> Sequence[torch.Tensor]:
    """Outputs of each range that the rank holds."""
    return held.output.split([b - a for a, b in plan.token_ranges(rank)])


def _state_rows(case: SmallCase, plan: gdncp.PrefillPlan, rank: int) -> list[int]:
    """Rows of `states` that this rank has to have: of sequences that end on it, or of all."""
    ends = [i for i in range(len(case.seq_lens)) if case.share or plan.final_state_owner(i) == rank]
    slots = slots_of(case) if case.states == "pool" else list(range(len(case.seq_lens)))
    return [slots[i] for i in ends]


def off_oracle(case: SmallCase, plan: gdncp.PrefillPlan, rank: int, held: Held, oracle: Any) -> float:
    """The worst relative L2 error of this rank's rows: per piece of output, state row and checkpoint, and head."""
    worst = 0.0
    ends = [i for i in range(len(case.seq_lens)) if case.share or plan.final_state_owner(i) == rank]
    pairs = [(held.states[_state_rows(case, plan, rank)], oracle.final_state[ends])]
    if held.checkpoints is not None:
        pairs.append((held.checkpoints, oracle.checkpoints[list(plan.checkpoint_rows(rank))]))
    starts = plan.seq_starts
    for (a, b), rows in zip(plan.token_ranges(rank), _output(plan, rank, held), strict=True):
        for start, stop in pairwise(starts):  # per sequence inside the range
            low, high = max(a, start), min(b, stop)
            if low < high:
                pairs.append(
                    (rows[None, low - a : high - a].transpose(1, 2), oracle.output[None, low:high].transpose(1, 2))
                )
    for found, expected in pairs:
        if expected.numel():
            difference = (found.double().cpu() - expected).flatten(2).norm(dim=2)
            relative = (difference - UNDERFLOW).clamp(min=0) / (expected.flatten(2).norm(dim=2) + UNDERFLOW)
            worst = max(worst, float(relative.nan_to_num(torch.inf, torch.inf).max()))
    return worst


# ---- one long case


def check_large(ranks: Ranks, preset: Preset, gates: str) -> dict[str, Any]:
    """Every choice of plan on one long sequence; one GPU is held against float64 as well."""
    (tokens, length), (k, v) = preset.large_check, preset.heads[0]
    case = Case(Shape(tokens, 1, k, v, preset.head_dim), gates, preset.dtype, ranks.device)
    given = case.tokens(seed=3)
    parts = (given.q, given.k, given.v, given.log_alpha, given.beta)
    heads: dict[str, Any] = dict(num_q_heads=k, num_k_heads=k, num_v_heads=v, head_dim=preset.head_dim)

    def call(plan: gdncp.PrefillPlan, rank: int) -> gdncp.PrefillResult:
        ranges = plan.token_ranges(rank)
        own = parts if plan.world_size == 1 else [torch.cat([x[a:b] for a, b in ranges] or [x[:0]]) for x in parts]
        return gdncp.prefill(plan, *own, gate_space="log", backend=preset.engine)

    def captured(plan: gdncp.PrefillPlan, rank: int) -> gdncp.PrefillResult:
        results: list[gdncp.PrefillResult] = []
        replay = _captured(lambda: results.append(call(plan, rank)), ranks)
        results[0].output.zero_()
        replay()
        ranks.synchronize()
        return results[0]

    alone: dict[str, gdncp.PrefillResult] = {}
    tally, worst = Tally(), 0.0
    for name, choice in every_choice([tokens], ranks.size, length):
        if ranks.out_of_time():
            tally.left_out += 1
            continue
        span = {key: value for key, value in choice.items() if key == "fold_span"}
        try:
            if str(span) not in alone:
                one = gdncp.plan_prefill([tokens], cp_chunk_len=length, profile=preset.profile, **heads, **span)
                alone[str(span)] = call(one, 0)
                if not span and ranks.rank == 0:
                    worst = _off_float64(case, given, alone[str(span)], tally)
            plan = gdncp.plan_prefill(
                [tokens], world_size=ranks.size, cp_chunk_len=length, profile=preset.profile, **heads, **choice
            )
            runs = (call, captured) if ranks.captures and choice["ownership"] == "contiguous" else (call,)
            for run_it in runs:
                result = run_it(plan, ranks.rank)
                tally.sent_by(name, None if run_it is captured else result)
                pairs = _rows_of_both(plan, ranks.rank, result, alone[str(span)])
                if plan.reproducible:
                    tally.promised_one(name, run_it is captured, all(torch.equal(x, y) for x, y in pairs))
                else:
                    off = max((float((x.float() - y.float()).norm() / y.float().norm()) for x, y in pairs), default=0.0)
                    tally.near_one(name, run_it is captured, off, TOLERANCE[preset.dtype])
        except Exception as error:
            tally.verdicts[name] = summary_of(error)
            ranks.synchronize()
    row = tally.together(ranks, worst)
    if not row["error"] <= TOLERANCE[preset.dtype]:
        row["wrong"].append(f"one GPU is {row['error']:.2g} off float64")
    return {"tokens": tokens, "heads": f"{k}/{v}", "gates": gates, "cp_chunk_len": length, **row}


def _rows_of_both(
    plan: gdncp.PrefillPlan, rank: int, result: gdncp.PrefillResult, alone: gdncp.PrefillResult
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of this rank's rows and one GPU's: of each range's outputs, and of the final state where it ends here."""
    ranges = plan.token_ranges(rank)
    pieces = result.output.split([b - a for a, b in ranges])
    pairs = [(x, alone.output[a:b]) for x, (a, b) in zip(pieces, ranges, strict=True)]
    assert result.final_state is not None and alone.final_state is not None
    if plan.final_state_owner(0) == rank:
        pairs.append((result.final_state, alone.final_state))
    return pairs


def _off_float64(case: Case, tokens: Tokens, result: gdncp.PrefillResult, tally: Tally) -> float:
    """The worst head's relative L2 error.  One rank looks: what goes wrong must not keep it from the others."""
    assert result.final_state is not None
    try:
        return errors(case, result.output, result.final_state, chunked(case, tokens)).worst
    except Exception as error:
        tally.verdicts["float64"] = summary_of(error)
        return float("inf")
