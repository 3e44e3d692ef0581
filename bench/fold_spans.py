"""What composing maps over spans costs or gains on one GPU: `fold_span` of 1 beside others, in CUDA graphs.

    python bench/fold_spans.py --cases 32768:4/8 262144:2/4 --spans 1 2 4 6

A case is TOKENS:QK_HEADS/V_HEADS, one sequence whose gates forget nothing, in the CP chunks that the planner takes for
a span of 1.
"""

from __future__ import annotations

import argparse
import re
from statistics import median
from typing import Any

import torch

import gdncp
from gdncp.plan import plan_prefill

ROUNDS, REPLAYS = 15, 4


def graph_of(case: str, span: int) -> tuple[torch.cuda.CUDAGraph, torch.Tensor, str]:
    """A captured call, its output, and the grid."""
    found = re.fullmatch(r"(\d+):(\d+)/(\d+)", case)
    if not found:
        raise SystemExit(f"a case is TOKENS:QK_HEADS/V_HEADS, got {case!r}")
    tokens, qk_heads, v_heads = map(int, found.groups())
    gen = torch.Generator("cuda").manual_seed(tokens + v_heads)

    def random(num_heads: int) -> torch.Tensor:
        return torch.randn(tokens, num_heads, 128, device="cuda", generator=gen)

    q, v = random(qk_heads).bfloat16(), random(v_heads).bfloat16()
    k = torch.nn.functional.normalize(random(qk_heads), dim=-1).bfloat16()
    alpha, beta = torch.ones(tokens, v_heads, device="cuda"), torch.rand(tokens, v_heads, device="cuda", generator=gen)
    words: dict[str, Any] = {"num_q_heads": qk_heads, "num_k_heads": qk_heads, "num_v_heads": v_heads}
    grid = plan_prefill([tokens], **words, fold_span=1)
    words |= {"cp_chunk_len": grid.cp_chunk_len, "first_cp_chunk_len": grid.first_cp_chunk_len}
    plan = plan_prefill([tokens], **words, fold_span=span)
    output = gdncp.prefill(plan, q, k, v, alpha, beta).output
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gdncp.prefill(plan, q, k, v, alpha, beta)
    return graph, output.float(), f"{len(plan.cp_chunks)} CP chunks of {plan.cp_chunk_len}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", nargs="+", default=["32768:4/8", "131072:4/8", "262144:2/4", "32768:16/32"])
    parser.add_argument("--spans", nargs="+", type=int, default=[1, 2, 4, 6])
    args = parser.parse_args()
    for case in args.cases:
        graphs = [graph_of(case, span) for span in args.spans]
        times: list[list[float]] = [[] for _ in graphs]
        for _ in range(ROUNDS):
            for (graph, _, _), found in zip(graphs, times, strict=True):
                start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                graph.replay()
                start.record()
                for _ in range(REPLAYS):
                    graph.replay()
                stop.record()
                torch.cuda.synchronize()
                found.append(start.elapsed_time(stop) / REPLAYS)
        first = graphs[0][1]
        for span, (_, output, grid), found in zip(args.spans, graphs, times, strict=True):
            off = float((output - first).norm() / first.norm())
            print(f"{case} span {span}: {1e3 * median(found):.1f} us, {off:.0e} off the first, {grid}", flush=True)


if __name__ == "__main__":
    main()
