"""Times of `gdncp.prefill` over grids of CP chunks, beside what the planner predicts: is its choice the best there is?

    python bench/sweep_cp_chunk_len.py > sweep.jsonl                             # the shapes of the peers-h200 preset
    python bench/sweep_cp_chunk_len.py --shapes 32768x1:16/32 --grids auto 6592 5632+6784 --stages

A grid is CP_CHUNK_LEN, FIRST+CP_CHUNK_LEN, or "auto", the planner's choice; left out, that and the grids that the cost
model thinks near the best for any of the gates.  Gates are of 1, and with half-lives log-spaced from 4 to 16384 tokens
over the heads.  One JSON line a grid: a call's ms by replay of a CUDA graph over rotated input sets (on a CPU, of the
call), the predicted ms, and the error against the unsplit run; above the tolerance there is no time.  Then, on stderr,
how far behind the best the planner's choice is.  Profiles to refit are in `gdncp/plan/machines/`.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch

import gdncp
from gdncp.bench.cases import COMPARED, GATES, PRESETS, Case, Shape, Tokens
from gdncp.bench.timing import Clock, clock_of
from gdncp.plan.choose import typical_half_lives
from gdncp.plan.layout import Grid

TOLERANCE = 8e-3  # relative L2 of the worst head: two bf16 runs that round differently are up to 5e-3 apart
COUNTS = 10  # of CP chunks, at most
RATIOS = (0.6, 0.75, 0.9, 1.0, 1.1, 1.25)  # of first CP chunks to the others
NUM_SETS, ROUNDS, STAGE_CALLS = 3, 15, 11


def plan_of(case: Case, grid: Grid | None, *, gates_known: bool) -> gdncp.PrefillPlan:
    s = case.shape
    return gdncp.plan_prefill(
        case.seq_lens,
        num_q_heads=s.num_k_heads,
        num_k_heads=s.num_k_heads,
        num_v_heads=s.num_v_heads,
        head_dim=s.head_dim,
        cp_chunk_len=grid and grid.length,
        first_cp_chunk_len=grid and grid.first,
        head_half_lives=_half_lives(case) if gates_known else None,
        profile=gdncp.plan.default_profile(case.device.type),
    )


def _half_lives(case: Case) -> list[float]:
    heads = case.shape.num_state_heads
    return typical_half_lives(heads) if case.gates == "forget" else [math.inf] * heads


def predicted_ms(case: Case, grid: Grid) -> dict[str, float]:
    predicted = plan_of(case, grid, gates_known=True).predicted
    return {stage: 1e3 * seconds[0] for stage, seconds in predicted.items()}


def unsplit(case: Case) -> Grid:
    whole = math.ceil(case.shape.seq_len / 64) * 64
    return Grid(whole, whole)


def grids_near_the_best(case: Case, near: float) -> list[Grid]:
    """Grids of equal CP chunks, and for some of their counts with first ones of other lengths.

    near: times the least predicted time that a grid may take.
    """
    whole = unsplit(case).length

    def of(count: int, ratio: float) -> Grid:
        length = math.ceil(whole / 64 / (count - 1 + ratio)) * 64
        return Grid(length if ratio == 1 else whole - (count - 1) * length, length)

    def seconds(grid: Grid) -> float:
        return sum(predicted_ms(case, grid).values())

    equal = {count: seconds(of(count, 1.0)) for count in range(1, min(128, whole // 256) + 1)}
    least = min(equal.values())
    counts = [count for count in sorted(equal, key=lambda c: equal[c]) if equal[count] <= near * least][:COUNTS]
    found = {of(count, ratio) for count in counts for ratio in RATIOS if count > 1} | {unsplit(case)}
    usable = [grid for grid in found if min(grid) >= 256 or grid == unsplit(case)]
    return sorted((grid for grid in usable if seconds(grid) <= near * least), key=lambda grid: (seconds(grid), grid))


def parse_grid(text: str, case: Case) -> Grid:
    if text == "auto":
        return plan_of(case, None, gates_known=False).grid
    match = re.fullmatch(r"(?:(\d+)\+)?(\d+)", text)
    if not match:
        raise SystemExit(f"--grids must be auto, CP_CHUNK_LEN or FIRST+CP_CHUNK_LEN, got {text!r}")
    return Grid(int(match[1] or match[2]), int(match[2]))


class Calls:
    """Calls of one plan, one per input set; all write the same results."""

    def __init__(self, case: Case, plan: gdncp.PrefillPlan, sets: Sequence[Tokens], backend: str) -> None:
        self.output, self.final_state = case.empty_results()
        self._words = {"scale": case.scale, "gate_space": "log", "backend": backend}
        self._words |= {"output": self.output, "output_state": self.final_state}
        self._plan, self._sets = plan, sets

    def run(self, tokens: Tokens, **words: Any) -> gdncp.PrefillResult:
        t = tokens
        return gdncp.prefill(self._plan, t.q, t.k, t.v, t.log_alpha, t.beta, **self._words, **words)

    def all(self) -> list[Callable[[], Any]]:
        """The first set last, so that its results stay."""
        return [partial(self.run, tokens) for tokens in reversed(self._sets)]


def measured_ms(calls: Calls, clock: Clock, device: torch.device) -> float:
    if device.type != "cuda":
        return median(clock.times(calls.all(), ROUNDS))
    replay, _ = clock.capture(calls.all())
    replay()
    return median(clock.times([replay], ROUNDS)) / len(calls.all())


def stages_ms(calls: Calls, tokens: Tokens, clock: Clock) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for _ in range(STAGE_CALLS):
        clock.hold(2.0)
        for stage, seconds in calls.run(tokens, timed=True).timings.items():
            found.setdefault(stage, []).append(1e3 * seconds)
    return {stage: median(times) for stage, times in found.items()}


def worst_error(a: Calls, b: Calls) -> float:
    """Relative L2 between two runs' results, of the worst head; inf where something is not finite."""

    def relative(x: torch.Tensor, y: torch.Tensor, dims: tuple[int, ...]) -> float:
        ratio = (x.double() - y.double()).square().sum(dims) / y.double().square().sum(dims)
        return float(ratio.max().sqrt().nan_to_num(math.inf))

    return max(relative(a.output, b.output, (0, 2)), relative(a.final_state, b.final_state, (0, 2, 3)))


def sweep(case: Case, grids: Sequence[Grid], backend: str, with_stages: bool) -> Iterator[dict[str, Any]]:
    clock, sets = clock_of(case.device), [case.tokens(seed) for seed in range(1, NUM_SETS + 1)]
    whole = Calls(case, plan_of(case, unsplit(case), gates_known=False), sets, backend)
    whole.run(sets[0])
    for grid in grids:
        plan = plan_of(case, grid, gates_known=False)
        calls = Calls(case, plan, sets, backend)
        for call in calls.all():
            call()
        predicted = predicted_ms(case, grid)
        row: dict[str, Any] = {
            "shape": str(case.shape),
            "gates": case.gates,
            "cp_chunks": plan.num_cp_chunks // case.shape.num_seqs,
            "first": grid.first,
            "cp_chunk_len": grid.length,
            "last": plan.cp_chunks[-1].num_tokens,
            "error": worst_error(calls, whole),
            "ms": None,
            "predicted_ms": sum(predicted.values()),
        }
        if row["error"] <= TOLERANCE:
            row["ms"] = measured_ms(calls, clock, case.device)
            row["error"] = max(row["error"], worst_error(calls, whole))  # of the timed calls too
        if with_stages:
            row |= {"stages_ms": stages_ms(calls, sets[0], clock), "predicted_stages_ms": predicted}
        yield row


def verdict(rows: Sequence[dict[str, Any]], chosen: Grid) -> str:
    timed = [row for row in rows if row["ms"] is not None]
    if not timed:
        return "no grid gave right results"
    best = min(timed, key=lambda row: row["ms"])
    where = f"{best['shape']} {best['gates']}: best {best['first']}+{best['cp_chunk_len']} in {best['ms']:.4f} ms"
    own = [row["ms"] for row in timed if (row["first"], row["cp_chunk_len"]) == chosen]
    behind = f"{100 * (own[0] / best['ms'] - 1):.1f} % behind" if own else "not timed"
    errors = median(abs(row["predicted_ms"] / row["ms"] - 1) for row in timed)
    return f"{where}; chosen {chosen.first}+{chosen.length}, {behind}; predictions off by {100 * errors:.0f} % (median)"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=PRESETS["peers-h200"].shapes)
    parser.add_argument("--gates", nargs="+", choices=tuple(GATES), default=COMPARED)
    parser.add_argument("--grids", nargs="+", help="auto, CP_CHUNK_LEN or FIRST+CP_CHUNK_LEN")
    parser.add_argument("--near", type=float, default=1.25, help="times the least predicted time, of grids left out")
    parser.add_argument("--backend", default="hopper")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--stages", action="store_true", help="time and predict each stage, too")
    args = parser.parse_args(arguments)
    if not args.near >= 1:
        parser.error(f"--near must be at least 1, got {args.near}")
    if torch.device(args.device).type == "cuda" and not torch.cuda.is_available():
        parser.error("--device is cuda, and torch sees no GPU")
    for shape in args.shapes:
        cases = [
            Case(Shape.parse(shape, args.head_dim), gates, torch.bfloat16, torch.device(args.device))
            for gates in args.gates
        ]
        chosen = parse_grid("auto", cases[0])
        grids = [parse_grid(text, cases[0]) for text in args.grids or ()]
        grids = grids or [chosen, *(grid for case in cases for grid in grids_near_the_best(case, args.near))]
        for case in cases:
            rows = []
            for row in sweep(case, list(dict.fromkeys(grids)), args.backend, args.stages):
                print(json.dumps(row), flush=True)
                rows.append(row)
            print(verdict(rows, chosen), file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
