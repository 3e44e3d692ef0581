"""`python -m gdncp.calibrate`: measure what this machine takes and write a profile for the planner.

    python -m gdncp.calibrate --out profile.json                                        # the stages, on one device
    torchrun --standalone --nproc-per-node 8 -m gdncp.calibrate --out profile.json      # and the exchanges of ranks

On a GPU stages are timed by replay of CUDA graphs, on a CPU by the clock.  Costs are fitted so that the cost model
predicts what was measured; a table shows both, and whole calls, which are not fitted.  What is not measured is taken
from --base.  The file goes wherever a profile's name does: plan_prefill(profile="profile.json"), profile=profile.json
of gdncp.prefill, --profile profile.json of gdncp.plan and gdncp.simulate.

Exit codes: 0 it was written, 2 it was not: what the command line asks for cannot be done.
"""

from __future__ import annotations

import argparse
import platform
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gdncp.installed import need

if __name__ == "__main__":
    need("gdncp.calibrate", "cli", "rich")

from rich import box
from rich.console import Console
from rich.table import Table

from gdncp import store
from gdncp.argument_parser import Parser
from gdncp.backends import Backend, get_backend, select_backend
from gdncp.backends.base import folds_runs, opens
from gdncp.calibrate import stages
from gdncp.calibrate.exchanges import costs_to_fit, exchange_measurements, with_nodes
from gdncp.calibrate.fit import Measurement, fit, median_error
from gdncp.calibrate.links import SIZES, measure_links
from gdncp.cli.ranks import Ranks, RunFailure, join
from gdncp.cli.report import LOG_WIDTH, seconds
from gdncp.plan import CostProfile, default_profile, find_profile
from gdncp.plan.profiles import ONE_NODE

TOKENS = {"cuda": 32768, "cpu": 2048}
REPEATS = {"cuda": 11, "cpu": 5}
LINK_SIZES = {"cuda": SIZES, "cpu": SIZES[:5]}
HEADS = {"cuda": "16/32 4/8 16/64", "cpu": "2/4 1/8"}


def parser() -> Parser:
    p = Parser("python -m gdncp.calibrate", __doc__)
    p.add_argument("--out", type=Path, required=True, help="the .json file to write")
    p.add_argument("--name", help="of the profile; default: that of the file")
    p.add_argument("--base", help="the profile that what is not measured comes from; default: h200 on a GPU, else cpu")
    p.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    p.add_argument("--backend", help="default: hopper where it runs, else what gdncp.prefill would take")
    p.add_argument(
        "--heads", nargs="+", help=f"QK/V of shape classes; default: {HEADS['cuda']}, on a CPU {HEADS['cpu']}"
    )
    p.add_argument("--head-dim", type=int, default=128)
    p.add_argument("--tokens", type=int, help=f"of a batch; default: {TOKENS['cuda']}, on a CPU {TOKENS['cpu']}")
    p.add_argument("--repeats", type=int, help="times that a median is taken of")
    return p


def main(arguments: Sequence[str] | None = None) -> int:
    p = parser()
    args = p.parse_args(arguments)
    with join() as ranks:
        try:
            return calibrate(args, ranks)
        except RunFailure as error:
            if ranks.is_leader:
                print(f"{p.prog}: error: {error}", file=sys.stderr)
            return 2


def calibrate(args: argparse.Namespace, ranks: Ranks) -> int:
    console = Console(highlight=False, quiet=not ranks.is_leader)
    if not console.is_terminal:
        console.width = LOG_WIDTH
    started = time.perf_counter()
    device, group, transport = ranks.agree(lambda: ranks.place(args.device))
    base, backend, effort = ranks.agree(lambda: _prepare(args, device))
    where = f"; {ranks.world_size} ranks over {transport}" if group is not None else ""
    console.print(f"{_device_name(device)}, backend {backend.name}{where}", markup=False)

    # rank 0 alone computes: ranks that share a CPU or a GPU would time each other; and all exchange
    alone = partial(_stages, device, backend, base, effort)
    profile, measured, whole = ranks.agree(lambda: alone() if ranks.is_leader else (base, [], []))
    found = None
    if group is not None:
        found = ranks.agree(lambda: measure_links(group, device, LINK_SIZES[device.type]))
        measured += exchange_measurements(found)
        profile = with_nodes(profile, ranks.world_size, ranks.local_world_size)
        names = costs_to_fit(ranks.world_size, ranks.local_world_size)
        profile = fit(profile, names, exchange_measurements(found))
    profile = replace(profile, name=args.name or args.out.stem)
    console.print(measured_table(profile, [*measured, *whole]))
    console.print(cost_table(base, profile))
    if ranks.is_leader:
        console.print(
            f"predictions are off by {median_error(profile, measured):.1%} (median of stages and exchanges), "
            f"{median_error(profile, whole):.1%} (of whole calls); {time.perf_counter() - started:.0f} s"
        )
    document = _document(profile, base, device, backend, measured + whole, found)
    ranks.agree(lambda: _write(args.out, document) if ranks.is_leader else None)
    console.print(f"written: {args.out}", markup=False, soft_wrap=True)
    return 0


def _stages(
    device: torch.device, backend: Backend, base: CostProfile, effort: stages.Effort
) -> tuple[CostProfile, list[Measurement], list[Measurement]]:
    """The base with fitted costs of stages; their times; and those of whole calls as that profile plans them."""
    bench = stages.Bench(device, backend, effort.repeats)
    measured = [bench.time(stage, plan) for stage, plan in stages.stage_plans(base, effort)]
    profile = fit(base, stages.COSTS, measured)
    return profile, measured, [bench.time(stages.WHOLE, plan) for plan in stages.whole_plans(profile, effort)]


def _prepare(args: argparse.Namespace, device: torch.device) -> tuple[CostProfile, Backend, stages.Effort]:
    """What is asked for, before anything runs; raises ValueError naming the option."""
    kind = device.type
    if args.out.suffix != ".json":
        raise ValueError(f"--out must be a .json file, got {args.out}")
    try:
        store.check_place(args.out)  # measuring takes a while
    except OSError as error:
        raise ValueError(f"--out {args.out}: {error}") from None
    for option in ("head_dim", "tokens", "repeats"):
        value = getattr(args, option)
        if value is not None and value < 1:
            raise ValueError(f"--{option.replace('_', '-')} must be a positive int, got {value}")
    effort = stages.Effort(
        heads=tuple(map(_heads, args.heads or HEADS[kind].split())),
        head_dim=args.head_dim,
        num_tokens=args.tokens or TOKENS[kind],
        repeats=args.repeats or REPEATS[kind],
    )
    backend = _backend(args.backend, device, args.head_dim)
    base = find_profile(args.base or default_profile(kind), "--base")
    workers = torch.cuda.get_device_properties(device).multi_processor_count if kind == "cuda" else 1
    # what a call takes by default for bf16, and for float32
    bits = {"cuda": 16, "cpu": 24}[kind]
    in_runs = folds_runs(backend.fold)
    base = replace(base, workers=workers, opens=opens(backend), folds_runs=in_runs, forget_bits=bits)
    return base, backend, effort


def _heads(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)/(\d+)", text, re.ASCII)
    qk, v = map(int, match.groups()) if match else (0, 0)
    if not qk or v % qk:
        raise ValueError(f"--heads must be QK/V, as 16/32, V a multiple of QK, got {text!r}")
    return qk, v


def _backend(name: str | None, device: torch.device, head_dim: int) -> Backend:
    call: dict[str, Any] = {"dtype": torch.bfloat16 if device.type == "cuda" else torch.float32, "k_dim": head_dim}
    call |= {"device": device, "v_dim": head_dim, "precision": "fast"}
    if name is None and device.type == "cuda" and get_backend("hopper").rejection_reason(**call) is None:
        name = "hopper"
    return select_backend(name or "auto", **call)


# ---- what it says


def measured_table(profile: CostProfile, measurements: Sequence[Measurement]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title="measured, and what the fitted costs predict")
    for name in ("what", "case", "measured", "predicted", "off"):
        table.add_column(name, justify="left" if name in ("what", "case") else "right")
    for m in measurements:
        table.add_row(m.what, m.case, seconds(m.seconds), seconds(m.predict(profile)), f"{m.off(profile):+.1%}")
    return table


def cost_table(base: CostProfile, profile: CostProfile) -> Table:
    table = Table("cost", f"of {base.name}", "fitted", box=box.SIMPLE_HEAD, pad_edge=False)
    before = base.costs()
    for name, value in profile.costs().items():
        same = value == before[name]
        shown = [_shown(name, cost) for cost in (before[name], value)]
        table.add_row(name, shown[0], "" if same else shown[1], style="dim" if same else None)
    return table


def _shown(name: str, cost: Any) -> str:
    if isinstance(cost, bool):
        return "yes" if cost else "no"
    if name == "ranks_per_node" and cost >= ONE_NODE:
        return "all"
    return str(cost) if isinstance(cost, int) else f"{cost:.4g}"


def _document(
    profile: CostProfile,
    base: CostProfile,
    device: torch.device,
    backend: Backend,
    measurements: Sequence[Measurement],
    exchanges: dict[str, Any] | None,
) -> dict[str, Any]:
    """What the profile's file holds; all but its name and costs is for people."""
    what = f"{_device_name(device)}, backend {backend.name}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}"
    kept = [name for name, value in profile.costs().items() if value == base.costs()[name]]
    return {
        "name": profile.name,
        "source": {
            "measured": f"gdncp.calibrate on {what}",
            "not measured": f"{', '.join(kept)}: those of {base.name}",
        },
        "costs": {name: _digits(value) for name, value in profile.costs().items()},
        "measured and predicted seconds": [[m.what, m.case, m.seconds, m.predict(profile)] for m in measurements],
        "exchanges": exchanges,
    }


def _write(path: Path, document: dict[str, Any]) -> None:
    try:
        store.write_json(path, document)
    except OSError as error:
        raise ValueError(f"--out {path}: {error}") from None


def _digits(value: Any) -> Any:
    return float(f"{value:.5g}") if isinstance(value, float) else value


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.processor() or platform.machine()}, threads: {torch.get_num_threads()}"


if __name__ == "__main__":
    with torch.no_grad():
        sys.exit(main())
