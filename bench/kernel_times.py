"""What each kernel of a planned call takes on a GPU, and whether the results are those of an earlier run.

    python bench/kernel_times.py --out before.pt --cases 32768x1:16/32:6592:one 32768x1:4/8:1984:forget
    python bench/kernel_times.py --compare before.pt --cases ...

A case is TOKENSxSEQUENCES:QK_HEADS/V_HEADS:CP_CHUNK_LEN:GATES, CP_CHUNK_LEN 0 for the plan's choice; gates "one" (alpha
of 1) or "forget" (half-lives of 4 to 16384 tokens over the heads).  For A/B runs: change a kernel, or put another copy
of `gdncp_kernels` first on PYTHONPATH, and run again on the same machine.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import gdncp
from gdncp.plan import plan_prefill

RUNS = 12
KERNELS = re.compile("precompute_t|recurrence|fold|scan|prefill|chunk_bounds|cut_kernel")


def call_of(case: str, backend: str) -> Callable[[], gdncp.PrefillResult]:
    """The prefill of a case on random tokens, the same in every run."""
    found = re.fullmatch(r"(\d+)x(\d+):(\d+)/(\d+):(\d+):(one|forget)", case)
    if not found:
        raise SystemExit(f"a case is TOKENSxSEQUENCES:QK_HEADS/V_HEADS:CP_CHUNK_LEN:GATES, got {case!r}")
    tokens, sequences, qk_heads, v_heads, length = map(int, found.groups()[:5])
    total = tokens * sequences
    gen = torch.Generator("cuda").manual_seed(total + v_heads)

    def random(num_heads: int) -> torch.Tensor:
        return torch.randn(total, num_heads, 128, device="cuda", generator=gen)

    q, v = random(qk_heads).bfloat16(), random(v_heads).bfloat16()
    k = torch.nn.functional.normalize(random(qk_heads), dim=-1).bfloat16()
    beta = torch.rand(total, v_heads, device="cuda", generator=gen)
    alpha = torch.ones(total, v_heads, device="cuda")
    if found[6] == "forget":
        half_lives = 4 * 4096 ** torch.linspace(0, 1, v_heads, device="cuda")
        alpha *= 0.5 ** (1 / half_lives)
    plan = plan_prefill(
        [tokens] * sequences,
        num_q_heads=qk_heads,
        num_k_heads=qk_heads,
        num_v_heads=v_heads,
        cp_chunk_len=length or None,
        profile="h200",
    )
    return lambda: gdncp.prefill(plan, q, k, v, alpha, beta, backend=backend)


def kernel_times(call: Callable[[], Any]) -> list[tuple[str, float]]:
    """(kernel, median µs) in order of launch."""
    with profile(activities=[ProfilerActivity.CUDA]) as p:
        for _ in range(RUNS):
            call()
        torch.cuda.synchronize()
    events = [e for e in p.events() if e.device_type == torch.autograd.DeviceType.CUDA and KERNELS.search(e.name)]
    events.sort(key=lambda e: e.time_range.start)
    per_call = len(events) // RUNS
    runs = [[e.time_range.elapsed_us() for e in events[i : RUNS * per_call : per_call]] for i in range(per_call)]
    return [(events[i].name.removesuffix("_kernel"), median(times)) for i, times in enumerate(runs)]


def replay_ms(call: Callable[[], Any]) -> float:
    """Median of a call in a CUDA graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    times = []
    for _ in range(18):
        begin.record()
        graph.replay()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 2)
    return median(times[3:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=["32768x1:16/32:6592:one", "32768x1:16/32:6592:forget"])
    parser.add_argument("--backend", default="hopper")
    parser.add_argument("--out", help="keep the results here")
    parser.add_argument("--compare", help="results that an earlier run kept")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("a CUDA GPU is needed, and torch sees none")
    before = torch.load(args.compare) if args.compare else {}
    kept = {}
    for case in args.cases:
        call = call_of(case, args.backend)
        result = call()
        found = [x.cpu() for x in (result.output, result.final_state) if x is not None]
        kept[case] = found if args.out else None
        same = ""
        if case in before:
            errors = [
                ((x.float() - y.float()).norm() / y.float().norm()).item()
                for x, y in zip(found, before[case], strict=True)
            ]
            same = "  same bits" if max(errors) == 0 else f"  differs by {max(errors):.1e}"
        times = "  ".join(f"{name} {us:.1f}" for name, us in kernel_times(call))
        print(f"{case:28} {replay_ms(call):.4f} ms  {times}{same}", flush=True)
    if args.out:
        torch.save(kept, args.out)


if __name__ == "__main__":
    with torch.no_grad():
        main()
