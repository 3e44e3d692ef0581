"""What planning costs the host: `plan_prefill` anew, one rank's tables of the plan, and a plan that is known already.

    python bench/plan_time.py
    python bench/plan_time.py --only zigzag --profile
    python bench/plan_time.py --survey > after.txt

Times are the least of several runs, in ms, each without what planning keeps between calls; `again` is the same call
once more, `equal` with another list that equals it, in µs.  Needs no GPU.

A survey plans 256 batches, 1 to 32 sequences of about 8192 to 524288 tokens on 1 to 64 ranks, and says the digest of
each plan: where planning has become faster and nothing else, the digests of two commits are the same.
"""

from __future__ import annotations

import argparse
import cProfile
import itertools
import pstats
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from gdncp.plan import PrefillPlan, plan_prefill

RUNS, LOOKUPS = 5, 1000
LAYER: dict[str, Any] = {"num_q_heads": 16, "num_k_heads": 16, "num_v_heads": 32, "profile": "h200"}
MOST_MS = 50  # that a plan may take


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
    "8388608 on 8": ([1 << 23], {"world_size": 8}),
    "16 on 8": (lengths(16), {"world_size": 8}),
    "32768 on 1": ([32768], {}),
}


def survey() -> Iterator[tuple[str, list[int], dict[str, Any]]]:
    """Batches as in `tests/plan/test_few_sequences.py`: (name, lengths, words of the call)."""
    grid = ((1, 2, 8, 32), (1, 2, 8, 64), (8192, 32768, 131072, 524288), (False, True), ("contiguous", "zigzag"))
    for number, world_size, tokens, differ, ownership in itertools.product(*grid):
        generator = random.Random(1)
        factors = [generator.lognormvariate(-0.3, 0.8) if differ else 1 for _ in range(number)]
        name = f"{number} x {'about ' * differ}{tokens} on {world_size}, {ownership}"
        seq_lens = [max(int(tokens * factor), 1) for factor in factors]
        yield name, seq_lens, {"world_size": world_size, "ownership": ownership}


def least_seconds(call: Callable[[], Any], runs: int = RUNS, before: Callable[[], Any] = lambda: None) -> float:
    found = []
    for _ in range(runs):
        before()
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return min(found)


def forget() -> None:
    """What planning keeps between calls, but for plans."""
    for name, module in [*sys.modules.items()]:
        for value in vars(module).values() if name.startswith("gdncp.plan") else ():
            if hasattr(value, "cache_clear"):
                value.cache_clear()


_number = itertools.count()


def fresh(seq_lens: list[int], words: dict[str, Any]) -> PrefillPlan:
    """Another bound each time, of which no plan is known, and which changes nothing else."""
    return plan_prefill(seq_lens, forget_below=2.0**-16 * (1 + next(_number) * 1e-9), **words, **LAYER)


def again_seconds(seq_lens: list[int], words: dict[str, Any]) -> float:
    return least_seconds(lambda: [plan_prefill(seq_lens, **words, **LAYER) for _ in range(LOOKUPS)]) / LOOKUPS


def equal_seconds(seq_lens: list[int], words: dict[str, Any]) -> float:
    """Of lists that are made before, as an engine's are for every call."""
    runs = [[seq_lens.copy() for _ in range(LOOKUPS)] for _ in range(RUNS)]
    return least_seconds(lambda: [plan_prefill(one, **words, **LAYER) for one in runs.pop()]) / LOOKUPS


def print_case(name: str, seq_lens: list[int], words: dict[str, Any], profile: bool) -> None:
    plan = fresh(seq_lens, words)
    planned = least_seconds(partial(fresh, seq_lens, words), before=forget)
    tables = least_seconds(lambda: plan.rank_plan(0), 1)
    plan_prefill(seq_lens, **words, **LAYER)
    again, equal = (1e6 * seconds(seq_lens, words) for seconds in (again_seconds, equal_seconds))
    row = f"{name:28} {1e3 * planned:9.1f} {1e3 * tables:11.1f} {again:10.1f} {equal:10.1f}  {len(plan.segments)}"
    print(row, flush=True)
    if profile:
        forget()
        profiler = cProfile.Profile()
        profiler.runcall(fresh, seq_lens, words)
        pstats.Stats(profiler).sort_stats("tottime").print_stats(20)


def print_survey(only: str) -> None:
    found = []
    for name, seq_lens, words in survey():
        if only in name:
            found.append(1e3 * least_seconds(partial(fresh, seq_lens, words), before=forget))
            digest = plan_prefill(seq_lens, **words, **LAYER).digest[:12]
            print(f"{name:40} {digest} {found[-1]:7.1f} ms", flush=True)
    slow = sum(ms > MOST_MS for ms in found)
    of_all = f"median {statistics.median(found):.1f}, most {max(found):.1f}"
    print(f"{slow} of {len(found)} take over {MOST_MS} ms; {of_all}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--profile", action="store_true", help="where the time of planning goes")
    parser.add_argument("--survey", action="store_true", help="256 batches and the digests of their plans instead")
    args = parser.parse_args()
    if args.survey:
        return print_survey(args.only)
    print(f"{'case':28} {'plan, ms':>9} {'a rank, ms':>11} {'again, µs':>10} {'equal, µs':>10}  pieces")
    for name, (seq_lens, words) in CASES.items():
        if args.only in name:
            print_case(name, seq_lens, words, args.profile)


if __name__ == "__main__":
    main()
