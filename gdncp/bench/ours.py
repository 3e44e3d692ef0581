"""Our kernel sets as engines: planned calls, as a serving engine makes them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

import gdncp
from gdncp.backends import get_backend
from gdncp.bench.cases import Case, Tokens
from gdncp.bench.engines import Bound, Engine, Result


class Ours(Engine):
    ours = True
    compiles_to_disk = True

    def __init__(self, name: str, cp_chunk_len: int | None = None):
        self.name, self._cp_chunk_len = name, cp_chunk_len

    def absent_reason(self, device: torch.device) -> str | None:
        if device.type == "cpu" and self.name != "torch":
            return "needs a CUDA device."
        return None

    def version(self) -> str:
        return "this tree"

    def rejection_reason(self, case: Case) -> str | None:
        d = case.shape.head_dim
        return get_backend(self.name).rejection_reason(
            device=case.device, dtype=case.dtype, k_dim=d, v_dim=d, precision="fast"
        )

    def bind(self, case: Case, sets: Sequence[Tokens]) -> Bound:
        s = case.shape
        plan = gdncp.plan_prefill(
            case.seq_lens,
            num_q_heads=s.num_k_heads,
            num_k_heads=s.num_k_heads,
            num_v_heads=s.num_v_heads,
            head_dim=s.head_dim,
            cp_chunk_len=self._cp_chunk_len,
            profile=gdncp.plan.default_profile(case.device.type),
        )
        output, states = case.empty_results()

        def run(t: Tokens, timed: bool = False) -> gdncp.PrefillResult:
            return gdncp.prefill(
                plan,
                t.q,
                t.k,
                t.v,
                t.log_alpha,
                t.beta,
                scale=case.scale,
                gate_space="log",
                output=output,
                output_state=states,
                backend=self.name,
                timed=timed,
            )

        def call(t: Tokens) -> Result:
            result = run(t)
            assert result.final_state is not None
            return Result(result.output, result.final_state)

        detail = {"cp_chunk_len": min(plan.cp_chunk_len, s.seq_len)}
        return Bound([partial(call, t) for t in sets], detail, lambda: run(sets[0], timed=True).timings)
