"""`python -m gdncp.simulate`: what plans, and peers' schemes, would take on 1 to 4096 GPUs, event by event.

    python -m gdncp.simulate --seq-lens 1M --gpus 1 8 64 512 --fixup all
    python -m gdncp.simulate --seq-lens 128K 1M 4096x16,100 --gpus 8 --gates forget --ownership contiguous zigzag
    python -m gdncp.simulate --seq-lens 64K --weak --gpus 1 8 64 4096 --gpus-per-node 72 --link nvlink5 --plot weak.svg
    python -m gdncp.simulate --seq-lens 128K --gpus 2 8 --scheme ours fla-cp:0.6.0 flashqla-inter-intra
    python -m gdncp.simulate --seq-lens 1M --gpus 8 64 --finish entry_late --lanes-per-rank 2 --lanes-by heads
    python -m gdncp.simulate --check

Exit codes: 0 all went well, 1 --check found a peer's time that is missed by more than 15 %, 2 the command line is wrong
or a file cannot be written.  What is modelled and what is not: docs/simulation.md.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from gdncp.installed import need

if __name__ == "__main__":
    need("gdncp.simulate", "cli", "rich")

from rich.console import Console
from rich.table import Table

from gdncp.argument_parser import Parser, as_options, lanes, output_files, sequences, write_file
from gdncp.plan import LINKS, PROFILES, PrefillPlan, find_profile, plan_prefill
from gdncp.plan.checks import FINISHES, FIXUPS, LANES_BY, OWNERSHIPS, word
from gdncp.simulate import report, tables
from gdncp.simulate.gates import GATES, half_lives
from gdncp.simulate.machine import parse_link, with_topology
from gdncp.simulate.peers import PEERS, Peer, find, simulate_peer
from gdncp.simulate.schemes import simulate_plan

MOST_GPUS = 4096
LOG_WIDTH = 165  # columns where the output is no terminal
ALLOWED_ERROR = 0.15


def parser() -> Parser:
    p = Parser("python -m gdncp.simulate", __doc__)
    p.add_argument("--seq-lens", nargs="+", default=["128K"], help="a batch each: 1M, or 4096x16,100 for 17 sequences")
    p.add_argument("--gpus", nargs="+", type=int, default=[1, 2, 4, 8], help=f"up to {MOST_GPUS}; default: 1 2 4 8")
    p.add_argument("--weak", action="store_true", help="--seq-lens are per GPU: each length is multiplied by the GPUs")
    p.add_argument("--scheme", nargs="+", default=["ours"], help=f"ours, {', '.join(PEERS)}")
    p.add_argument("--heads", default="16/32", help="QK/V; default: 16/32")
    p.add_argument("--head-dim", type=int, default=128)
    p.add_argument("--ownership", nargs="+", default=["contiguous"], help=f"of ours: {', '.join(OWNERSHIPS)}")
    p.add_argument("--fixup", nargs="+", default=["auto"], help=f"of ours: auto, all, {', '.join(FIXUPS)}")
    p.add_argument("--cp-chunk-len", type=int, help="tokens of a CP chunk of ours; default: the planner's choice")
    p.add_argument("--finish", default="auto", help=f"of ours: auto, {', '.join(FINISHES)}")
    p.add_argument("--fold-span", type=int, help="of ours: CP chunks whose maps travel as one; default: the planner's")
    p.add_argument("--lanes-per-rank", default="1", help="of ours; auto: the planner's choice")
    p.add_argument("--lanes-by", default="cp_chunks", help=f"what lanes divide: {', '.join(LANES_BY)}")
    p.add_argument("--gates", default="one", help=f"{', '.join(GATES)}: nothing forgets, half-lives 4 to 16384, as new")
    p.add_argument("--profile", default="h200", help=f"costs: {', '.join(PROFILES)}, or a .json file")
    p.add_argument("--gpus-per-node", type=int, help="default: the profile's")
    p.add_argument("--link", help=f"within a node: {', '.join(LINKS)}, or MICROSECONDS:GBYTES_PER_S")
    p.add_argument("--node-link", help="between nodes, of one GPU: likewise")
    p.add_argument("--json", help="also write all of it, per rank, to this file")
    p.add_argument("--plot", help="also write milliseconds over GPUs to this file, as SVG")
    p.add_argument("--check", action="store_true", help="only hold predictions against known times")
    return p


def main(arguments: Sequence[str] | None = None) -> int:
    p = parser()
    args = p.parse_args(arguments)
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=LOG_WIDTH)
    if args.check:
        others = [name for name, value in vars(args).items() if name != "check" and value != p.get_default(name)]
        if others:
            p.error(f"--check goes alone, got --{others[0].replace('_', '-')} too")
        return check(console)
    try:
        files = output_files(args, ("--json", "--plot"))
        cases = Cases(args).simulate()
        for option, path in files.items():
            write_file(path, {"--json": report.document, "--plot": report.plot}[option](cases), option)
    except ValueError as error:
        p.error(as_options(str(error), args.heads))
    console.print(report.table(cases))
    if len({case.fixup_asked for case in cases if case.scheme == "ours"}) > 1:
        console.print(report.winners(cases))
    return 0


class Cases:
    """The cases that a command line asks for."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.batches = {text: parse_batch(text) for text in args.seq_lens}
        self.gpus = sorted(set(args.gpus))
        if not all(1 <= count <= MOST_GPUS for count in self.gpus):
            raise ValueError(f"--gpus must be from 1 to {MOST_GPUS}, got {' '.join(map(str, args.gpus))}")
        self.weak = args.weak
        self.peers = {name: None if name == "ours" else find(name) for name in args.scheme}
        match = re.fullmatch(r"(\d+)/(\d+)", args.heads, re.ASCII)
        if not match:
            raise ValueError(f"--heads must be QK/V, as 16/32, got {args.heads!r}")
        qk, v = map(int, match.groups())
        self.num_heads = max(qk, v)
        self.ownerships = [word("--ownership", name, OWNERSHIPS) for name in args.ownership]
        fixups = [word("--fixup", name, ("auto", "all", *FIXUPS)) for name in args.fixup]
        self.fixups = list(dict.fromkeys(f for name in fixups for f in (FIXUPS if name == "all" else (name,))))
        self.gates = word("--gates", args.gates, GATES)
        profile = find_profile(args.profile, "--profile")
        if args.gpus_per_node is not None and args.gpus_per_node < 1:
            raise ValueError(f"--gpus-per-node must be at least 1, got {args.gpus_per_node}")
        self.profile = with_topology(
            profile,
            args.gpus_per_node,
            parse_link("--link", args.link) if args.link else None,
            parse_link("--node-link", args.node_link) if args.node_link else None,
        )
        if any(self.peers.values()):
            if args.head_dim != 128 or self.profile.name != "h200":
                raise ValueError("--scheme: peers' times are known for --head-dim 128 and --profile h200 alone")
            if any(len(lengths) > 1 for lengths in self.batches.values()):
                raise ValueError("--scheme: peers are simulated for --seq-lens of one sequence alone")
        self.layer: dict[str, Any] = {
            "num_q_heads": qk,
            "num_k_heads": qk,
            "num_v_heads": v,
            "head_dim": args.head_dim,
            "cp_chunk_len": args.cp_chunk_len,
            "finish": word("--finish", args.finish, ("auto", *FINISHES)),
            "fold_span": args.fold_span,
            "lanes_per_rank": lanes(args.lanes_per_rank),
            "lanes_by": word("--lanes-by", args.lanes_by, LANES_BY),
            "profile": self.profile,
        }

    def simulate(self) -> list[report.Case]:
        cases: list[report.Case] = []
        for batch, lengths in self.batches.items():
            for gpus in self.gpus:
                scaled = [n * gpus for n in lengths] if self.weak else lengths
                group: list[report.Case] = []
                for peer in self.peers.values():
                    group += self._peer(batch, scaled, gpus, peer) if peer else self._ours(batch, scaled, gpus)
                best = min(case.outcome.seconds for case in group)
                cases += [replace(case, wins=len(group) > 1 and case.outcome.seconds == best) for case in group]
        return cases

    def _plan(self, lengths: Sequence[int], gpus: int, ownership: str, fixup: str, **changes: Any) -> PrefillPlan:
        given = half_lives(self.gates, self.num_heads)
        layer = {**self.layer, **changes}
        return plan_prefill(
            lengths,
            world_size=gpus,
            ownership=ownership,
            fixup=fixup,
            head_half_lives=given,
            **layer,
        )

    def _ours(self, batch: str, lengths: Sequence[int], gpus: int) -> list[report.Case]:
        # the pace of one GPU is that of its best plan, whatever CP chunks several are to use
        alone = simulate_plan(self._plan(self.batches[batch], 1, "contiguous", "auto", cp_chunk_len=None)).seconds
        cases = []
        for ownership in self.ownerships:
            chosen = self._plan(lengths, gpus, ownership, "auto").fixup
            for fixup in self.fixups:
                plan = self._plan(lengths, gpus, ownership, fixup)
                result = simulate_plan(plan)
                efficiency = self._efficiency(alone, result.seconds, gpus)
                cases.append(
                    report.Case(
                        batch,
                        sum(lengths),
                        gpus,
                        "ours",
                        ownership,
                        fixup,
                        plan.fixup,
                        report.way(plan),
                        plan.cp_chunk_len,
                        self.gates,
                        result,
                        efficiency,
                        wins=False,
                        chosen=plan.fixup == chosen,
                    )
                )
        return cases

    def _peer(self, batch: str, lengths: Sequence[int], gpus: int, peer: Peer) -> list[report.Case]:
        alone = simulate_peer(peer, self.profile, 1, self.batches[batch][0], self.num_heads).seconds
        result = simulate_peer(peer, self.profile, gpus, lengths[0], self.num_heads)
        efficiency = self._efficiency(alone, result.seconds, gpus)
        return [
            report.Case(
                batch,
                lengths[0],
                gpus,
                peer.name,
                "contiguous",
                "all_gather",
                "all_gather",
                "",
                0,
                self.gates,
                result,
                efficiency,
                wins=False,
                chosen=False,
            )
        ]

    def _efficiency(self, alone: float, seconds: float, gpus: int) -> float:
        if not seconds:
            return 1.0
        return alone / seconds / (1 if self.weak else gpus)


def parse_batch(text: str) -> list[int]:
    """1M: one sequence; 4096x16,100: seventeen."""
    lengths: list[int] = []
    for part in text.split(","):
        found = sequences(part)
        if found is None:
            raise ValueError(f"--seq-lens must be tokens, as 4096, 128K, 1M or 4096x16,100, got {text!r}")
        tokens, times = found
        lengths += [tokens] * times
    if not sum(lengths):
        raise ValueError(f"--seq-lens must have tokens, got {text!r}")
    return lengths


def check(console: Console) -> int:
    """Predicted beside given times."""
    rows = tables.peer_rows()
    for title, some in (
        ("peers: given and predicted", rows),
        ("gdncp on two H200s: measured and predicted", tables.measured_rows()),
        ("aims of gdncp, and predicted", tables.aim_rows()),
    ):
        shown = Table(title=title)
        for name in ("scheme", "GPUs", "tokens", "heads", "ms", "predicted", "off"):
            shown.add_column(name, justify="left" if name == "scheme" else "right")
        for row in some:
            error = f"{row.error:+.1%}"
            heads = "/".join(map(str, row.heads))
            shown.add_row(
                row.scheme,
                str(row.gpus),
                f"{row.tokens:,}",
                heads,
                f"{row.given_ms:g}",
                f"{row.predicted_ms:.3f}",
                error,
            )
        console.print(shown)
    weak = Table("gates", "aim", "predicted", title="weak scaling, 8 GPUs, 64K tokens each")
    for gates, aim, predicted in tables.weak_rows():
        weak.add_row(gates, f"{aim:.0%}", f"{predicted:.0%}")
    console.print(weak)
    missed = [row for row in rows if abs(row.error) > ALLOWED_ERROR]
    worst = max(abs(row.error) for row in rows)
    console.print(
        f"peers: {len(rows)} times, the worst off by {worst:.1%}, {len(missed)} by more than {ALLOWED_ERROR:.0%}"
    )
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
