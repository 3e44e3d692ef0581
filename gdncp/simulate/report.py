"""Cases as rows, a table for a terminal, JSON and a plot."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from xml.sax.saxutils import escape

from rich.table import Table

from gdncp.plan import PrefillPlan
from gdncp.simulate.schemes import Outcome


@dataclass(frozen=True)
class Case:
    """One simulated run."""

    batch: str  # as asked for
    tokens: int
    gpus: int
    scheme: str
    ownership: str
    fixup_asked: str
    fixup: str  # that ran; "local" where nothing crosses ranks
    way: str  # `way` of the plan
    cp_chunk_len: int  # 0: not a scheme that has them
    gates: str
    outcome: Outcome
    efficiency: float  # of one GPU's pace with the same scheme and gates
    wins: bool  # the fastest of what was simulated for these tokens and GPUs
    chosen: bool  # what the planner would choose


def way(plan: PrefillPlan) -> str:
    """How a plan hides and shortens its exchange, in a few words; nothing: `entry_first`, no spans and one lane."""
    words = ["late"] if plan.finish == "entry_late" else []
    if plan.fold_span > 1:
        words.append(f"spans {plan.fold_span}")
    if plan.lanes_per_rank > 1:
        by_heads = plan.lanes_by == "heads"
        words.append(f"heads / {len(plan.head_groups)}" if by_heads else f"{plan.lanes_per_rank} lanes")
    return ", ".join(words)


def document(cases: Sequence[Case]) -> str:
    """JSON: per case all that the table has, and per rank what it has in sum."""
    rows = []
    for case in cases:
        row = asdict(case)
        row["outcome"]["stages"] = {name: list(times) for name, times in case.outcome.stages.items()}
        rows.append(row)
    return json.dumps({"cases": rows}, indent=1, allow_nan=False) + "\n"


def table(cases: Sequence[Case]) -> Table:
    result = Table(title="simulated; * fastest for these tokens and GPUs, p what the planner chooses")
    for name in ("tokens", "GPUs"):
        result.add_column(name, justify="right", no_wrap=True)
    for name in ("scheme", "ownership", "fixup", "way"):
        result.add_column(name, overflow="fold")
    for name in ("CP chunk", "ms", "efficiency", "exchange µs", "sent/rank", "sent", "memory/rank"):
        result.add_column(name, justify="right")
    previous: tuple[str, int] | None = None
    shown: list[str] = []
    for case in cases:
        if previous not in (None, (case.batch, case.gpus)):
            result.add_section()
        cells = _cells(case)
        if cells != shown or previous != (case.batch, case.gpus):  # where nothing crosses ranks all fixups are one
            result.add_row(*cells, style="bold" if case.wins else None)
        previous, shown = (case.batch, case.gpus), cells
    return result


def _cells(case: Case) -> list[str]:
    outcome = case.outcome
    marks = "*" * case.wins + "p" * case.chosen
    return [
        f"{case.tokens:,}",
        f"{case.gpus:,}",
        case.scheme,
        case.ownership,
        f"{case.fixup} {marks}".strip(),
        case.way,
        f"{case.cp_chunk_len:,}" if case.cp_chunk_len else "",
        f"{outcome.seconds * 1e3:.3f}",
        f"{case.efficiency:.1%}",
        f"{max(outcome.exchange) * 1e6:.0f}",
        size(max(outcome.bytes_sent)),
        size(sum(outcome.bytes_sent)),
        size(max(outcome.memory_bytes)) if outcome.memory_bytes else "",
    ]


def winners(cases: Sequence[Case]) -> Table:
    """Which fixup of ours wins where."""
    own = [case for case in cases if case.scheme == "ours"]
    gpus = sorted({case.gpus for case in own})
    result = Table(title="the fastest fixup, and how much slower the planner's choice is where it is another")
    result.add_column("batch")
    result.add_column("ownership")
    for count in gpus:
        result.add_column(f"{count:,} GPU{'s' * (count > 1)}", justify="right")
    for batch, ownership in dict.fromkeys((case.batch, case.ownership) for case in own):
        cells = []
        for count in gpus:
            group = [case for case in own if (case.batch, case.ownership, case.gpus) == (batch, ownership, count)]
            best = min(group, key=lambda case: case.outcome.seconds)
            chosen = min((case.outcome.seconds for case in group if case.chosen), default=best.outcome.seconds)
            behind = chosen / best.outcome.seconds - 1
            cells.append(best.fixup + (f" {behind:+.1%}" if behind > 5e-4 else ""))
        result.add_row(batch, ownership, *cells)
    return result


def size(number: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.0f} {unit}" if number >= 10 or unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} TiB"


# ---- the plot: milliseconds over GPUs, a line per batch and way

_COLOURS = ("#1b6ca8", "#c8553d", "#3a7d44", "#8f5fbf", "#b8860b", "#444444", "#d1495b", "#00798c")
_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 640, 400, 70, 40, 50
_LEGEND = 300  # pixels right of the plot


def plot(cases: Sequence[Case]) -> str:
    """A whole SVG document."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for case in cases:
        fixup = "" if case.scheme != "ours" else f" {case.fixup_asked}"
        lines.setdefault(f"{case.batch} {case.scheme}{fixup} {case.ownership}".strip(), []).append(
            (case.gpus, case.outcome.seconds * 1e3)
        )
    gpus = sorted({case.gpus for case in cases})
    times = [max(time, 1e-6) for line in lines.values() for _, time in line]
    low, high = 10 ** math.floor(math.log10(min(times))), 10 ** math.ceil(math.log10(max(times) * 1.0001))

    def x(count: float) -> float:
        span = math.log(gpus[-1] / gpus[0]) or 1.0
        return _LEFT + _WIDTH * math.log(count / gpus[0]) / span

    def y(time: float) -> float:
        return _TOP + _HEIGHT * (1 - math.log(max(time, 1e-6) / low) / math.log(high / low))

    parts = [_text(_LEFT, 24, "milliseconds over GPUs, simulated", size=16)]
    for count in gpus:
        parts.append(f'<path d="M{x(count):.1f} {_TOP}v{_HEIGHT}" stroke="#dddddd"/>')
        parts.append(_text(x(count), _TOP + _HEIGHT + 18, str(count), anchor="middle"))
    for power in range(round(math.log10(low)), round(math.log10(high)) + 1):
        parts.append(f'<path d="M{_LEFT} {y(10.0**power):.1f}h{_WIDTH}" stroke="#dddddd"/>')
        parts.append(_text(_LEFT - 8, y(10.0**power) + 4, f"{10.0**power:g}", anchor="end"))
    for number, (name, line) in enumerate(lines.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        points = " ".join(f"{x(count):.1f},{y(time):.1f}" for count, time in sorted(line))
        dashes = f' stroke-dasharray="{2 + 4 * (number // len(_COLOURS))} 3"' if number >= len(_COLOURS) else ""
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"{dashes}/>')
        for count, time in line:
            label = escape(f"{name}, {count} GPUs: {time:.3f} ms")
            parts.append(
                f'<circle cx="{x(count):.1f}" cy="{y(time):.1f}" r="3" fill="{colour}"><title>{label}</title></circle>'
            )
        row = _TOP + 16 * number + 10
        parts.append(
            f'<path d="M{_LEFT + _WIDTH + 20} {row - 4}h24" stroke="{colour}" stroke-width="2" fill="none"{dashes}/>'
        )
        parts.append(_text(_LEFT + _WIDTH + 52, row, name))
    width = _LEFT + _WIDTH + 20 + _LEGEND
    height = max(_TOP + _HEIGHT + _BOTTOM, _TOP + 16 * len(lines) + 20)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="Helvetica, Arial, sans-serif"><rect width="{width}" height="{height}" fill="#ffffff"/>'
    )
    return "\n".join([head, *parts, "</svg>\n"])


def _text(x: float, y: float, text: str, *, size: int = 12, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}">{escape(text)}</text>'
