"""What a planned call costs the host: time to enqueue `gdncp.prefill`, warmup, and the scratch it takes.

    python bench/host_time.py                        # hopper and triton, the shapes below
    python bench/host_time.py --backends hopper --profile
    python bench/host_time.py --stubbed              # no GPU: our Python alone, of the hopper set

Times are medians over many calls, each from its first Python instruction until it returns, on inputs that rotate; the
queue is drained between batches, so that no call waits for the device.  A `warmup` before them is timed too: cold where
`TRITON_CACHE_DIR` names an empty folder.  Needs a GPU, except with `--stubbed`: there small tensors lie on the CPU,
and Triton's launcher in C is left out.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

import gdncp
from gdncp.backends.hopper_backend import MIN_TRITON
from gdncp.backends.triton_version import triton_rejection_reason

CASES: dict[str, tuple[list[int], int, int, bool]] = {  # sequence lengths, key heads, value heads, a pool with slots
    "32768 x 1, 16/32": ([32768], 16, 32, False),
    "32768 x 1, 16/32, pool": ([32768], 16, 32, True),
    "8192 x 4, 16/32, pool": ([8192] * 4, 16, 32, True),
    "2048 x 16, 16/32": ([2048] * 16, 16, 32, False),
    "32768 x 1, 4/8": ([32768], 4, 8, False),
    "512 x 1, 16/32": ([512], 16, 32, False),
}
STUBBED_CASES: dict[str, tuple[int, bool]] = {  # tokens in a CP chunk, of 512; a pool with slots
    "512 in 1 CP chunk": (512, False),
    "512 in 4 CP chunks": (128, False),
    "512 in 4 CP chunks, pool": (128, True),
}
NUM_SETS, BATCH = 3, 10
DIM = 128

Calls = list[Callable[[], Any]]


def calls_of(
    plan: gdncp.PrefillPlan, pooled: bool, backend: str, device: str, flashinfer: bool = False
) -> tuple[Calls, float]:
    """A call per input set, and the seconds that warmup took."""
    tokens, heads, num_sequences = plan.num_tokens_total, plan.num_v_heads, plan.num_sequences
    words: dict[str, Any] = {"gate_space": "log", "backend": backend}
    start = time.perf_counter()
    gdncp.warmup(plan, device=device, dtype=torch.bfloat16, pooled=pooled, **words)
    _wait(device)
    seconds = time.perf_counter() - start
    if pooled:
        pool = torch.zeros(2 * num_sequences, heads, DIM, DIM, device=device)
        words["state_indices"] = torch.arange(num_sequences, dtype=torch.int32, device=device)
        words |= {"initial_state": pool, "output_state": pool} if flashinfer else {"state_pool": pool}
    offsets = [0]
    for length in plan.seq_lens:
        offsets.append(offsets[-1] + length)

    def call() -> Callable[[], Any]:
        def random(num_heads: int) -> torch.Tensor:
            x = torch.randn(tokens, num_heads, DIM, device=device, dtype=torch.bfloat16)
            return torch.nn.functional.normalize(x, dim=-1)

        q, k, v = random(plan.num_q_heads), random(plan.num_k_heads), random(heads)
        g, beta = (torch.rand(tokens, heads, device=device) for _ in range(2))
        g.mul_(-0.01)
        if flashinfer:
            return lambda: gdncp.chunk_gated_delta_rule(
                q, k, v, g, beta, output_final_state=True, cu_seqlens_host=offsets, plan=plan, **words
            )
        return lambda: gdncp.prefill(plan, q, k, v, g, beta, **words)

    return [call() for _ in range(NUM_SETS)], seconds


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def enqueue_times(calls: Calls, count: int, device: str) -> list[float]:
    """Microseconds of each of `count` calls, sorted."""
    times = []
    for i in range(count):
        if i % BATCH == 0:
            _wait(device)
        start = time.perf_counter()
        calls[i % len(calls)]()
        times.append(1e6 * (time.perf_counter() - start))
    _wait(device)
    return sorted(times)


def scratch_bytes(call: Callable[[], Any]) -> int:
    """The most that a call holds at once beside what it returns."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = call()
    torch.cuda.synchronize()
    peak, kept = torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before
    del result
    return peak - kept


def function_calls(call: Callable[[], Any]) -> Counter[str]:
    """Functions that one call enters: "call" in Python, "c_call" in C."""
    counts: Counter[str] = Counter()
    sys.setprofile(lambda _, event, __: counts.update([event]))
    try:
        call()
    finally:
        sys.setprofile(None)
    return counts


@contextmanager
def launcher_left_out() -> Iterator[None]:
    """Inside, the hopper set takes CPU tensors; kernels are neither compiled nor launched, gates not looked at."""
    from triton.runtime.jit import JITFunction

    from gdncp import validation
    from gdncp.backends.hopper_backend import HopperBackend
    from gdncp_kernels.hopper import launch

    map_ = {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [64, 64], "fp4_padded": False}

    def compiled(kernel: Any, *arguments: Any, **_: Any) -> Any:
        run = SimpleNamespace(
            global_scratch_size=0,
            profile_scratch_size=0,
            launch_cooperative_grid=False,
            launch_pdl=False,
            launch=chain,  # takes anything, and does nothing, in C
        )
        metadata = SimpleNamespace(tensordesc_meta=[map_] * sum(hasattr(x, "block_shape") for x in arguments))
        return SimpleNamespace(run=run, function=0, packed_metadata=(), metadata=metadata)

    active = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=id,
        utils=SimpleNamespace(fill_tma_descriptor=lambda *_: ()),
    )
    with (
        patch.object(JITFunction, "run", compiled),
        patch.object(launch, "driver", SimpleNamespace(active=active)),
        patch.object(HopperBackend, "rejection_reason", lambda *_, **__: None),
        patch.object(validation, "_seen", lambda *_: False),
    ):
        yield


def _profiled(calls: Calls, count: int, device: str) -> None:
    profile = cProfile.Profile()
    profile.runcall(enqueue_times, calls, count, device)
    pstats.Stats(profile).sort_stats("tottime").print_stats(30)


def _times(calls: Calls, count: int, device: str) -> str:
    first = enqueue_times(calls, len(calls), device)[-1]
    enqueue_times(calls, 50, device)
    times = enqueue_times(calls, count, device)
    return (
        f"median {statistics.median(times):6.1f}  least {times[0]:6.1f}  90 % below {times[len(times) * 9 // 10]:6.1f}"
        f"  first {first:7.1f}"
    )


def _on_gpu(args: argparse.Namespace) -> None:
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; microseconds to enqueue")
    for backend in args.backends:
        for name, (seq_lens, num_k_heads, num_v_heads, pooled) in CASES.items():
            if not any(part in name for part in args.cases):
                continue
            heads = {"num_q_heads": num_k_heads, "num_k_heads": num_k_heads, "num_v_heads": num_v_heads}
            plan = gdncp.plan_prefill(seq_lens, head_dim=DIM, profile="h200", **heads)
            calls, warmup = calls_of(plan, pooled, backend, "cuda")
            times = _times(calls, args.count, "cuda")
            scratch = scratch_bytes(calls[0]) / (plan.num_tokens_total * plan.num_v_heads)
            print(
                f"{backend:7} {name:24} {plan.num_cp_chunks:4} CP chunks  {times}  "
                f"warmup {warmup:5.2f} s  scratch {scratch:4.0f} B a token and value head",
                flush=True,
            )
            if args.profile:
                _profiled(calls, args.count, "cuda")


def _stubbed(args: argparse.Namespace) -> None:
    print(f"no GPU, launches left out, torch {torch.__version__}; microseconds of Python")
    heads = {"num_q_heads": 1, "num_k_heads": 1, "num_v_heads": 2}
    for name, (cp_chunk_len, pooled) in STUBBED_CASES.items():
        for flashinfer in (False, True):
            plan = gdncp.plan_prefill([512], head_dim=DIM, cp_chunk_len=cp_chunk_len, **heads)
            calls, _ = calls_of(plan, pooled, "hopper", "cpu", flashinfer)
            times, counts = _times(calls, args.count, "cpu"), function_calls(calls[0])
            print(
                f"{'chunk_gated_delta_rule' if flashinfer else 'prefill':22} {name:24}  {times}  "
                f"functions entered {counts['call']:4} in Python {counts['c_call']:4} in C"
            )
            if args.profile:
                _profiled(calls, args.count, "cpu")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", nargs="+", default=["hopper", "triton"])
    parser.add_argument("--cases", nargs="+", default=list(CASES), help="parts of their names")
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--profile", action="store_true", help="print where the time of each case goes")
    parser.add_argument("--stubbed", action="store_true", help="without a GPU: what the Python of a call costs")
    args = parser.parse_args()
    if args.stubbed:
        if (reason := triton_rejection_reason(MIN_TRITON, "triton.experimental.gluon")) is not None:
            parser.error(f"--stubbed needs Triton, whose launches it leaves out: {reason}")
        with launcher_left_out():
            _stubbed(args)
        return
    if not torch.cuda.is_available():
        parser.error("a CUDA GPU is needed, and torch sees none; --stubbed needs none")
    _on_gpu(args)


if __name__ == "__main__":
    main()
