"""`python -m gdncp.tune`: measure the launch choices of the plain Triton kernels on this GPU and write a launch table.

    python -m gdncp.tune --out sm_90.json
    python -m gdncp.tune --out sm_90.json --dims 128x128 --precisions tf32 --tokens 32768 --heads 16/32
    python -m gdncp.tune --dry-run                       # lists the candidates; needs no GPU

Candidates are compiled first, in parallel; those that the compile report would refuse, whose results differ from the
torch backend's, or that do not launch get no time.  The table holds what was measured, before the rows of the table in
use, and is complete after each pair of head dims.  To use it, set GDNCP_LAUNCH_TABLE to its path on every rank, or put
it into gdncp_kernels/launch_tables/.  Exit codes: 0 it was written, 1 nothing could be measured, 2 the command line is
wrong, or there is no GPU or no Triton.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gdncp.backends.triton_version import need_triton

if __name__ == "__main__":
    need_triton("gdncp.tune")

import triton
from triton import knobs

from gdncp import store
from gdncp.api import prefill
from gdncp.backends import get_backend
from gdncp.backends.base import TokenInputs
from gdncp.bench.timing import Clock, clock_of
from gdncp.plan.choose import balanced
from gdncp.work import CHUNK
from gdncp_kernels import launch_table
from gdncp_kernels.compile_report import DIMS, INPUTS, SHARED_KIB, Variants, compile_variants
from gdncp_kernels.launch_table import SCANS, LaunchTable, Row
from gdncp_kernels.stage_calls import plan_of, stage_calls

TOKENS_OF = {"tf32": "bf16", "ieee": "fp32"}  # what a dot precision is measured on
TOLERANCE = {"tf32": 5e-3, "ieee": 2e-5}  # relative L2 against the torch backend: the numeric contract
STAGE_OF = {"chunk_bounds": "precompute_mn", "cut": "precompute_mn", "scan": "precompute_mn"}  # else of the same name
REPEATS = 15
SMALL = 1100  # tokens that results are held against the torch backend on
GAIN = 0.02  # a choice is replaced by one that is faster by this share at least: less is noise
FORGET_BELOW = 2.0**-16


class Problem(NamedTuple):
    """One row to be found."""

    kernel: str
    precision: str
    k_dim: int
    v_dim: int

    def row(self, num_warps: int, block: int | None = None, slice_: int | None = None) -> Row:
        return Row(self.kernel, num_warps, 1, block, slice_, self.precision, self.k_dim, self.v_dim)

    def __str__(self) -> str:
        return f"{self.kernel} {self.k_dim}x{self.v_dim} {self.precision}"


def problems(dims: Sequence[tuple[int, int]], precisions: Sequence[str]) -> list[Problem]:
    """Folds are IEEE and square; the kernels without dots are looked up by precision all the same."""
    found = []
    for (k_dim, v_dim), precision, kernel in product(dims, precisions, launch_table.KERNELS):
        if kernel != "fold":
            found.append(Problem(kernel, precision, k_dim, v_dim))
        elif precision == precisions[0]:
            found.append(Problem(kernel, "ieee", k_dim, k_dim))
    return list(dict.fromkeys(found))


def candidates(problem: Problem) -> list[Row]:
    _, precision, k_dim, v_dim = problem
    smaller = min(k_dim, v_dim)
    if problem.kernel in SCANS:
        blocks = [b for b in (16, 32, 64) if b <= smaller]
        slices = [s for s in (32, 64, 128) if s <= k_dim] or [k_dim]
        # with eight warps where wgmma may be used, Triton 3.6 gave wrong products of register operands on an H200
        warps = (4, 8) if precision == "ieee" else (4,)
        # loads that travel ahead paid where slices are small; two stages never did
        return [replace(problem.row(w, b, s), num_stages=n) for w, b, s, n in product(warps, blocks, slices, (1, 3))]
    if problem.kernel == "fold":
        return [problem.row(w, b) for w, b in product((1, 2, 4), (16, 32, 64)) if b <= k_dim]
    return [problem.row(w) for w in ((1, 2, 4) if problem.kernel == "cut" else (1, 2, 4, 8))]


def refused(arch: int, row: Row) -> str | None:
    """Why the compile report would refuse the launches of this row; None if it would not.  Fills the compile cache."""
    assert row.precision is not None and row.k_dim is not None and row.v_dim is not None
    variants = Variants(arch, "triton", TOKENS_OF[row.precision], row.k_dim, row.v_dim)
    with launch_table.using(launch_table.table_of(arch).preferring((row,))):
        found = [c.problems for c in compile_variants(variants, only=f"{row.kernel}_kernel") if c.problems]
    return "; ".join(found[0]) if found else None


def make_inputs(
    num_tokens: int, heads: tuple[int, int], precision: str, k_dim: int, v_dim: int, device: torch.device
) -> TokenInputs:
    """Random tokens whose heads' half-lives go from 16 tokens to never."""
    random = torch.Generator(device).manual_seed(0)
    dtype, how = INPUTS[TOKENS_OF[precision]]

    def normal(num_heads: int, dim: int) -> torch.Tensor:
        return torch.randn(num_tokens, num_heads, dim, generator=random, device=device)

    q, k = (torch.nn.functional.normalize(normal(heads[0], k_dim), dim=-1).to(dtype) for _ in range(2))
    log_gate = -torch.logspace(-1.4, -5, heads[1], device=device).expand(num_tokens, -1).clone()
    log_gate[:, -1] = 0.0
    beta = torch.rand(num_tokens, heads[1], generator=random, device=device)
    return TokenInputs(q, k, normal(heads[1], v_dim).to(dtype), log_gate, beta, k_dim**-0.5, "log", precision=how)


def results(inputs: TokenInputs, backend: str) -> list[torch.Tensor]:
    i = inputs
    plan = plan_of(i, cp_chunk_len=256, checkpoint_every_n_tokens=64)
    found = prefill(
        plan, i.q, i.k, i.v, i.gate, i.beta, gate_space="log", backend=backend, precision=i.precision, scale=i.scale
    )
    assert found.final_state is not None and found.checkpoints is not None
    return [found.output, found.final_state, found.checkpoints]


def error(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """Relative L2, the worst of all; NaN where one is not finite."""
    errors = [
        ((a.double() - b.double()).norm() / b.double().norm()).item() for a, b in zip(found, expected, strict=True)
    ]
    return max(errors) if all(e == e for e in errors) else float("nan")


class Bench:
    """Checks and times rows for one pair of head dims and one precision."""

    def __init__(
        self, table: LaunchTable, problem: Problem, num_tokens: int, heads: tuple[int, int], device: torch.device
    ):
        self._table, self._clock = table, clock_of(device)
        _, self._precision, k_dim, v_dim = problem
        make = partial(make_inputs, precision=self._precision, k_dim=k_dim, v_dim=v_dim, device=device)
        self._small = make(SMALL, (1, 2))
        self._expected = results(self._small, "torch")
        inputs = make(num_tokens, heads)
        assert inputs.gate is not None
        inputs = replace(inputs, gate=torch.zeros_like(inputs.gate))  # so that scans read every token
        plan = plan_of(inputs)
        if plan.num_cp_chunks == 1:  # of which stage 2 launches nothing
            plan = plan_of(inputs, cp_chunk_len=balanced(num_tokens))
        self._calls = stage_calls(get_backend("triton"), inputs, plan, FORGET_BELOW)

    def wrong(self, row: Row) -> str | None:
        """Why a row may not be used; None if it is right."""
        try:
            with launch_table.using(self._table.preferring((row,))):
                found = error(results(self._small, "triton"), self._expected)
        except Exception as failure:  # of the compiler or the launch: other rows may do
            return f"{type(failure).__name__}: {failure}"
        # what 16-bit outputs were rounded by counts for both
        allowed = TOLERANCE[self._precision] + (2.0**-8 if self._precision == "tf32" else 0.0)
        return None if found <= allowed else f"error {found:.1e}, {allowed:.1e} allowed"

    def times(self, kernel: str, rows: Sequence[Row]) -> list[float]:
        """Median ms of the kernel by row, taken in turn so that the clock's drift hits all alike."""
        call = self._calls[STAGE_OF.get(kernel, kernel)]
        found: list[list[float]] = [[] for _ in rows]
        for repeat in range(REPEATS + 1):
            for i, row in enumerate(rows):
                with launch_table.using(self._table.preferring((row,))):
                    ms = kernel_ms(f"{kernel}_kernel", call, self._clock)
                if repeat:  # the first compiles what is left
                    found[i].append(ms)
        return [statistics.median(ms) for ms in found]


def kernel_ms(name: str, call: Callable[[], Any], clock: Clock) -> float:
    """ms on the device of the launches of this kernel in a call; where there is no device, of the whole call.

    Raises RuntimeError where the call launches no such kernel: no time is not a short one.
    """
    if not clock.host_matters:
        return clock.times([call], 1)[0]
    marks: list[torch.cuda.Event] = []

    def mark(launch: Any) -> None:  # before and behind each
        if launch.get()["name"] == name:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            marks.append(event)

    hooks = (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook)
    for hook in hooks:
        hook.add(mark)
    try:
        clock.hold(1.0)
        call()
    finally:
        for hook in hooks:
            hook.remove(mark)
    clock.synchronize()
    if not marks:
        raise RuntimeError(f"{name} was not launched by the call that it is timed in")
    return sum(start.elapsed_time(stop) for start, stop in zip(marks[::2], marks[1::2], strict=True))


def current(table: LaunchTable, problem: Problem) -> Row:
    """What the table says now, as a row for this problem alone."""
    choice = table.choice(problem.kernel, problem.k_dim, problem.v_dim, problem.precision)
    blocked, sliced = problem.kernel in launch_table.BLOCKED, problem.kernel in SCANS
    row = problem.row(choice.num_warps, choice.block if blocked else None, choice.slice if sliced else None)
    return replace(row, num_stages=choice.num_stages)


def best_of(bench: Bench, problem: Problem, rows: Sequence[Row], say: Callable[[str], None]) -> Row | None:
    """The fastest of the right rows, the first of which is today's; None where none is right."""
    right = []
    for row in rows:
        reason = bench.wrong(row)
        if reason is None:
            right.append(row)
        else:
            say(f"{_show(row)}  left out: {reason}")
    if not right:
        return None
    times = bench.times(problem.kernel, right)
    fastest = min(range(len(right)), key=times.__getitem__)
    best = 0 if times[fastest] > (1 - GAIN) * times[0] else fastest
    for i, (row, ms) in enumerate(zip(right, times, strict=True)):
        say(f"{_show(row)}  {1e3 * ms:9.1f} µs{'  taken' if i == best else ''}")
    return right[best]


def _show(row: Row) -> str:
    parts = [f"{row.num_warps} warps", *(f"{n} {v}" for n in ("block", "slice") if (v := getattr(row, n)) is not None)]
    if row.num_stages > 1:
        parts.append(f"{row.num_stages} stages")
    return f"    {', '.join(parts):42}"


def tune(table: LaunchTable, wanted: Sequence[Problem], args: argparse.Namespace) -> Iterator[LaunchTable]:
    """Yields the table after each pair of head dims and precision that was measured."""
    name = torch.cuda.get_device_name()
    made_by = f"gdncp.tune on {name}, Triton {triton.__version__}"
    rows: list[Row] = []
    deadline = time.monotonic() + args.time_budget
    groups: dict[tuple[Any, ...], list[Problem]] = {}
    for problem in wanted:
        groups.setdefault(problem[1:], []).append(problem)
    for group in groups.values():
        if time.monotonic() > deadline:
            print(f"out of time: {', '.join(map(str, group))} keep the rows of the table in use")
            continue
        all_rows = {p: list(dict.fromkeys([current(table, p), *candidates(p)])) for p in group}
        flat = [row for p in group for row in all_rows[p]]
        with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
            reasons = dict(zip(flat, pool.map(partial(refused, table.arch), flat), strict=True))
        bench = Bench(table, group[0], args.tokens, args.heads, torch.device("cuda"))
        for problem in group:
            print(problem, flush=True)
            compiled = []
            for row in all_rows[problem]:
                if reasons[row] is None:
                    compiled.append(row)
                else:
                    print(f"{_show(row)}  left out: {reasons[row]}")
            found = best_of(bench, problem, compiled, print)
            rows += [found] if found else []
        if rows:
            yield replace(table.preferring(tuple(rows)), made_by=made_by)
        del bench
        torch.cuda.empty_cache()


def _dims(text: str) -> tuple[int, int]:
    k_dim, _, v_dim = text.partition("x")
    return int(k_dim), int(v_dim)


def _heads(text: str) -> tuple[int, int]:
    qk, _, v = text.partition("/")
    return int(qk), int(v)


def parser() -> argparse.ArgumentParser:
    summary, _, rest = (__doc__ or "").partition("\n")
    p = argparse.ArgumentParser(
        "python -m gdncp.tune", description=summary, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--out", type=Path, help="the table to write")
    p.add_argument("--dry-run", action="store_true", help="list the candidates and stop; needs no GPU")
    p.add_argument("--dims", nargs="+", choices=DIMS, default=["128x128", "64x64", "256x256"], metavar="KxV")
    p.add_argument("--precisions", nargs="+", choices=launch_table.PRECISIONS, default=launch_table.PRECISIONS)
    p.add_argument("--kernels", nargs="+", choices=launch_table.KERNELS, default=launch_table.KERNELS)
    p.add_argument("--tokens", type=int, default=32768, help="of the one sequence that is timed")
    p.add_argument("--heads", type=_heads, default=(16, 32), metavar="QK/V", help="default: 16/32")
    p.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="compiling processes; default: one a core")
    p.add_argument("--time-budget", type=float, default=float("inf"), help="seconds after which nothing new is begun")
    return p


def main(arguments: Sequence[str] | None = None) -> int:
    p = parser()
    args = p.parse_args(arguments)
    wanted = [x for x in problems(list(map(_dims, args.dims)), args.precisions) if x.kernel in args.kernels]
    if args.dry_run:
        for problem in wanted:
            rows = candidates(problem)
            print(f"{problem}: {len(rows)} candidates")
            print("\n".join(_show(row) for row in rows))
        return 0
    if args.out is None:
        p.error("--out FILE is needed (or --dry-run)")
    if not torch.cuda.is_available():
        p.error("measuring needs an NVIDIA GPU, and torch sees none; --dry-run lists the candidates without one")
    if args.tokens <= CHUNK:
        p.error(f"--tokens must be more than {CHUNK}, so that there are CP chunks to fold, got {args.tokens}")
    arch = launch_table.current_arch()
    if arch not in SHARED_KIB:
        p.error(f"sm_{arch} is not known; known are {', '.join(f'sm_{a}' for a in SHARED_KIB)}")
    print(f"sm_{arch}: the table in use is {launch_table.describe(arch)}")
    # an architecture that has no table of its own gets one
    table = replace(launch_table.table_of(arch), arch=arch)
    written = False
    with torch.no_grad():
        for found in tune(table, wanted, args):
            store.write_text(args.out, found.to_json())
            written = True
    print(f"written: {args.out}" if written else "nothing could be measured")
    return 0 if written else 1


if __name__ == "__main__":
    sys.exit(main())
