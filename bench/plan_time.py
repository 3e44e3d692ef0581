"""What planning costs the host: `plan_prefill` anew, one rank's tables of the plan, and a plan that is known already.

    python bench/plan_time.py
    python bench/plan_time.py --only zigzag --profile

Times are the least of several runs, in ms; `again` is the same call once more, in µs.  Needs no GPU.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import random
import time
from collections.abc import Callable
from typing import Any

from gdncp.plan import PrefillPlan, plan_prefill

RUNS, LOOKUPS = 5, 1000
LAYER: dict[str, Any] = {"num_q_heads": 16, "num_k_heads": 16, "num_v_heads": 32, "profile": "h200"}


def lengths(count: int) -> list[int]:
    """Log-normal, about 4000 tokens each."""
    generator = random.Random(0)
    return [int(generator.lognormvariate(8, 0.8)) for _ in range(count)]


CASES: dict[str, tuple[list[int], dict[str, Any]]] = {
    "4096 on 64": (lengths(4096), {"world_size": 64}),
    "4096 on 64, reproducible": (lengths(4096), {"world_size": 64, "require_reproducible": True}),
    "4096 on 64, zigzag": (lengths(4096), {"world_size": 64, "ownership": "zigzag"}),
    "4096 on 64, zigzag of 512": (lengths(4096), {"world_size": 64, "ownership": "zigzag", "cp_chunk_len": 512}),
    "4096 on 1": (lengths(4096), {}),
    "131072 on 8": ([131072], {"world_size": 8}),
    "524288 on 2": ([524288], {"world_size": 2}),
    "1048576 on 64": ([1 << 20], {"world_size": 64}),
    "16 on 8": (lengths(16), {"world_size": 8}),
    "32768 on 1": ([32768], {}),
}


def least_seconds(call: Callable[[], Any], runs: int = RUNS) -> float:
    found = []
    for _ in range(runs):
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return min(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="cases whose name has this in it")
    parser.add_argument("--profile", action="store_true", help="where the time of planning goes")
    args = parser.parse_args()
    print(f"{'case':28} {'plan, ms':>9} {'a rank, ms':>11} {'again, µs':>10}  pieces")
    for name, (seq_lens, words) in CASES.items():
        if args.only and args.only not in name:
            continue
        count = iter(range(1 << 30))

        def fresh(seq_lens: list[int] = seq_lens, words: dict[str, Any] = words, count: Any = count) -> PrefillPlan:
            """Another bound each time, of which no plan is known, and which changes nothing else."""
            return plan_prefill(seq_lens, forget_below=2.0**-16 * (1 + next(count) * 1e-9), **words, **LAYER)

        plan = fresh()
        planned = least_seconds(fresh)
        tables = least_seconds(lambda plan=plan: plan.rank_plan(0), 1)  # type: ignore[misc]
        plan_prefill(seq_lens, **words, **LAYER)
        again = least_seconds(
            lambda s=seq_lens, w=words: [plan_prefill(s, **w, **LAYER) for _ in range(LOOKUPS)]  # type: ignore[misc]
        )
        row = f"{name:28} {1e3 * planned:9.1f} {1e3 * tables:11.1f} {1e6 * again / LOOKUPS:10.1f}  {len(plan.segments)}"
        print(row, flush=True)
        if args.profile:
            profiler = cProfile.Profile()
            profiler.runcall(fresh)
            pstats.Stats(profiler).sort_stats("tottime").print_stats(20)


if __name__ == "__main__":
    main()
