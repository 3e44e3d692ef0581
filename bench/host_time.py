"""What a planned call costs the host: time to enqueue `gdncp.prefill`, warmup, and the scratch it takes.

    python bench/host_time.py                        # hopper and triton, the shapes below
    python bench/host_time.py --backends hopper --profile

Times are medians over many calls, each from its first Python instruction until it returns, on inputs that rotate; the
queue is drained between batches, so that no call waits for the device.  A `warmup` before them is timed too: cold where
`TRITON_CACHE_DIR` names an empty folder.  Needs a GPU.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import gdncp

CASES: dict[str, tuple[list[int], int, int, bool]] = {  # sequence lengths, key heads, value heads, a pool with slots
    "32768 x 1, 16/32": ([32768], 16, 32, False),
    "32768 x 1, 16/32, pool": ([32768], 16, 32, True),
    "8192 x 4, 16/32, pool": ([8192] * 4, 16, 32, True),
    "2048 x 16, 16/32": ([2048] * 16, 16, 32, False),
    "32768 x 1, 4/8": ([32768], 4, 8, False),
    "512 x 1, 16/32": ([512], 16, 32, False),
}
NUM_SETS, BATCH = 3, 10
DIM = 128


def calls_of(
    seq_lens: list[int], num_k_heads: int, num_v_heads: int, pooled: bool, backend: str
) -> tuple[gdncp.PrefillPlan, list[Callable[[], gdncp.PrefillResult]], float]:
    """The plan, a call per input set, and the seconds that warmup took."""
    plan = gdncp.plan_prefill(
        seq_lens,
        num_q_heads=num_k_heads,
        num_k_heads=num_k_heads,
        num_v_heads=num_v_heads,
        head_dim=DIM,
        profile="h200",
    )
    words: dict[str, Any] = {"gate_space": "log", "backend": backend}
    start = time.perf_counter()
    gdncp.warmup(plan, device="cuda", dtype=torch.bfloat16, pooled=pooled, **words)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    if pooled:
        words["state_pool"] = torch.zeros(2 * len(seq_lens), num_v_heads, DIM, DIM, device="cuda")
        words["state_indices"] = torch.arange(len(seq_lens), dtype=torch.int32, device="cuda")

    def call() -> Callable[[], gdncp.PrefillResult]:
        def tokens(num_heads: int) -> torch.Tensor:
            x = torch.randn(sum(seq_lens), num_heads, DIM, device="cuda", dtype=torch.bfloat16)
            return torch.nn.functional.normalize(x, dim=-1)

        q, k, v = tokens(num_k_heads), tokens(num_k_heads), tokens(num_v_heads)
        g, beta = (torch.rand(sum(seq_lens), num_v_heads, device="cuda") for _ in range(2))
        g.mul_(-0.01)
        return lambda: gdncp.prefill(plan, q, k, v, g, beta, **words)

    return plan, [call() for _ in range(NUM_SETS)], seconds


def enqueue_times(calls: list[Callable[[], Any]], count: int) -> list[float]:
    """Microseconds of each of `count` calls, sorted."""
    times = []
    for i in range(count):
        if i % BATCH == 0:
            torch.cuda.synchronize()
        start = time.perf_counter()
        calls[i % len(calls)]()
        times.append(1e6 * (time.perf_counter() - start))
    torch.cuda.synchronize()
    return sorted(times)


def scratch_bytes(call: Callable[[], gdncp.PrefillResult]) -> int:
    """The most that a call holds at once beside what it returns."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = call()
    torch.cuda.synchronize()
    peak, kept = torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before
    del result
    return peak - kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", nargs="+", default=["hopper", "triton"])
    parser.add_argument("--cases", nargs="+", default=list(CASES), help="parts of their names")
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--profile", action="store_true", help="print where the time of each case goes")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("a CUDA GPU is needed, and torch sees none")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; microseconds to enqueue")
    for backend in args.backends:
        for name, case in CASES.items():
            if not any(part in name for part in args.cases):
                continue
            plan, calls, warmup = calls_of(*case, backend)
            first = enqueue_times(calls, len(calls))[-1]
            enqueue_times(calls, 50)
            times = enqueue_times(calls, args.count)
            scratch = scratch_bytes(calls[0]) / (plan.num_tokens_total * plan.num_v_heads)
            print(
                f"{backend:7} {name:24} {plan.num_cp_chunks:4} CP chunks  median {statistics.median(times):6.1f}  "
                f"least {times[0]:6.1f}  90 % below {times[len(times) * 9 // 10]:6.1f}  first {first:7.1f}  "
                f"warmup {warmup:5.2f} s  scratch {scratch:4.0f} B a token and value head",
                flush=True,
            )
            if args.profile:
                profile = cProfile.Profile()
                profile.runcall(enqueue_times, calls, args.count)
                pstats.Stats(profile).sort_stats("tottime").print_stats(30)


if __name__ == "__main__":
    main()
