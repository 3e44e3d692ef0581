"""Times of the stages that compute, and of whole calls, on the device at hand."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from gdncp.api import fixup, prefill, summarise
from gdncp.backends import Backend, TokenInputs
from gdncp.backends.base import opens
from gdncp.bench.timing import clock_of
from gdncp.calibrate.fit import Measurement
from gdncp.plan import CostProfile, PrefillPlan, plan_prefill
from gdncp.plan.checks import CHUNK
from gdncp_kernels.stage_calls import stage_calls

COSTS = (
    *("launch_s", "unit_s", "tile_t_s", "key_tile_t_s", "tile_n_s", "tile_m_s", "tile_prefill_s"),
    *("fold_launch_s", "fold_head_s"),
)
WHOLE = "whole call"
COPIES = 10  # of a call in one CUDA graph, so that the replay's own start does not count


@dataclass(frozen=True)
class Effort:
    """How much is run."""

    heads: tuple[tuple[int, int], ...]  # shape classes: q and k heads, v heads
    head_dim: int
    num_tokens: int  # of a batch, about
    repeats: int  # a time is the median of so many


def stage_plans(base: CostProfile, effort: Effort) -> Iterator[tuple[str, PrefillPlan]]:
    """Stages to be timed by themselves, in the shapes that tell their costs apart.

    Stage 4, short sequences and long, one wave of units and several: its start, a unit's start and a tile. Stage 2,
    short first CP chunks before equal ones: heads that forget within a CP chunk leave out M and read nearly all of N,
    heads that remember scan both. Stage 1 by tokens and heads; stage 3 by heads.
    """

    def plan(
        heads: tuple[int, int], seq_lens: list[int], length: float, first: float = 0, half_life: float = math.inf
    ) -> PrefillPlan:
        return _plan(
            base,
            effort,
            heads,
            seq_lens,
            cp_chunk_len=_round(length),
            first_cp_chunk_len=_round(first or length),
            head_half_lives=[half_life] * max(heads),
        )

    total = effort.num_tokens
    for heads in effort.heads:
        filling = max(base.workers // max(heads), 1)  # CP chunks whose heads are one wave of units
        longest = total / filling
        for number, length in ((filling, longest), (4 * filling, longest / 4), (filling, longest / 16)):
            yield "cp_prefill", plan(heads, [_round(length)] * number, length)
        for part in (total / 8, total):
            yield "precompute_t", plan(heads, [_round(part)], part)
        for length in (longest, max(longest / 8, 2 * CHUNK)):
            seq_len = _round(length / 8) + (filling + 1) * _round(length)
            for half_life in (math.inf, 0.9 * _round(length) / base.forget_bits):
                yield "precompute_mn", plan(heads, [seq_len], length, length / 8, half_life)
        for number in (4, 17):
            yield "state_fixup", plan(heads, [number * 2 * CHUNK], 2 * CHUNK)


def whole_plans(profile: CostProfile, effort: Effort) -> Iterator[PrefillPlan]:
    """Batches as the planner lays them out by a profile, which says what they should take."""
    total = effort.num_tokens
    for heads in effort.heads:
        for seq_lens in ([total], [total // 4], [total // 16] * 16):
            yield _plan(profile, effort, heads, seq_lens, head_half_lives=[math.inf] * max(heads))


def measurement(stage: str, plan: PrefillPlan, seconds: float) -> Measurement:
    """Of one stage, or of a "whole call", beside what a profile says of the plan."""

    def predict(profile: CostProfile) -> float:
        predicted = replace(plan, profile=profile).predicted
        return sum(of_rank[0] for name, of_rank in predicted.items() if stage in (name, WHOLE))

    return Measurement(stage, _case(plan), seconds, predict)


class Bench:
    """Times calls of plans on one device with one backend."""

    def __init__(self, device: torch.device, backend: Backend, repeats: int) -> None:
        self._device, self._backend, self._repeats = device, backend, repeats
        self._clock = clock_of(device)

    def time(self, stage: str, plan: PrefillPlan) -> Measurement:
        return measurement(stage, plan, self._seconds(self._call(stage, plan)))

    def _call(self, stage: str, plan: PrefillPlan) -> Callable[[], Any]:
        a = self._arguments(plan)
        if stage == WHOLE:
            return lambda: prefill(plan, **a)
        if stage == "state_fixup":
            summary = summarise(plan, **a)
            return lambda: fixup(summary)
        inputs = TokenInputs(a["q"], a["k"], a["v"], a["g"], a["beta"], plan.head_dim**-0.5, "log")
        calls = stage_calls(self._backend, inputs, plan, 2.0**-plan.profile.forget_bits)
        if stage == "precompute_mn" and opens(self._backend):
            return calls["precompute_mn_and_open"]
        return calls[stage]

    def _arguments(self, plan: PrefillPlan) -> dict[str, Any]:
        """Random tokens with unit keys, whose heads forget as the plan was told."""
        device = self._device
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        random = torch.Generator(device).manual_seed(0)
        total, num_heads = plan.num_tokens_total, plan.num_state_heads

        def normal(heads: int) -> torch.Tensor:
            x = torch.randn(total, heads, plan.head_dim, generator=random, device=device)
            return torch.nn.functional.normalize(x, dim=-1).to(dtype)

        half_lives = torch.tensor(plan.head_half_lives, device=device)
        return {
            "q": normal(plan.num_q_heads),
            "k": normal(plan.num_k_heads),
            "v": normal(plan.num_v_heads),
            "g": (-math.log(2) / half_lives).expand(total, -1).contiguous(),
            "beta": torch.rand(total, num_heads, generator=random, device=device),
            "gate_space": "log",
            "backend": self._backend.name,
        }

    def _seconds(self, call: Callable[[], Any]) -> float:
        """By replay of a CUDA graph of several, or of the call on a CPU, which is warm then."""
        call()
        copies, timed = 1, call
        if self._device.type == "cuda":
            copies = COPIES
            timed, _ = self._clock.capture([call] * copies)
            timed()
        return statistics.median(self._clock.times([timed], self._repeats)) / 1e3 / copies


def _plan(
    profile: CostProfile, effort: Effort, heads: tuple[int, int], seq_lens: list[int], **arguments: Any
) -> PrefillPlan:
    layer: dict[str, Any] = {
        "num_q_heads": heads[0],
        "num_k_heads": heads[0],
        "num_v_heads": heads[1],
        "head_dim": effort.head_dim,
    }
    return plan_prefill(seq_lens, profile=profile, **layer, **arguments)


def _case(plan: PrefillPlan) -> str:
    shape = f"{max(plan.seq_lens)} x {plan.num_sequences}, {plan.num_q_heads}/{plan.num_v_heads}"
    if plan.num_cp_chunks == plan.num_sequences:
        return shape
    forgets = ", forgets" if plan.head_half_lives and max(plan.head_half_lives) < math.inf else ""
    return f"{shape}, CP chunks {plan.first_cp_chunk_len}+{plan.cp_chunk_len}{forgets}"


def _round(tokens: float) -> int:
    return max(round(tokens / CHUNK), 1) * CHUNK
