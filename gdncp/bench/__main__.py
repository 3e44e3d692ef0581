"""`python -m gdncp.bench`: ours and every installed peer on the same inputs, in one process.

    python -m gdncp.bench --preset quick --device cpu
    python -m gdncp.bench --preset peers-h200 --out results --time-budget 400
    python -m gdncp.bench --shapes 32768x1:16/32 8192x4:16/64 --gates one --engines hopper flashinfer

First the results are held against a float64 reference: what is wrong gets no time.  With --out it writes
bench.json and bench.md.
Exit codes: 0 all of ours ran and were right, 1 one was not or the device was lost, 2 the command line is wrong.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from gdncp.installed import need

if __name__ == "__main__":
    need("gdncp.bench", "cli", "rich")

from gdncp import store
from gdncp.bench import machine, tables
from gdncp.bench.cases import GATES, PRESETS, Case, Shape
from gdncp.bench.engines import Engine
from gdncp.bench.prepare import prepare
from gdncp.bench.reference import check_reference
from gdncp.bench.run import TOLERANCE, DeviceLost, Options, Row, all_engines, chosen, document, run_case
from gdncp.bench.timing import Clock, clock_of

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def parser() -> argparse.ArgumentParser:
    summary, _, rest = (__doc__ or "").partition("\n")
    p = argparse.ArgumentParser(
        "python -m gdncp.bench", description=summary, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    presets = "; ".join(f"{name}: {preset.what}" for name, preset in PRESETS.items())
    p.add_argument("--preset", choices=PRESETS, default="quick", help=f"shapes, gates and engines. {presets}")
    p.add_argument("--shapes", nargs="+", help="instead, as TOKENSxSEQUENCES:QK_HEADS/V_HEADS")
    gates = "forget: half-lives of 4 to 16384 tokens, one: 1, layer: as a fresh layer has them"
    p.add_argument("--gates", nargs="+", choices=GATES, help=f"instead; {gates}")
    names = ", ".join(engine.name for engine in all_engines())
    p.add_argument("--engines", nargs="+", help=f"instead, among {names}; a library's name means all its modes")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    p.add_argument("--head-dim", type=int, default=128)
    p.add_argument("--cp-chunk-len", type=int, help="tokens of a CP chunk of ours; default: the plan's choice")
    p.add_argument("--rounds", type=int, default=5, help="times that all engines are timed in turn")
    tolerance = f"{TOLERANCE[torch.bfloat16]:.0e} ({TOLERANCE[torch.float32]:.0e} for float32)"
    p.add_argument("--tolerance", type=float, help=f"relative L2, worst sequence and head; default: {tolerance}")
    p.add_argument("--stages", action="store_true", help="also the time of each stage of ours")
    p.add_argument("--prepare", action="store_true", help="compile first, in parallel processes (half of the budget)")
    p.add_argument("--only-first-calls", action="store_true", help="compile and stop; what --prepare runs")
    p.add_argument("--time-budget", type=float, default=float("inf"), help="seconds after which nothing new is begun")
    p.add_argument("--commit", help="what was measured; default: the commit of the working tree, if it is one")
    p.add_argument("--out", type=Path, help="folder for bench.json and bench.md; default: none are written")
    return p


def main(arguments: Sequence[str] | None = None) -> int:
    begun = time.monotonic()
    p = parser()
    args = p.parse_args(arguments)
    preset = PRESETS[args.preset]
    try:
        shapes = [Shape.parse(text, args.head_dim) for text in args.shapes or preset.shapes]
        engines = chosen(all_engines(args.cp_chunk_len), args.engines or preset.engines)
        device = torch.device(args.device)
    except (ValueError, RuntimeError) as error:
        p.error(str(error))
    gates = args.gates or list(preset.gates)
    absent = {engine.name: reason for engine in engines if (reason := engine.absent_reason(device))}
    present = [engine for engine in engines if engine.name not in absent]
    if not present:
        p.error(f"none of the engines is here: {absent}")

    tables.show_start(present, absent)
    if args.prepare:
        same = ["--gates", *gates, "--device", args.device, "--dtype", args.dtype, "--head-dim", str(args.head_dim)]
        for line in prepare(present, shapes, same, deadline=begun + args.time_budget / 2):
            tables.say(f"not compiled ahead: {line}")
        tables.say(f"compiled ahead, {time.monotonic() - begun:.0f} s so far")
    cases = [Case(shape, kind, DTYPES[args.dtype], device) for shape in shapes for kind in gates]
    options = Options(
        args.rounds, args.tolerance, args.stages or preset.stages, args.only_first_calls, begun + args.time_budget
    )
    with torch.no_grad():
        found, lost = measure(cases, present, clock_of(device), options, absent, args)
    rows = found["rows"]
    if not args.only_first_calls:
        tables.show(found)
    bad = [row for row in rows if row["status"] in ("wrong", "failed") and (row["ours"] or args.only_first_calls)]
    for row in bad:
        print(f"{row['engine']}: {row['reason']}", file=sys.stderr)
    return 1 if bad or lost else 0


def measure(
    cases: Sequence[Case],
    engines: Sequence[Engine],
    clock: Clock,
    options: Options,
    absent: dict[str, str],
    args: argparse.Namespace,
) -> tuple[dict[str, Any], bool]:
    """Run all cases and write what there is after each; returns the JSON, and whether the device was lost."""
    device, dtype = cases[0].device, cases[0].dtype
    ceilings: dict[str, float] = {}
    about: dict[str, Any] = {}
    environment = machine.describe(device, engines) | ({"commit": args.commit} if args.commit else {})
    if not options.only_first_calls:
        about = {"reference_error": check_reference(device), "clocks_at_start": machine.clocks(device)}
        ceilings = about["ceilings"] = machine.ceilings(device, dtype, clock)
        tables.show_machine(environment, ceilings)
    rows: list[Row] = []
    left_out: list[str] = []
    lost = False

    def save() -> dict[str, Any]:
        found = document(environment, rows, absent, left_out, **about)
        if args.out and not options.only_first_calls:
            store.write_json(args.out / "bench.json", found)
            store.write_text(args.out / "bench.md", tables.markdown(found))
        return found

    for case in cases:
        name = f"{case.shape} {case.gates}"
        if lost or time.monotonic() > options.deadline:
            left_out.append(name)
            continue
        try:
            new, engines_left_out = run_case(
                case, engines, clock, options, ceilings=ceilings, l2_bytes=machine.l2_bytes(device)
            )
            left_out += [f"{name} on {engine}" for engine in engines_left_out]
            state = machine.clocks(device)
            for row in new:
                row.clocks = state
        except DeviceLost as error:
            new, lost = list(error.rows), True
            tables.say(f"the device was lost: {error}")
        rows += new
        tables.show_case(name, new)
        save()  # a run that is killed leaves what it had
    return save(), lost


if __name__ == "__main__":
    sys.exit(main())
