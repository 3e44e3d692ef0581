"""What a person sees of a run: plain lines and tables that read the same in a terminal and in a CI log."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from gdncp.plan import PrefillPlan
from gdncp.stages import STAGES

LOG_WIDTH = 100  # columns where the output is no terminal
MOST_ROWS = 16  # ranks shown; of more, the slowest
COLUMNS = (*STAGES, "total")
RESULTS = ("output", "final_state", "state_checkpoints")


class Screen:
    """Rank 0's view; others have none."""

    def __init__(self, console: Console | None = None):
        self.console = console or Console(highlight=False)
        if not self.console.is_terminal and console is None:
            self.console.width = LOG_WIDTH
        self._started = time.perf_counter()

    def step(self, text: str) -> None:
        self.console.print(f"[dim]{time.perf_counter() - self._started:7.1f} s[/]  {text}")

    def failed(self, text: str) -> None:
        self.console.print("[bold red]failed:[/] ", end="")
        self.console.print(text, markup=False)

    def plan(self, plan: PrefillPlan, report: dict[str, Any]) -> None:
        self._started = time.perf_counter()
        self.console.rule("[bold]Plan[/]", align="left")
        self.console.print(plan.explain(), markup=False)
        self.console.print(f"Runs on {_places(report['ranks'])}.", markup=False)
        self.console.rule("[bold]Run[/]", align="left")

    def finished(self, report: dict[str, Any], run_dir: Path) -> None:
        if "stages" in report:
            self.console.rule("[bold]Time and traffic[/]", align="left")
            self.console.print(stage_table(report))
            self.console.print(
                f"{report['plan']['num_tokens']} tokens in {seconds(report['seconds'])} on the slowest rank: "
                f"{report['tokens_per_second']:,.0f} tokens/s; fixup: {report['sent']['strategy'][0]}; "
                f"kernels: {report['backend']}"
            )
            self.console.print(_forgotten(report["forgetting"]))
        if "error" in report and isinstance(report["error"], dict):
            self.console.rule("[bold]Error against the reference[/]", align="left")
            self.console.print(error_table(report["error"]))
            verdict = "[bold green]within tolerance[/]" if report["ok"] else "[bold red]BEYOND TOLERANCE[/]"
            self.console.print(f"{verdict}, against {report['error']['against']}")
        elif "error" in report:
            self.failed(report["error"])
        self.console.print("Results: ", end="")
        self.console.print(str(run_dir), markup=False, soft_wrap=True)

    def sweep(self, points: Sequence[dict[str, Any]], path: Path) -> None:
        self.console.rule("[bold]Sweep, best first[/]", align="left")
        self.console.print(sweep_table(points))
        for point in points:
            if isinstance(point.get("error"), str):
                self.failed(f"{' '.join(point['overrides'])}: {point['error']}")
        self.console.print("Results: ", end="")
        self.console.print(str(path), markup=False, soft_wrap=True)


def _table(*columns: str) -> Table:
    """First column to the left, numbers to the right."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for i, column in enumerate(columns):
        header = "\n".join(column.rsplit("_", 1)) if column in STAGES else column
        table.add_column(header, justify="left" if i == 0 else "right", overflow="fold")
    return table


def _places(ranks: Sequence[dict[str, Any]]) -> str:
    """ "4 ranks over gloo, cpu with 1 thread each" and its like."""
    devices = sorted({rank["device"] for rank in ranks})
    gpus = {(rank["host"], rank["device_index"]) for rank in ranks if rank["device_index"] is not None}
    many = f"{len(ranks)} ranks" if len(ranks) > 1 else "one rank"
    over = f" over {ranks[0]['transport']}" if len(ranks) > 1 else ""
    hosts = len({rank["host"] for rank in ranks})
    what = f"{len(gpus)} x {', '.join(devices)}" if gpus else f"the CPU, threads a rank: {ranks[0]['threads']}"
    return f"{many}{over} on {what}" + (f", {hosts} hosts" if hosts > 1 else "")


def _forgotten(forgetting: dict[str, Any]) -> str:
    if not forgetting["num_maps"]:
        return "stage 2: no CP chunk passes a state on"
    dropped, read = 100 * forgetting["forgot_share"], 100 * forgetting["scanned_share"]
    bound = f"{forgetting['output_bound']:.1e}"
    return f"stage 2: {dropped:.0f} % of transitions forgotten, {read:.0f} % of tokens read, at most {bound} off"


def stage_table(report: dict[str, Any]) -> Table:
    """Per rank and stage the measured seconds and what the rank sent; below, the slowest beside the prediction."""
    stages, sent = report["stages"], report["sent"]
    carriers = {by for by, messages in zip(sent["transport"], sent["messages_sent"], strict=True) if messages}
    table = _table("rank", *COLUMNS, "sent" + (f" by {' or '.join(sorted(carriers))}" if carriers else ""))
    totals = stages["total"]["measured_seconds"]
    shown = sorted(range(len(totals)), key=lambda rank: -totals[rank])[:MOST_ROWS]
    for rank in sorted(shown):
        messages, size = sent["messages_sent"][rank], sent["bytes_sent"][rank]
        traffic = f"{messages} x, {in_bytes(size)}" if messages else "nothing"
        table.add_row(str(rank), *(seconds(stages[s]["measured_seconds"][rank]) for s in COLUMNS), traffic)
    table.add_section()
    if len(totals) > 1:
        slowest = [seconds(max(stages[stage]["measured_seconds"])) for stage in COLUMNS]
        table.add_row("slowest", *slowest, in_bytes(sum(sent["bytes_sent"])) + " in all")
    predicted = [max(stages[stage]["predicted_seconds"]) for stage in COLUMNS]
    if any(predicted):
        table.add_row("predicted", *map(seconds, predicted), f"by {report['plan']['profile']}", style="dim")
        ratios = [stages[stage]["slowest_measured_over_predicted"] for stage in COLUMNS]
        cells = ["-" if ratio is None else f"{ratio:.2f}" for ratio in ratios]
        table.add_row("measured / predicted", *cells, "", style="dim")
    return table


def error_table(error: dict[str, Any]) -> Table:
    table = _table("result", "worst relative error", "tolerance", "share used", "worst at")
    for name in RESULTS:
        if name in error:
            worst = error[name]
            row = "checkpoint" if name == "state_checkpoints" else "sequence"
            share = f"{100 * float(worst['ratio']):.1f} %"
            where = f"{row} {worst['row']}, head {worst['head']}"
            style = "bold red" if not float(worst["ratio"]) <= 1 else None
            table.add_row(name, f"{worst['relative']:.2e}", f"{worst['tolerance']:.1e}", share, where, style=style)
    return table


def sweep_table(points: Sequence[dict[str, Any]]) -> Table:
    table = _table("point", *COLUMNS, "tokens/s", "error")
    common = set.intersection(*(set(point["overrides"]) for point in points)) if len(points) > 1 else set()
    for point in points:
        overrides = " ".join(override for override in point["overrides"] if override not in common)
        if "stages" not in point:
            table.add_row(overrides, *[""] * len(COLUMNS), "", "failed", style="red")
            continue
        cells = [seconds(max(point["stages"][stage]["measured_seconds"])) for stage in COLUMNS]
        error = point.get("error", "")
        if isinstance(error, dict):
            error = f"{max(error[name]['relative'] for name in RESULTS if name in error):.1e}"
        table.add_row(overrides, *cells, f"{point['tokens_per_second']:,.0f}", error if point["ok"] else f"{error} !")
    return table


def seconds(value: float) -> str:
    """Three digits and a unit."""
    factor, unit = (1.0, "s") if value >= 1 else (1e3, "ms") if value >= 1e-3 else (1e6, "µs")
    value *= factor
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f} {unit}"


def in_bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("unreachable")
