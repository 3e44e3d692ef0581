"""What a person reads of a run on several GPUs: targets beside figures, peers, scaling, exchange, links, failures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from gdncp.bench.cases import GATES as GATE_WORDS
from gdncp.bench.multi_gpu.presets import GATES
from gdncp.bench.tables import NOTHING, Grid, markdown_table, ms

# world size -> tokens -> captured ms, heads 16/32, by gates in the order of GATES
TARGETS_MS = {
    2: {32768: (0.25, 0.31, 0.40), 131072: (0.78, 1.05, 1.45), 524288: (3.1, 3.9, 5.7)},
    8: {32768: (0.18, 0.20, 0.21), 131072: (0.29, 0.39, 0.44), 1048576: (1.55, 2.2, 3.0)},
}
TARGET_HEADS = "16/32"
TARGET_EFFICIENCY = dict(zip(GATES, (0.95, 0.88, 0.70), strict=True))
TARGET_HOST_US = 150
TARGET_EXPOSED_US = {2: 40, 8: 80}

Found = dict[str, Any]


def markdown(found: Found, level: int = 1) -> str:
    """The page of one document, with headings from `level` on."""
    parts, size = found["parts"], world_size(found)
    head = "#" * level
    blocks = [f"{head} {size} GPUs of one host", place(found)]
    for title, grid in (
        ("Time", times(parts, size)),
        ("Fixups and finishes, captured, ms", choices(parts)),
        ("Peers", peers(parts)),
        ("Weak scaling", weak(parts)),
        ("What the exchange adds", exchange(parts, size)),
        ("NCCL's kernels and folds in traces, µs a call, slowest rank", traces(parts)),
        ("Predicted and measured, ms per stage, slowest rank, eager", stages(parts)),
        ("Links", links(parts)),
        ("Same bits as one GPU", checks(parts)),
        ("A rank killed", killed(parts)),
    ):
        if grid.rows:
            blocks.append(f"{head}# {title}\n\n{markdown_table(grid)}" + (f"\n\n{grid.title}" if grid.title else ""))
    left = [*found["troubles"], *(line for name, part in parts.items() for line in _skipped(name, part["skipped"]))]
    left += [f"{n}: {peer} is not here: {why}" for n, p in parts.items() for peer, why in p.get("absent", {}).items()]
    if left:
        blocks.append(f"{head}# What failed or was left out\n\n" + "\n".join(f"- {' '.join(x.split())}" for x in left))
    return "\n\n".join(blocks) + "\n"


def _skipped(part: str, lines: list[str]) -> list[str]:
    """One line a reason: a budget that was spent leaves out many cases."""
    by_reason: dict[str, list[str]] = {}
    for line in lines:
        what, _, why = line.rpartition(": ")
        by_reason.setdefault(why, []).append(what)
    return [f"{part}: skipped, as {why}: {'; '.join(what)}" for why, what in by_reason.items()]


def world_size(found: Found) -> int:
    return max((part["world_size"] for part in found["parts"].values()), default=1)


def place(found: Found) -> str:
    e = found["environment"]
    device = f"{len(e['gpus'])} x {e['gpus'][0]}" if e["gpus"] else e["device"]
    backends = "/".join(sorted({part["backend"] for part in found["parts"].values()})) or NOTHING
    text = f"{device}, {e['started']}; over {backends}; torch {e['torch']}, triton {e['triton']}"
    text += f", NCCL {e['nccl']}, driver {e['driver']}" if e["nccl"] else ""
    text += "".join(f", {name} {known}" for name, known in e["versions"].items())
    return text + (f"; commit {e['commit']}." if e["commit"] else ".")


def of(parts: Found, part: str, table: str) -> list[Found]:
    return list(parts.get(part, {}).get(table, []))


def key(row: Found) -> tuple[Any, ...]:
    return row["tokens"], row["heads"], row["gates"]


def best_ms(row: Found) -> float:
    """A captured time where there is one: what counts for targets."""
    return float(row.get("graph_ms") or row["eager_ms"])


def best(rows: Iterable[Found]) -> Found | None:
    return min(rows, key=best_ms, default=None)


def times(parts: Found, size: int) -> Grid:
    """One line a case: ours by the planner, ours at best, one GPU, the best peers."""
    ours, one, theirs = of(parts, "times", "times"), of(parts, "times", "one_gpu"), of(parts, "peers", "peers")
    lines = []
    for auto in (row for row in ours if row["variant"] == "auto"):
        same = [row for row in ours if key(row) == key(auto)]
        fastest = best(same)
        assert fastest is not None
        alone = next((row for row in one if key(row) == key(auto)), None)
        target = target_of(auto, size)
        of_case = [r for r in theirs if key(r)[:2] == key(auto)[:2] and (r["gates"] == auto["gates"] or any_gates(r))]
        many = min((r for r in of_case if not r["one_gpu"]), key=lambda r: r["eager_ms"], default=None)
        single = min((r for r in of_case if r["one_gpu"]), key=lambda r: r["eager_ms"], default=None)
        peer = min((r["eager_ms"] for r in of_case), default=None)
        lines.append(
            [
                f"{auto['tokens']}, {auto['heads']}",
                words(auto["gates"]),
                ms(target),
                ms(auto.get("graph_ms")),
                f"{ms(best_ms(fastest))} {fastest['variant']}",
                ms(auto["eager_ms"]),
                f"{auto['host_us']:.0f}",
                ms(best_ms(alone)) if alone else NOTHING,
                f"{best_ms(alone) / best_ms(auto):.2f}" if alone else NOTHING,
                f"{ms(many['eager_ms'])} {many['peer']}" if many else NOTHING,
                f"{ms(single['eager_ms'])} {single['peer']}" if single else NOTHING,
                f"{peer / best_ms(fastest):.2f}" if peer else NOTHING,
            ]
        )
    columns = ["tokens, heads", "gates", "target", "captured", "best", "eager", f"host, µs (≤ {TARGET_HOST_US})"]
    columns += ["one GPU", "x faster than one", "best peer CP", "best peer on one GPU", "x faster than peers"]
    note = (
        'ms. "Captured", "eager" and "x faster than one" are of the planner\'s choice untold of the gates; "best" and '
    )
    note += '"x faster than peers" of the fastest plan tried.'
    return Grid(note, columns, lines)


def any_gates(row: Found) -> bool:
    """Whether a peer's time does not depend on the gates, so that it was taken on one kind."""
    return bool(row.get("any_gates", "fla:" in row["peer"]))


def target_of(row: Found, size: int) -> float | None:
    targets = TARGETS_MS.get(size, {}).get(row["tokens"])
    return targets[GATES.index(row["gates"])] if targets and row["heads"] == TARGET_HEADS else None


def choices(parts: Found) -> Grid:
    rows = of(parts, "times", "times")
    names = list(dict.fromkeys(row["variant"] for row in rows))
    lines = []
    for case in dict.fromkeys(map(key, rows)):
        of_case = {row["variant"]: row for row in rows if key(row) == case}
        auto = of_case.get("auto")
        chosen = f"{auto['fixup']}, CP chunk {auto['cp_chunk_len']}" if auto else NOTHING
        lines.append(
            [f"{case[0]}, {case[1]}", words(case[2]), chosen]
            + [ms(best_ms(of_case[name])) if name in of_case else NOTHING for name in names]
        )
    return Grid("", ["tokens, heads", "gates", "the planner's", *names], lines)


def peers(parts: Found) -> Grid:
    rows = of(parts, "peers", "peers")
    names = list(dict.fromkeys(row["peer"] for row in rows))
    lines = []
    for case in dict.fromkeys(map(key, rows)):
        of_case = {row["peer"]: row for row in rows if key(row) == case}
        cells = [ms(of_case[name]["eager_ms"]) if name in of_case else NOTHING for name in names]
        lines.append([f"{case[0]}, {case[1]}", words(case[2]), *cells])
    return Grid("Eager, ms.", ["tokens, heads", "gates", *names], lines)


def weak(parts: Found) -> Grid:
    lines = [
        [
            words(row["gates"]),
            str(row["tokens_per_rank"]),
            ms(min(row["one_ms"], row["one_told_ms"])),
            ms(min(row["all_ms"], row["all_told_ms"])),
            f"{row['efficiency']:.0%}",
            f"{TARGET_EFFICIENCY[row['gates']]:.0%}",
        ]
        for row in of(parts, "times", "weak")
    ]
    return Grid("", ["gates", "tokens a rank", "one GPU, ms", "all, ms", "efficiency", "target"], lines)


def exchange(parts: Found, size: int) -> Grid:
    lines = [
        [
            f"{row['tokens']}, {row['heads']}",
            words(row["gates"]),
            f"{row['fixup']} by {row['transport']}" if "transport" in row else row["fixup"],
            ms(row["graph_ms"]),
            ms(row["without_fixup_ms"]),
            f"{row['exposed_us']:.0f}",
        ]
        for row in of(parts, "times", "times")
        if "exposed_us" in row
    ]
    target = f" (≤ {TARGET_EXPOSED_US[size]})" if size in TARGET_EXPOSED_US else ""
    note = "Captured, beside a graph of stages 1, 2 and 4 alone: without exchange and without the local fold."
    return Grid(
        note, ["tokens, heads", "gates", "fixup", "ms", "without stage 3, ms", f"difference, µs{target}"], lines
    )


def traces(parts: Found) -> Grid:
    names = ("nccl_us", "overlapped_us", "exposed_us", "fold_us", "call_us")
    lines = [
        [str(row["tokens"]), words(row["gates"]), row.get("variant", "auto"), row["kind"]]
        + [f"{max(r[name] for r in row['ranks']):.0f}" if name in row["ranks"][0] else NOTHING for name in names]
        for row in of(parts, "times", "traces")
    ]
    note = "NCCL's kernels, and folds where states go by mail, wait for the peer, and that wait counts."
    columns = [
        "tokens",
        "gates",
        "plan",
        "call",
        "NCCL",
        "other kernels beside",
        "alone",
        "folds of runs",
        "whole call",
    ]
    return Grid(note, columns, lines)


def stages(parts: Found) -> Grid:
    rows = [row for row in of(parts, "times", "times") if "measured_stages_ms" in row]
    names = list(dict.fromkeys(name for row in rows for name in row["measured_stages_ms"]))
    lines = []
    for row in rows:
        cells = [f"{row['tokens']}, {row['heads']}", words(row["gates"])]
        for name in names:
            predicted, measured = (row[f"{kind}_stages_ms"].get(name) for kind in ("predicted", "measured"))
            cells.append(
                f"{ms(max(predicted)) if predicted else NOTHING} / {ms(max(measured)) if measured else NOTHING}"
            )
        lines.append([*cells, f"{ms(row['predicted_ms'])} / {ms(best_ms(row))}"])
    return Grid("The last column is the whole call, captured.", ["tokens, heads", "gates", *names, "call"], lines)


def links(parts: Found) -> Grid:
    found = parts.get("links", {}).get("links") or {"exchanges": {}}
    lines = []
    for name, kinds in found["exchanges"].items():
        for kind, of_kind in kinds.items():
            cells = [name, kind, *(f"{1e6 * row['seconds']:.1f}" for row in of_kind["rows"])]
            rate = of_kind.get("bytes_per_s")
            cells.append(f"{1e6 * of_kind['alpha_s']:.1f}" if "alpha_s" in of_kind else NOTHING)
            cells.append(f"{rate / 1e9:.0f}" if isinstance(rate, float | int) else NOTHING)
            lines.append(cells)
    sizes: list[Found] = next((k["rows"] for kinds in found["exchanges"].values() for k in kinds.values()), [])
    columns = ["exchange", "call", *(f"{row['bytes'] // 1024} KiB" for row in sizes), "alpha, µs", "beta, GB/s"]
    return Grid("µs by bytes that a rank puts in; beta by bytes that leave a rank.", columns, lines)


def checks(parts: Found) -> Grid:
    lines = []
    for row in of(parts, "checks", "small") + of(parts, "checks_others", "small") + of(parts, "checks", "large"):
        case = row.get("case") or f"{row['tokens']} tokens, {row['heads']}, {words(row['gates'])}"
        engine = f"{row['backend']}, {row['dtype']}" if "backend" in row else NOTHING
        cells = [case, engine, f"{row['equal']} of {row['promised']}"]
        cells += [f"{row['captured_equal']} of {row['captured']}", str(row["left_out"]), f"{row['error']:.1e}"]
        cells.append(", ".join(f"{count} {name}" for name, count in row.get("transports", {}).items()) or NOTHING)
        lines.append([*cells, f"{row['without_promise_error']:.1e}" if row["without_promise"] else NOTHING])
    columns = ["case", "kernels", "eager", "captured", "left out", "one GPU off float64", "states by"]
    columns.append("plans without the promise")
    return Grid("", columns, lines)


def killed(parts: Found) -> Grid:
    part = parts.get("killed", {})
    lines = [
        [way, str(s["rank"]), str(s["seconds"]), str(s["exit_code"]), " ".join(s["said"].split())[:400]]
        for way, said in part.get("ways", {}).items()
        for s in said["survivors"]
    ]
    note = f"Group timeout {part['group_timeout_s']:.0f} s." if lines else ""
    return Grid(note, ["group", "survivor", "s after the kill", "exit code", "what it said"], lines)


def words(gates: str) -> str:
    return GATE_WORDS.get(gates, gates)


def sections(results: Mapping[str, Found]) -> list[str]:
    """For docs/performance.md, of documents by file name."""
    return [f"{markdown(found, level=2).rstrip()}\n\nFrom {name}.json." for name, found in results.items()]
