"""What every kernel takes on GPUs that need not be there: registers, spills, shared memory, tensor-core instructions.

    python -m gdncp_kernels.compile_report                                    # every variant for every architecture
    python -m gdncp_kernels.compile_report --arch sm_90 --jobs 8 --json
    python -m gdncp_kernels.compile_report --arch sm_80 sm_120 --dims 128x128 256x128 --inputs bf16 fp32

The plain Triton kernels as the launch tables say, for sm_90 the Hopper kernels too.  Exit codes: 0 all is well, 1 a
variant does not compile, spills more than 64 bytes a thread, asks for more shared memory than a block can have, or
makes wgmma wait (ptxas warnings C75xx); 2 the command line is wrong.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import product
from typing import Any

import torch

from gdncp.backends.triton_version import need_triton

if __name__ == "__main__":
    need_triton("gdncp_kernels.compile_report")

from gdncp.backends import get_backend
from gdncp.backends.base import Precision, TokenInputs
from gdncp_kernels import launch_table
from gdncp_kernels.offline import NotCompiled, Resources, compiling_only, measure
from gdncp_kernels.stage_calls import plan_of, stage_calls

SPILL_BYTES = 64  # a thread, allowed
SHARED_KIB = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99, 121: 99}  # that a block can ask for
ARCHS = ("sm_80", "sm_90", "sm_100", "sm_120")
DIMS = ("64x64", "128x128", "256x256", "128x64", "64x128", "256x128", "128x256", "32x32", "16x16")  # K x V
INPUTS: dict[str, tuple[torch.dtype, Precision]] = {
    "bf16": (torch.bfloat16, "fast"),
    "bf16-high": (torch.bfloat16, "high"),
    "fp16": (torch.float16, "fast"),
    "fp16-high": (torch.float16, "high"),
    "fp32": (torch.float32, "high"),
}
KERNELS = ("triton", "hopper")
HOPPER_DIMS = ("64x64", "128x128")
HOPPER_INPUTS = ("bf16", "fp16")
PLAIN_CALLS = (("linear", True, True), ("log", False, False), (None, False, False))
HOPPER_CALLS = (*product(("linear", "log"), (False, True), (False, True)), (None, False, False))
ON_SOME_HEADS = ("linear", False, True)  # of these calls one on views of some heads


@dataclass(frozen=True)
class Variants:
    """All calls of one kernel set on tokens of one kind, for one architecture."""

    arch: int
    kernels: str  # the backend's name
    inputs: str
    k_dim: int
    v_dim: int


@dataclass(frozen=True)
class Compiled:
    """One variant of a kernel, and what is wrong with it."""

    arch: str
    kernels: str  # the backend's name
    kernel: str
    dims: str  # K x V
    inputs: str
    call: str  # that launches it
    resources: Resources | None
    problems: tuple[str, ...] = ()
    key: str = field(default="", compare=False)  # of the compiled code

    @classmethod
    def of(cls, variants: Variants, kernel: str, call: str, result: Any) -> Compiled:
        """`result` is the binary, or what went wrong."""
        v = variants
        found = None if isinstance(result, Exception) else measure(v.arch, result)
        problems = problems_of(v.arch, found) if found else (f"does not compile: {_on_one_line(result)}",)
        key = result.hash if found else f"{kernel} {v} {call}"
        dims = f"{v.k_dim}x{v.v_dim}"
        return cls(f"sm_{v.arch}", v.kernels, kernel, dims, v.inputs, call, found, problems, key)

    def __str__(self) -> str:
        name = f"{self.arch:6} {self.kernels:6} {self.kernel:19} {self.dims:7} {self.inputs:9}"
        r = self.resources
        figures = ""
        if r is not None:
            mma = " ".join(f"{count} {what}" for what, count in sorted(r.mma.items())) or "no mma"
            figures = f" {r.registers:4} registers {r.spill_bytes:5} B spilled {r.shared_bytes:7} B shared  {mma:16}"
        verdict = "FAILS" if cannot_run(self) else "SLOW"
        fails = f"  {verdict}: {'; '.join(self.problems)}" if self.problems else ""
        return f"{name}{figures}  {self.call}{fails}"


def cannot_run(row: Compiled) -> bool:
    return row.resources is None or row.resources.shared_bytes > 1024 * SHARED_KIB[launch_table.parse_arch(row.arch)]


def _on_one_line(error: Exception, half: int = 300) -> str:
    """Compilers' messages are pages long: where they begin and how they end."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= 2 * half else f"{text[:half]} ... {text[-half:]}"


def problems_of(arch: int, r: Resources) -> tuple[str, ...]:
    found = list(r.warnings)
    if r.spill_bytes > SPILL_BYTES:
        found.append(f"{r.spill_bytes} bytes spilled, {SPILL_BYTES} allowed")
    allowed = 1024 * SHARED_KIB[arch]
    if r.shared_bytes > allowed:
        found.append(f"{r.shared_bytes} bytes of shared memory, {allowed} allowed")
    return tuple(found)


def compile_variants(variants: Variants, only: str | None = None) -> list[Compiled]:
    """Launch every stage for every kind of call; a kernel that fails is one row, and the rest go on.

    `only`: the name of the one kernel to compile.
    """
    rows: dict[str, Compiled] = {}
    label = ""

    def note(kernel: str, result: Any) -> None:
        key = getattr(result, "hash", f"{kernel} {label}")
        if key not in rows:
            rows[key] = Compiled.of(variants, kernel, label, result)

    with compiling_only(variants.arch, note, only):
        calls = [(*call, False) for call in (HOPPER_CALLS if variants.kernels == "hopper" else PLAIN_CALLS)]
        for gates, l2norm, checkpoints, some_heads in [*calls, (*ON_SOME_HEADS, True)]:
            call = f"{gates or 'no'} gates{', L2 norm' if l2norm else ''}{', checkpoints' if checkpoints else ''}"
            call += ", some heads" if some_heads else ""
            label = f"precompute_t: {call}"
            with _failures_noted(note):  # of stage 1, which the others cannot do without
                for stage, launch in _calls(variants, gates, l2norm, checkpoints, some_heads).items():
                    label = f"{stage}: {call}"
                    with _failures_noted(note):
                        launch()
    return list(rows.values())


@contextmanager
def _failures_noted(note: Callable[[str, Any], None]) -> Iterator[None]:
    try:
        yield
    except NotCompiled:
        pass
    except Exception as error:  # of the host's code
        note("(launch)", error)


def _calls(variants: Variants, gates: str | None, l2norm: bool, checkpoints: bool, some_heads: bool) -> dict[str, Any]:
    """The stages on a sequence of four CP chunks."""
    num_tokens, k_dim, v_dim = 200, variants.k_dim, variants.v_dim
    dtype, precision = INPUTS[variants.inputs]
    times = 1 + some_heads  # of which the first are taken
    heads = ((1, k_dim), (1, k_dim), (2, v_dim))
    q, k, v = (torch.zeros(num_tokens, times * h, d, dtype=dtype)[:, :h] for h, d in heads)
    gate = torch.zeros(num_tokens, times * 2)[:, :2] if gates else None
    inputs = TokenInputs(q, k, v, gate, gate, 1.0, "log" if gates == "log" else "linear", l2norm, precision, some_heads)
    plan = plan_of(inputs, cp_chunk_len=64, checkpoint_positions=[[5, 128]] if checkpoints else None)
    return stage_calls(get_backend(variants.kernels), inputs, plan, 2.0**-16)


Work = Callable[[Variants], list[Compiled]]


def report(all_variants: Sequence[Variants], jobs: int, work: Work = compile_variants) -> Iterator[Compiled]:
    """Rows in the order of the variants, each compiled code once, from `jobs` processes."""
    seen: set[tuple[str, str]] = set()
    for rows in _in_processes(all_variants, jobs, work):
        for row in rows:
            if (row.arch, row.key) not in seen:
                seen.add((row.arch, row.key))
                yield row


def _in_processes(all_variants: Sequence[Variants], jobs: int, work: Work) -> Iterator[list[Compiled]]:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        futures = [pool.submit(work, variants) for variants in all_variants]
        for variants, future in zip(all_variants, futures, strict=True):
            try:
                yield future.result()
            except BrokenProcessPool:  # the compiler ended its process, and with it the pool: find out whose it was
                yield _alone(variants, work, context)


def _alone(variants: Variants, work: Work, context: Any) -> list[Compiled]:
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        try:
            return pool.submit(work, variants).result()
        except BrokenProcessPool as error:
            return [Compiled.of(variants, "?", "any", RuntimeError(f"the compiler crashed ({error})"))]


def chosen(archs: Sequence[str], dims: Sequence[str], inputs: Sequence[str], kernels: Sequence[str]) -> list[Variants]:
    """Raises ValueError for an architecture, dims or inputs that there are not."""
    found = []
    for name in archs:
        arch = launch_table.parse_arch(name)
        if arch not in SHARED_KIB:
            raise ValueError(f"arch must be one of {', '.join(f'sm_{a}' for a in SHARED_KIB)}, got {name!r}")
        for dim, tokens in product(dims, inputs):
            k_dim, _, v_dim = dim.partition("x")
            if "triton" in kernels:
                found.append(Variants(arch, "triton", tokens, int(k_dim), int(v_dim)))
            if "hopper" in kernels and arch == 90 and dim in HOPPER_DIMS and tokens in HOPPER_INPUTS:
                found.append(Variants(arch, "hopper", tokens, int(k_dim), int(v_dim)))
    return found


def parser() -> argparse.ArgumentParser:
    summary, _, rest = (__doc__ or "").partition("\n")
    p = argparse.ArgumentParser(
        "python -m gdncp_kernels.compile_report",
        description=summary,
        epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("--arch", nargs="+", default=ARCHS, metavar="sm_NN", help=f"default: {' '.join(ARCHS)}")
    p.add_argument("--dims", nargs="+", choices=DIMS, default=DIMS, metavar="KxV", help=f"default: {' '.join(DIMS)}")
    p.add_argument(
        "--inputs", nargs="+", choices=INPUTS, default=list(INPUTS), help="dtype and precision; default: all"
    )
    p.add_argument("--kernels", nargs="+", choices=KERNELS, default=KERNELS, help="kernel sets; default: all")
    p.add_argument("--slow-is-fine", action="store_true", help="spills and waiting wgmma are shown, and exit with 0")
    p.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes; default: one a core")
    p.add_argument("--json", action="store_true", help="print JSON instead of lines")
    return p


def main(arguments: Sequence[str] | None = None) -> int:
    p = parser()
    args = p.parse_args(arguments)
    if os.environ.get("TRITON_INTERPRET") == "1":
        p.error("TRITON_INTERPRET=1 is set: interpreted kernels have nothing to compile")
    try:
        variants = chosen(args.arch, args.dims, args.inputs, args.kernels)
        tables = {name: launch_table.describe(launch_table.parse_arch(name)) for name in args.arch}
    except ValueError as error:
        p.error(str(error))
    if not args.json:
        for name, table in tables.items():
            print(f"{name}: launch table {table}")
    rows = []
    for row in report(variants, args.jobs):
        rows.append(row)
        if not args.json:
            print(row, flush=True)
    bad = [row for row in rows if (cannot_run(row) if args.slow_is_fine else row.problems)]
    if args.json:
        print(json.dumps({"launch_tables": tables, "rows": [asdict(row) for row in rows]}, indent=1))
    else:
        print(f"{len(rows)} variants, {len(bad)} of them bad")
    for row in bad:
        print(row, file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
