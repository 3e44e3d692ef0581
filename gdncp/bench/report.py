"""`python -m gdncp.bench.report`: docs/performance.md from the measured results in bench/results.

    python -m gdncp.bench.report            # writes docs/performance.md from bench/results/*.json and bench/notes.md
    python -m gdncp.bench.report --check    # exits 1 if the page is not what the results say

Nothing on the page is written by hand but the notes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gdncp import store
from gdncp.bench import tables
from gdncp.bench.cases import CHUNK, GATES, HALF_LIVES
from gdncp.bench.multi_gpu import merge
from gdncp.bench.multi_gpu.page import sections
from gdncp.bench.run import SCHEMA
from gdncp.bench.tables import Comparison, Grid

HEAD = f"""# Performance

Written by `python -m gdncp.bench.report` from the results in [bench/results](../bench/results).
`bash bench/h200.sh OUT` measures them again.

Forward, final states wanted, no initial states. Inputs are random, and calls rotate over sets that together are larger
than the L2 cache. "Gates that forget" have per-head half-lives log-spaced from {HALF_LIVES[0]:.0f} to \
{HALF_LIVES[1]:.0f} tokens; "gates ≈ 1" never forget.
Every engine gets the same inputs in one process, and is first held against a float64 reference: what is wrong has no
time. Engines are timed in turn over several rounds, and a figure is the median of the rounds' medians.

- **events**: between device events around one eager call; the stream is held busy before the first while the host
  enqueues the call, so that the host's time is not in it.
- **graph**: a call in a CUDA graph of one call per input set. The GPU time in a table is the smaller of the two.
- **host**: until an eager call returns, the device idle when it begins.
- **scratch**: bytes per token and value head that a call allocates at most beside its results. What a library keeps
  from earlier calls of the same case counts; what it kept from other cases does not.
- **errors**: relative L2 against float64, over everything and of the worst sequence and head.
- **floor**: the larger of two times: the matrix products of the rule in chunks of {CHUNK} tokens, sequences left whole,
  at the measured rate of a large matrix product; and each input read and each result written once, at the measured
  bandwidth of a large copy (bytes read plus bytes written).
"""


def page(results: Mapping[str, dict[str, Any]], notes: str = "") -> str:
    """The page from documents by file name.  ValueError for a document of another schema, or none at all."""
    if not results:
        raise ValueError("there are no results to report")
    several = {name: found for name, found in results.items() if found.get("kind") == merge.KIND}
    results = {name: found for name, found in results.items() if name not in several}
    for documents, schema in ((results, SCHEMA), (several, merge.SCHEMA)):
        for name, found in documents.items():
            if found.get("schema") != schema:
                raise ValueError(f"{name} has schema {found.get('schema')}; only {schema} is read")
    parts = [HEAD.rstrip()]
    for kind, words in GATES.items():
        grid = _against_peers(results, kind)
        if grid.rows:
            parts.append(f"## {words[0].upper()}{words[1:]}\n\n{tables.markdown_table(grid)}")
    parts += sections(several)
    if notes.strip():
        parts.append(notes.strip())
    for name, found in results.items():
        parts.append(f"## Run {name}\n\n{tables.markdown(found).rstrip()}")
    return "\n\n".join(parts) + "\n"


def _against_peers(results: Mapping[str, dict[str, Any]], kind: str) -> Grid:
    """Our fastest engine beside the best peer of the same run; of several runs, the one that flatters us least."""
    best: dict[str, Comparison] = {}
    for found in results.values():
        for (gates, _, shape), rows in tables.by_case(found["rows"]).items():
            new = tables.compare(rows)
            if gates == kind and new.ours and _order(new) < _order(best.get(shape, Comparison(None, None))):
                best[shape] = new
    lines = []
    for shape, (ours, peer) in best.items():
        assert ours is not None
        cells = [shape, tables.ms(ours["gpu_ms"]), ours["engine"]]
        cells += [tables.ms(peer["gpu_ms"]), peer["engine"]] if peer else [tables.NOTHING] * 2
        cells += [tables.times(Comparison(ours, peer).speedup), tables.percent(ours, "floor_share")]
        cells += [_error(ours), _error(peer), tables.whole(ours["host_us"])]
        cells.append(tables.whole(ours["scratch_per_token_head"]))
        lines.append(cells)
    columns = [
        "tokens x sequences, heads qk/v",
        "ours, ms",
        "by",
        "best peer, ms",
        "by",
        "times faster",
        "share of floor",
    ]
    columns += ["error, ours", "error, peer", "host, µs", "scratch, B"]
    return Grid(kind, columns, lines)


def _order(comparison: Comparison) -> float:
    """Smaller flatters less; a run without peers comes after every run with them."""
    if comparison.ours is None:
        return float("inf")
    return 1e9 if comparison.speedup is None else comparison.speedup


def _error(row: dict[str, Any] | None) -> str:
    """The larger of the errors of output and state."""
    return (
        tables.NOTHING if row is None else tables.exponent(max(float(row["output_error"]), float(row["state_error"])))
    )


def main(arguments: Sequence[str] | None = None) -> int:
    root = Path(__file__).parents[2]
    p = argparse.ArgumentParser("python -m gdncp.bench.report", description=(__doc__ or "").partition("\n")[0])
    p.add_argument("--results", type=Path, default=root / "bench" / "results", help="folder of *.json")
    p.add_argument("--notes", type=Path, default=root / "bench" / "notes.md", help="what was tried, by hand")
    p.add_argument("--out", type=Path, default=root / "docs" / "performance.md")
    p.add_argument("--check", action="store_true", help="write nothing; exit 1 if the page is not up to date")
    args = p.parse_args(arguments)
    results = {path.stem: json.loads(path.read_text()) for path in sorted(args.results.glob("*.json"))}
    try:
        text = page(results, args.notes.read_text() if args.notes.exists() else "")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if args.check:
        return 0 if args.out.exists() and args.out.read_text() == text else 1
    store.write_text(args.out, text)
    print(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
