"""What a person sees of a run: rich tables while it goes, Markdown for the page.  All from the rows of the JSON."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

from gdncp.bench.cases import GATES
from gdncp.bench.engines import Engine
from gdncp.bench.run import Row

LOG_WIDTH = 160  # columns where the output is no terminal
NOTHING = "-"

Found = dict[str, Any]  # one row of the JSON, or the whole
CaseKey = tuple[Any, ...]

_console = Console(highlight=False)
if not _console.is_terminal:
    _console.width = LOG_WIDTH
_started = time.monotonic()


class Comparison(NamedTuple):
    """Our fastest engine and the fastest peer on one case; None where there is none that was right."""

    ours: Found | None
    peer: Found | None

    @property
    def speedup(self) -> float | None:
        return self.peer["gpu_ms"] / self.ours["gpu_ms"] if self.ours and self.peer else None


class Grid(NamedTuple):
    """A table before it is rich or Markdown."""

    title: str
    columns: list[str]
    rows: list[list[str]]


def by_case(rows: Iterable[Found]) -> dict[CaseKey, list[Found]]:
    """The rows of each case, in the order in which cases came."""
    cases: dict[CaseKey, list[Found]] = {}
    for row in rows:
        cases.setdefault((row["gates"], row["dtype"], shape_of(row)), []).append(row)
    return cases


def shape_of(row: Found) -> str:
    dim = "" if row["head_dim"] == 128 else f", D {row['head_dim']}"
    return f"{row['seq_len']} x {row['num_seqs']}, {row['num_k_heads']}/{row['num_v_heads']}{dim}"


def compare(rows: Iterable[Found]) -> Comparison:
    def fastest(ours: bool) -> Found | None:
        timed = [row for row in rows if row["ours"] == ours and row["gpu_ms"]]
        return min(timed, key=lambda row: float(row["gpu_ms"]), default=None)

    rows = list(rows)
    return Comparison(fastest(True), fastest(False))


def overview(found: Found, gates: str) -> Grid:
    """The device's time of every engine, one line a shape."""
    cases = {key: rows for key, rows in by_case(found["rows"]).items() if key[0] == gates}
    engines = list(dict.fromkeys(row["engine"] for rows in cases.values() for row in rows))
    lines = []
    for (_, _, shape), rows in cases.items():
        of_engine = {row["engine"]: row for row in rows}
        cells = [_time_or_status(of_engine.get(engine)) for engine in engines]
        best = compare(rows)
        lines.append([shape, *cells, ms(rows[0]["floor_ms"]), times(best.speedup), percent(best.ours, "floor_share")])
    last = ["floor", "best peer / ours", "ours, share of floor"]
    of = "GPU" if found["environment"]["sms"] else "CPU"
    return Grid(f"{GATES.get(gates, gates)}: {of} time, ms", ["tokens x sequences, heads qk/v", *engines, *last], lines)


def details(found: Found, gates: str) -> Grid:
    """Everything else, one line an engine and shape."""
    columns = ["tokens x sequences, heads qk/v", "engine", "events, ms", "graph, ms", "spread", "host, µs"]
    columns += ["peak, MiB", "scratch, B", "output error", "worst head", "state error", "worst head", "share of floor"]
    lines = []
    for row in found["rows"]:
        if row["gates"] == gates and row["status"] not in ("rejected", "failed"):
            memory = NOTHING if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**20:.0f}"
            errors = ("output_error", "output_error_worst", "state_error", "state_error_worst")
            cells = [shape_of(row), row["engine"], ms(row["events_ms"]), ms(row["graph_ms"]), _spread(row)]
            cells += [whole(row["host_us"]), memory, whole(row["scratch_per_token_head"])]
            lines.append([*cells, *(exponent(row[name]) for name in errors), percent(row, "floor_share")])
    return Grid(f"{GATES.get(gates, gates)}: how it was reached", columns, lines)


def stages(found: Found) -> Grid:
    """Time per stage of ours."""
    rows = [row for row in found["rows"] if row["stages_ms"]]
    names = list(dict.fromkeys(name for row in rows for name in row["stages_ms"]))
    lines = [
        [shape_of(row), row["gates"], row["engine"], str(row["detail"].get("cp_chunk_len", NOTHING))]
        + [ms(row["stages_ms"].get(name)) for name in names]
        + [ms(row["gpu_ms"])]
        for row in rows
    ]
    columns = ["tokens x sequences, heads qk/v", "gates", "engine", "CP chunk", *names, "whole call"]
    return Grid("time per stage, eager, ms", columns, lines)


def troubles(found: Found) -> list[str]:
    """A sentence for everything that has no time."""
    lines = [f"{name}: not here, {reason}" for name, reason in found["absent"].items()]
    for row in found["rows"]:
        if row["status"] != "ok":
            lines.append(f"{row['engine']} on {shape_of(row)}, {row['gates']}: {row['status']}, {row['reason']}")
    return lines + [f"{what}: left out, the time budget was spent" for what in found["left_out"]]


def grids(found: Found) -> list[Grid]:
    kinds = list(dict.fromkeys(row["gates"] for row in found["rows"]))
    tables = [overview(found, kind) for kind in kinds] + [details(found, kind) for kind in kinds]
    return [table for table in [*tables, stages(found)] if table.rows]


def markdown(found: Found) -> str:
    parts = [place(found), *(f"**{grid.title}**\n\n{markdown_table(grid)}" for grid in grids(found))]
    left = troubles(found)
    if left:
        parts.append("Without a time:\n\n" + "\n".join(f"- {line}" for line in left))
    return "\n\n".join(parts) + "\n"


def markdown_table(grid: Grid) -> str:
    lines = [grid.columns, ["---", *["---:"] * (len(grid.columns) - 1)], *grid.rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def place(found: Found) -> str:
    """Where and with what, in a paragraph."""
    e, ceilings = found["environment"], found.get("ceilings", {})
    versions = {"Python": e["python"], "torch": e["torch"], "triton": e["triton"] or NOTHING, **e["versions"]}
    text = f"{e['device']}, {e['started']}"
    text += f"; driver {e['driver']}, CUDA {e['cuda']}" if e["driver"] else ""
    text += "; " + ", ".join(f"{name} {version}" for name, version in versions.items())
    text += f"; commit {e['commit']}" if e["commit"] else ""
    if ceilings:
        text += f". Ceilings measured: {ceilings['flops'] / 1e12:.4g} TFLOP/s, {ceilings['bytes'] / 1e12:.3g} TB/s"
    return text + "."


# ---- on the screen


def say(text: str) -> None:
    _console.print(f"[dim]{time.monotonic() - _started:7.1f} s[/]  ", end="")
    _console.print(text, markup=False)


def show_start(engines: Sequence[Engine], absent: dict[str, str]) -> None:
    say("engines: " + ", ".join(engine.name for engine in engines))
    for name, reason in absent.items():
        say(f"{name} is not here: {reason}")


def show_machine(environment: Found, ceilings: dict[str, float]) -> None:
    say(place({"environment": environment, "ceilings": ceilings}))


def show_case(name: str, rows: Sequence[Row]) -> None:
    def cell(row: Row) -> str:
        return f"{row.engine} {ms(row.gpu_ms) if row.status == 'ok' else row.status}"

    say(f"{name}: " + ", ".join(cell(row) for row in rows))


def show(found: Found) -> None:
    for grid in grids(found):
        table = Table(title=grid.title, box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), title_justify="left")
        for i, column in enumerate(grid.columns):
            table.add_column(column, justify="left" if i == 0 else "right", overflow="fold")
        for line in grid.rows:
            table.add_row(*line)
        _console.print(table, markup=False)
    for trouble in troubles(found):
        _console.print(trouble, markup=False)


# ---- cells


def ms(value: float | None) -> str:
    """Three digits or more, without a unit."""
    if value is None:
        return NOTHING
    return f"{value:.4f}" if value < 0.1 else f"{value:.3f}" if value < 10 else f"{value:.1f}"


def times(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.2f}"


def percent(row: Found | None, key: str) -> str:
    return NOTHING if row is None or row[key] is None else f"{100 * row[key]:.0f} %"


def whole(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.0f}"


def exponent(value: float | str | None) -> str:
    """Errors; what is not finite is a word in JSON."""
    return NOTHING if value is None else f"{float(value):.1e}"


def _time_or_status(row: Found | None) -> str:
    return NOTHING if row is None else ms(row["gpu_ms"]) if row["status"] == "ok" else str(row["status"])


def _spread(row: Found) -> str:
    """(slowest − fastest) / median over the rounds of the figure that counts."""
    rounds = row["graph_ms_rounds"] if row["gpu_ms"] == row["graph_ms"] else row["events_ms_rounds"]
    return f"{100 * (max(rounds) - min(rounds)) / row['gpu_ms']:.0f} %" if rounds and row["gpu_ms"] else NOTHING
