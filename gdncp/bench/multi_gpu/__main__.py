"""`torchrun -m gdncp.bench.multi_gpu PART --out OUT`: one part of a run on several GPUs of one host.

    torchrun --standalone --nproc-per-node 2 -m gdncp.bench.multi_gpu times --out OUT
    python -m gdncp.bench.multi_gpu killed --world-size 2 --out OUT
    python -m gdncp.bench.multi_gpu merge --out OUT

bench/multi_gpu.sh runs all parts.  Each writes OUT/parts/PART.json after every case; `merge` makes OUT/multi_gpu.json
and OUT/multi_gpu.md of them.  Exit codes: 0 all that was begun went well, 1 something failed (the JSON says what),
2 the command line is wrong.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from gdncp.argument_parser import Parser
from gdncp.bench.multi_gpu import checks, killed, merge, peers, times
from gdncp.bench.multi_gpu.book import Book
from gdncp.bench.multi_gpu.presets import PRESETS, Preset
from gdncp.bench.multi_gpu.ranks import join
from gdncp.calibrate.links import measure_links


def _links(book: Book, preset: Preset) -> None:
    with book.failures_of("links"):
        book.put("links", measure_links(book.ranks.group, book.ranks.device, preset.link_bytes))


ON_RANKS: dict[str, Callable[[Book, Preset], None]] = {
    "checks": checks.run,
    "checks_others": checks.run_others,
    "times": times.run,
    "peers": peers.run,
    "links": _links,
}
PARTS = ("checks", "checks_others", "times", "peers", "links", "killed")


def parser() -> Parser:
    p = Parser("python -m gdncp.bench.multi_gpu", __doc__)
    p.add_argument("part", choices=(*ON_RANKS, "prepare", "killed", "merge"), help="prepare: peers compile, untimed")
    p.add_argument("--out", type=Path, required=True, help="folder of the run")
    p.add_argument("--preset", choices=PRESETS, default="h200")
    p.add_argument("--backend", choices=("nccl", "gloo"), default="nccl" if torch.cuda.is_available() else "gloo")
    p.add_argument("--budget", type=float, default=float("inf"), help="seconds after which no new case is begun")
    p.add_argument("--world-size", type=int, default=2, help="of `killed`, which starts its ranks itself")
    p.add_argument("--heads", nargs="+", help="only these of what is timed, as 16/32")
    p.add_argument("--max-tokens", type=int, help="no longer sequence of what is timed")
    p.add_argument("--library", help="only this one's peers are prepared, as fla")
    p.add_argument("--commit", help="what was measured; default: the commit of the working tree, if it is one")
    return p


def main(arguments: Sequence[str] | None = None) -> int:
    p = parser()
    args = p.parse_args(arguments)
    parts = args.out / "parts"
    try:
        preset = PRESETS[args.preset].only(args.heads, args.max_tokens)
    except ValueError as error:
        p.error(str(error))
    if args.part == "merge":
        return merge.run(args.out, args.commit, PARTS)
    if args.part == "killed":
        return killed.run(parts, args.world_size, args.backend, args.preset, args.budget)
    if "LOCAL_RANK" not in os.environ:
        p.error(f"{args.part} must be started by torchrun")
    with join(args.backend, args.budget) as ranks, torch.no_grad():
        if args.part == "prepare":
            name = "-".join(["prepare", args.library or "all", *(h.replace("/", "_") for h in args.heads or [])])
            book = Book(name, parts, ranks)
            peers.prepare(book, preset, args.library)
        else:
            book = Book(args.part, parts, ranks)
            ON_RANKS[args.part](book, preset)
        book.end()
    return 1 if book.found["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
