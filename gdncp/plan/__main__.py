"""`python -m gdncp.plan`: show a plan without running it, as a map of sequences over ranks and lanes.

    python -m gdncp.plan --seq-lens 131072 --world-size 8 --profile h200
    python -m gdncp.plan --seq-lens 4096 300 0 128x20 --world-size 4 --ownership zigzag --svg plan.svg
    python -m gdncp.plan --seq-lens-file lengths.txt --heads 16/64 --head-half-lives 4:16384 --json plan.json

Exit codes: 0 all went well, 2 the command line is wrong or a file cannot be read or written.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gdncp.installed import need

if __name__ == "__main__":
    need("gdncp.plan", "cli", "rich")

from rich.console import Console

from gdncp.argument_parser import Parser, as_options, lanes, output_files, sequences, write_file
from gdncp.plan import PROFILES, PrefillPlan, find_profile, plan_prefill, terminal
from gdncp.plan.svg import svg

LOG_WIDTH = 100  # columns where the output is no terminal
MOST_SEQUENCES = 1 << 20
MOST_RANKS = 4096


def parser() -> Parser:
    p = Parser("python -m gdncp.plan", __doc__)
    lengths = p.add_mutually_exclusive_group(required=True)
    lengths.add_argument(
        "--seq-lens", nargs="+", help="tokens of each sequence, as 4096, 128K or 1M; 128x20: 20 sequences of 128"
    )
    lengths.add_argument("--seq-lens-file", type=Path, help="a file of the same, parted by blanks, commas or lines")
    p.add_argument("--world-size", type=int, default=1)
    p.add_argument("--ownership", default="contiguous", help="contiguous, zigzag, or JSON: [[[start, stop], ...], ...]")
    p.add_argument("--heads", default="16/32", help="QK/V, as 16/32 (the default), or Q/K/V, as 16/4/4")
    p.add_argument("--head-dim", type=int, default=128)
    p.add_argument("--cp-chunk-len", type=int, help="tokens of a CP chunk; default: chosen by predicted time")
    p.add_argument("--first-cp-chunk-len", type=int, help="of each sequence's first CP chunk; default: no other")
    p.add_argument("--lanes-per-rank", default="1", help="auto: two of heads where that is simulated to be faster")
    p.add_argument("--lanes-by", default="cp_chunks", help="what lanes divide: cp_chunks or heads")
    p.add_argument("--fixup", default="auto", help="auto, chain, all_gather, head_sharded or tree")
    p.add_argument("--fold-span", type=int, help="CP chunks whose maps are composed to one; default: chosen, or 1")
    p.add_argument("--finish", default="auto", help="auto, entry_first or entry_late")
    p.add_argument(
        "--profile", default="h200", help=f"costs to choose and predict by: {', '.join(PROFILES)}, or a .json file"
    )
    p.add_argument("--head-half-lives", nargs="+", help="tokens, one number a head, or LOW:HIGH spaced by logarithm")
    p.add_argument("--forget-below", type=float, help="default: by the dtype; 0: nothing is forgotten")
    p.add_argument("--checkpoint-every-n-tokens", type=int, default=0)
    p.add_argument("--require-reproducible", action="store_true")
    p.add_argument("--svg", help="also write the map to this file")
    p.add_argument("--json", help="also write the plan in words and numbers to this file")
    p.add_argument("--width", type=int, help=f"columns; default: the terminal's, or {LOG_WIDTH}")
    return p


def main(arguments: Sequence[str] | None = None) -> int:
    p = parser()
    args = p.parse_args(arguments)
    try:
        width = _width(args.width)
        files = output_files(args, ("--svg", "--json"))
        plan = _plan(args)
        for option, path in files.items():
            write_file(path, {"--svg": svg, "--json": _document}[option](plan), option)
    except ValueError as error:
        p.error(as_options(str(error), args.heads))
    console = Console(highlight=False)
    terminal.show(plan, console, width or (console.width if console.is_terminal else LOG_WIDTH))
    for path in files.values():
        print(f"written: {path}", file=sys.stderr)
    return 0


def _plan(args: argparse.Namespace) -> PrefillPlan:
    num_q_heads, num_k_heads, num_v_heads = _heads(args.heads)
    if args.world_size > MOST_RANKS:
        raise ValueError(f"--world-size must be at most {MOST_RANKS:,}, got {args.world_size}")
    return plan_prefill(
        _seq_lens(args.seq_lens, args.seq_lens_file),
        world_size=args.world_size,
        ownership=_ownership(args.ownership),
        num_q_heads=num_q_heads,
        num_k_heads=num_k_heads,
        num_v_heads=num_v_heads,
        head_dim=args.head_dim,
        cp_chunk_len=args.cp_chunk_len,
        first_cp_chunk_len=args.first_cp_chunk_len,
        checkpoint_every_n_tokens=args.checkpoint_every_n_tokens,
        fixup=args.fixup,
        fold_span=args.fold_span,
        finish=args.finish,
        lanes_per_rank=lanes(args.lanes_per_rank),
        lanes_by=args.lanes_by,
        head_half_lives=_half_lives(args.head_half_lives, max(num_q_heads, num_v_heads)),
        forget_below=args.forget_below,
        require_reproducible=args.require_reproducible,
        profile=find_profile(args.profile, "--profile"),
    )


# ---- arguments that are more than a number or a word


def _seq_lens(words: Sequence[str] | None, file: Path | None) -> list[int]:
    name = "--seq-lens"
    if file is not None:
        name = f"--seq-lens-file {file}"
        try:
            words = re.sub(r"[\[\],]", " ", file.read_text(encoding="utf-8")).split()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{name}: {error}") from None
    lengths: list[int] = []
    for word in words or ():
        found = sequences(word)
        if found is None:
            raise ValueError(
                f"{name} must be numbers of tokens, as 4096, 128K or 1M, or 128x20 for 20 sequences, got {word!r}"
            )
        tokens, times = found
        if len(lengths) + times > MOST_SEQUENCES:
            raise ValueError(f"{name} must be at most {MOST_SEQUENCES:,} sequences, got {word!r}")
        lengths += [tokens] * times
    if not lengths:
        raise ValueError(f"{name} must name at least one sequence, got none")
    return lengths


def _ownership(text: str) -> Any:
    if not text.lstrip().startswith("["):
        return text
    try:
        ranges = json.loads(text)
        repr(ranges)  # what is too deep to be shown is too deep for an error about it
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--ownership is not JSON as [[[start, stop], ...], ...]: {error}") from None
    return ranges


def _heads(text: str) -> tuple[int, int, int]:
    match = re.fullmatch(r"(\d+)(?:/(\d+))?/(\d+)", text, re.ASCII)
    if not match:
        raise ValueError(f"--heads must be QK/V, as 16/32, or Q/K/V, as 16/4/4, got {text!r}")
    return int(match[1]), int(match[2] or match[1]), int(match[3])


def _half_lives(words: Sequence[str] | None, num_heads: int) -> list[float] | None:
    if words is None:
        return None
    try:
        if len(words) == 1 and ":" in words[0]:
            low, high = map(float, words[0].split(":"))
            if not 0 < low <= high < float("inf"):
                raise ValueError
            return [low * (high / low) ** (head / max(num_heads - 1, 1)) for head in range(num_heads)]
        return [float(word) for word in words]
    except ValueError:
        raise ValueError(
            f"--head-half-lives must be positive numbers of tokens, one a state head ({num_heads}), or LOW:HIGH, "
            f"as 4:16384, got {' '.join(words)!r}"
        ) from None


def _width(width: int | None) -> int | None:
    if width is not None and width < terminal.LEAST_WIDTH:
        raise ValueError(f"--width must be at least {terminal.LEAST_WIDTH}, got {width}")
    return width


# ---- files


def _document(plan: PrefillPlan) -> str:
    from gdncp.cli.run import describe_plan  # as in report.json; imports torch, which planning does not need

    ranks = [
        {"num_tokens": plan.num_tokens(rank), "token_ranges": plan.token_ranges(rank), "fixup_bytes": sent}
        for rank, sent in enumerate(plan.fixup_bytes)
    ]
    document = {"plan": describe_plan(plan), "predicted": dict(plan.predicted), "ranks": ranks}
    return json.dumps(document, indent=2, allow_nan=False) + "\n"


if __name__ == "__main__":
    sys.exit(main())
