"""Small numeric cases: tails, empty sequences, initial states, pools, checkpoints, gates that remember and forget."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from gdncp.plan import PrefillPlan

CP_CHUNK_LEN = 64


@dataclass(frozen=True)
class SmallCase:
    name: str
    seq_lens: tuple[int, ...]
    heads: tuple[int, int, int]  # q, k, v
    gates: str
    states: str = "given"  # or "none", "pool": in place, by slots
    beta_max: float = 1.0
    every: int = 128  # tokens between checkpoints; 0: none
    share: bool = False  # final states on every rank
    l2_norm: bool = False
    log_gates: bool = False
    forget_below: float | None = 0.0

    @property
    def num_tokens(self) -> int:
        return sum(self.seq_lens)

    @property
    def num_state_heads(self) -> int:
        return max(self.heads)


SMALL_CASES = (
    SmallCase("varlen, pool", (576, 0, 321, 3, 744, 0), (2, 2, 4), "never", states="pool", beta_max=2.0),
    SmallCase("one long", (24 * 64 + 13,), (1, 1, 2), "never", share=True, beta_max=2.0),
    SmallCase("resets", (577, 1, 640, 130), (2, 2, 4), "resets"),
    SmallCase("GQA", (700, 64, 0, 901), (4, 2, 2), "mixed", l2_norm=True),
    SmallCase("tails", (65, 1, 63, 64, 127, 129, 1000), (2, 2, 2), "weak", states="none", log_gates=True),
    SmallCase("forgets", (1300, 210, 0), (2, 2, 2), "strong", every=0, share=True, forget_below=None),
    SmallCase("half-lives", (2000, 77), (2, 2, 4), "mixed", states="pool", share=True, forget_below=None),
)


class Inputs(NamedTuple):
    """All tokens of a case, and its initial states."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    initial: torch.Tensor  # [N, H, V, K]

    def tokens(self, plan: PrefillPlan, rank: int) -> list[torch.Tensor]:
        """q, k, v, g, beta of a rank, as it holds them."""
        ranges = plan.token_ranges(rank)
        return [torch.cat([x[a:b] for a, b in ranges] or [x[:0]]) for x in self[:5]]


def make_inputs(case: SmallCase, dtype: torch.dtype, dim: int, device: torch.device) -> Inputs:
    """The same on every rank."""
    random = torch.Generator().manual_seed(len(case.name))
    tokens, states = case.num_tokens, case.num_state_heads

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random)

    q, k, v = (normal(tokens, heads, dim) for heads in case.heads)
    if not case.l2_norm:
        k = torch.nn.functional.normalize(k, dim=-1)
    log_alpha = _log_gates(case.gates, torch.rand(tokens, states, generator=random))
    if case.gates == "resets":
        log_alpha = torch.where(torch.rand(tokens, states, generator=random) < 0.02, -math.inf, log_alpha)
    g = log_alpha if case.log_gates else log_alpha.exp()
    beta = torch.rand(tokens, states, generator=random) * case.beta_max
    initial = normal(len(case.seq_lens), states, dim, dim)
    if case.states == "none":
        initial.zero_()
    return Inputs(*(x.to(device) for x in (q.to(dtype), k.to(dtype), v.to(dtype), g, beta, initial)))


def _log_gates(kind: str, uniform: torch.Tensor) -> torch.Tensor:
    if kind == "never":
        return torch.zeros_like(uniform)
    if kind == "weak":
        return -0.001 * uniform
    if kind == "strong":
        return -3.0 - 3.0 * uniform
    # "mixed", "resets": half-lives from 4 to 16384 tokens over the heads
    return -torch.logspace(-2, -14, uniform.shape[1], base=2.0) * 0.7 * (0.5 + uniform)
