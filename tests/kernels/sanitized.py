"""What `launch/sanitize.sh` runs under compute-sanitizer: every kernel of both sets, on a few hundred tokens.

    python -m tests.kernels.sanitized [CASES]      # those with CASES in their name; all of a set: each kernel must run
    python -m tests.kernels.sanitized --kernels    # the names of all kernels

Only what a sanitizer sees is looked for here: whether results are right is for the tests.  So nothing is filled with
NaN first, as in the tests: initcheck would take it for initialised.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import gdncp
from gdncp.backends import get_backend
from tests.backends import driver
from tests.numeric import checkpoint_starts, cu, offsets, random_state, random_tokens


@dataclass(frozen=True)
class Set:
    """A kernel set and what it is run on: the dtype that most cases have, and another."""

    backend: str
    dim: int
    dtype: torch.dtype = torch.bfloat16
    other_dtype: torch.dtype = torch.float32
    device: str = "cuda"

    def tokens(self, num_tokens: int, heads: tuple[int, int, int], dtype: torch.dtype, **arguments: Any) -> Any:
        tokens = random_tokens(num_tokens, heads, self.dim, dtype=dtype, **arguments)
        return {name: x.to(self.device) for name, x in tokens.items()}

    def states(self, rows: int, heads: int) -> torch.Tensor:
        return random_state(rows, heads, self.dim).to(self.device)


SETS = (Set("triton", 64), *(Set("hopper", dim, other_dtype=torch.float16) for dim in (128, 64)))


def planned(s: Set) -> None:
    """A plan with all there is: tails, an empty sequence, checkpoints inside tiles, slots, L2 norm, forgetting."""
    lens = [200, 0, 64, 1, 150]
    plan = gdncp.plan_prefill(
        lens, num_q_heads=1, num_k_heads=1, num_v_heads=2, head_dim=s.dim, cp_chunk_len=64,
        checkpoint_positions=[[1, 64, 100, 200], [], [64], [1], [63, 150]],
    )  # fmt: skip
    tokens = s.tokens(sum(lens), (1, 1, 2), s.dtype, gates="mixed")
    tokens["g"] = tokens["g"].log()
    result = gdncp.prefill(
        plan, **tokens, state_pool=s.states(7, 3)[:, :2], state_indices=torch.tensor([5, 0, 3, 1, 6], device=s.device),
        gate_space="log", use_qk_l2norm_in_kernel=True, backend=s.backend, keep_entry=True,
    )  # fmt: skip
    maps = result.entry.summary.maps
    assert bool(maps.forgot.any()) and not bool(maps.forgot.all())
    maps.dropped  # noqa: B018  made only where it is read


def bare(s: Set) -> None:
    """No gates, no checkpoints, nothing forgotten; GQA, two lanes, the other dtype."""
    heads = {"num_q_heads": 2, "num_k_heads": 1, "num_v_heads": 1, "head_dim": s.dim}
    plan = gdncp.plan_prefill([130, 70], cp_chunk_len=64, lanes_per_rank=2, **heads)
    tokens = s.tokens(200, (2, 1, 1), s.other_dtype)
    q, k, v = (tokens[name] for name in "qkv")
    gdncp.prefill(plan, q, k, v, initial_state=s.states(2, 2), forget_below=0.0, backend=s.backend)


def device_lengths(s: Set) -> None:
    """Lengths that only the device knows, tokens that no sequence has, resets, no initial states, checkpoints."""
    lens, every = [150, 0, 130], 64
    rows = sum(n // every for n in lens)
    spare = 20 if s.device == "cuda" else 0  # on a CPU the host sees that they are nobody's
    gdncp.chunk_gated_delta_rule(
        **s.tokens(sum(lens) + spare, (1, 1, 2), s.dtype, gates="resets"),
        cu_seqlens=cu(lens, s.device), output_final_state=True,
        state_checkpoints=torch.zeros(rows, 2, s.dim, s.dim, device=s.device), checkpoint_every_n_tokens=every,
        checkpoint_cu_starts=checkpoint_starts(lens, every, s.device), _cp_chunk_len=64, backend=s.backend,
    )  # fmt: skip


def unsplit(s: Set) -> None:
    """Every sequence in one piece, and gates that start four bytes off the grid."""
    lens = [150, 0, 65]
    tokens = s.tokens(sum(lens), (2, 2, 2), s.dtype, gates="weak")
    for name in ("g", "beta"):
        x = tokens[name]
        tokens[name] = torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)
    gdncp.chunk_gated_delta_rule(
        **tokens, initial_state=s.states(3, 2), output_final_state=True, cu_seqlens=cu(lens, s.device),
        cu_seqlens_host=offsets(lens), use_cp=False, backend=s.backend,
    )  # fmt: skip


def stages(s: Set) -> None:
    """The stages one by one: maps without outputs, folds of one map."""
    inputs = driver.make_inputs(200, (1, 1, 2), s.dim, s.dim, gates="mixed", dtype=s.dtype)
    tokens = {name: getattr(inputs, name).to(s.device) for name in ("q", "k", "v", "gate", "beta")}
    inputs = type(inputs)(**tokens, scale=inputs.scale, gate_space="log")
    positions = [[5, 128, 200]]
    driver.run(inputs, [200], 64, forget_below=2.0**-16, positions=positions, backend=get_backend(s.backend))


CASES: tuple[Callable[[Set], None], ...] = (planned, bare, device_lengths, unsplit, stages)


def kernels(backend: str) -> set[str]:
    """The names of the set's kernels."""
    package = importlib.import_module("gdncp_kernels" + (".hopper" if backend == "hopper" else ""))
    names = set()
    for info in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        if info.name.endswith((".hopper", ".compile_report")):
            continue
        for name, x in vars(importlib.import_module(info.name)).items():
            if name.endswith("_kernel") and getattr(getattr(x, "fn", None), "__module__", None) == info.name:
                names.add(name)
    return names


def run(only: str) -> None:
    """Run the cases with `only` in their name; where that is all of a set's, fail where a kernel was not launched."""
    from triton import knobs

    launched: set[str] = set()
    knobs.runtime.launch_enter_hook.add(lambda metadata: launched.add(metadata.get()["name"]))
    for s in SETS:
        call = {"device": torch.device("cuda"), "k_dim": s.dim, "v_dim": s.dim, "precision": "fast"}
        reason = get_backend(s.backend).rejection_reason(dtype=s.dtype, **call)
        if reason is not None:
            print(f"{s.backend} {s.dim}: not run, {reason}")
            continue
        launched.clear()
        named = {f"{s.backend} {case.__name__} {s.dim}": case for case in CASES}
        wanted = [name for name in named if only in name]
        for name in wanted:
            started = time.perf_counter()
            named[name](s)
            torch.cuda.synchronize()
            print(f"{name}: {time.perf_counter() - started:.1f} s", flush=True)
        missing = kernels(s.backend) - launched
        if missing and len(wanted) == len(CASES):
            sys.exit(f"{s.backend} {s.dim}: never launched: {', '.join(sorted(missing))}")


if __name__ == "__main__":
    if sys.argv[1:] == ["--kernels"]:
        print(*sorted(set().union(*(kernels(s.backend) for s in SETS))), sep="\n")
    else:
        run(*sys.argv[1:] or [""])
