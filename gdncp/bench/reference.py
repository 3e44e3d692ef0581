"""What is right: the float64 oracle for short shapes, and for long ones the chunked rule in float64 on the device.

The chunked form is itself held against the oracle at the start of every run (`check_reference`).
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch

from gdncp.bench.cases import CHUNK, Case, Shape, Tokens
from gdncp.reference import gated_delta_rule_reference

ORACLE_TOKENS_HEADS = 4096  # up to this many tokens x state heads the oracle runs in about a second
BLOCK_TOKENS = 8192  # tokens whose chunks are prepared together: bounds the memory that float64 takes
AGREEMENT = 1e-11  # relative; both sum in float64, in another order


class Truth(NamedTuple):
    output: torch.Tensor  # [T, H, V] float64
    final_state: torch.Tensor  # [N, H, V, K] float64
    by: str


class Error(NamedTuple):
    """Relative L2 errors: over everything, and of the worst sequence and head."""

    output: float
    output_worst: float
    state: float
    state_worst: float

    @property
    def worst(self) -> float:
        return max(self.output_worst, self.state_worst)


def truth(case: Case, tokens: Tokens) -> Truth:
    if case.shape.num_tokens * case.shape.num_state_heads <= ORACLE_TOKENS_HEADS:
        return oracle(case, tokens)
    return chunked(case, tokens)


def oracle(case: Case, tokens: Tokens) -> Truth:
    """Token by token, on the CPU."""
    t = tokens
    result = gated_delta_rule_reference(
        t.q, t.k, t.v, t.log_alpha, t.beta, scale=case.scale, seq_lens=case.seq_lens, gate_space="log"
    )
    return Truth(result.output.to(case.device), result.final_state.to(case.device), "oracle")


def chunked(case: Case, tokens: Tokens) -> Truth:
    """The chunked rule in float64 on the case's device.  Gates must be above 0, as all of `Case.tokens` are."""
    s = case.shape
    output = torch.empty(s.num_tokens, s.num_state_heads, s.head_dim, dtype=torch.float64, device=case.device)
    states = torch.zeros(s.num_seqs, s.num_state_heads, s.head_dim, s.head_dim, dtype=torch.float64, device=case.device)
    for i in range(s.num_seqs):
        end = (i + 1) * s.seq_len
        for start in range(i * s.seq_len, end, BLOCK_TOKENS):
            rows = slice(start, min(start + BLOCK_TOKENS, end))
            states[i] = _scan(tokens, rows, states[i], output[rows], case.scale)
    return Truth(output, states, "chunked float64")


def _scan(tokens: Tokens, rows: slice, state: torch.Tensor, output: torch.Tensor, scale: float) -> torch.Tensor:
    """Scan some tokens of one sequence from `state` [H, V, K]; fill `output` [n, H, V]; return the exit state."""
    heads, length = state.shape[0], output.shape[0]
    padding = -length % CHUNK

    def chunks(x: torch.Tensor) -> torch.Tensor:
        """[T, heads(, D)] -> [H, chunks, 64(, D)] float64; padding rows are zero, which changes nothing."""
        x = x[rows].double().repeat_interleave(heads // x.shape[1], dim=1)
        x = torch.cat([x, x.new_zeros(padding, *x.shape[1:])])
        return x.unflatten(0, (-1, CHUNK)).movedim(2, 0)

    q, k, v, log_alpha, beta = (chunks(x) for x in (tokens.q, tokens.k, tokens.v, tokens.log_alpha, tokens.beta))
    g = log_alpha.cumsum(-1)
    decay = (g[..., :, None] - g[..., None, :]).tril().exp().tril()  # [H, chunks, 64, 64]
    gamma = g.exp()[..., None]
    beta = beta[..., None]
    system = (beta * decay * (k @ k.mT)).tril(-1)  # the solver takes the diagonal as ones
    solved = torch.linalg.solve_triangular(
        system, torch.cat([beta * v, beta * gamma * k], dim=-1), upper=False, unitriangular=True
    )
    u0, w = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    with_state = torch.cat([w, gamma * q], dim=-2)  # [H, chunks, 128, K]: one product with the state gives both
    scores = decay * (q @ k.mT)
    k_to_end = (g[..., -1:] - g).exp()[..., None] * k
    exit_gamma = gamma[..., -1:, :]

    for c in range(k.shape[1]):
        from_state = with_state[:, c] @ state.mT
        u = u0[:, c] - from_state[:, :CHUNK]
        o = torch.baddbmm(from_state[:, CHUNK:], scores[:, c], u)
        n = min(CHUNK, length - c * CHUNK)
        output[c * CHUNK : c * CHUNK + n] = scale * o[:, :n].transpose(0, 1)
        state = torch.baddbmm(exit_gamma[:, c] * state, u.mT, k_to_end[:, c])
    return state


def errors(case: Case, output: torch.Tensor, final_state: torch.Tensor, true: Truth) -> Error:
    """`output` [T, H, V] and `final_state` [N, H, V, K] against the truth; what is not finite gives inf."""

    def relative(parts: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[float, float]:
        """(over all, worst) from pairs of [H] sums of squares: of the difference and of the truth."""
        difference, norm = (torch.stack(x) for x in zip(*parts, strict=True))
        over_all, worst = (difference.sum() / norm.sum()).sqrt(), (difference / norm).sqrt().max()
        return tuple(float(x.nan_to_num(torch.inf)) for x in (over_all, worst))  # type: ignore[return-value]  # two

    of_output, of_states = [], []
    bounds = [i * case.shape.seq_len for i in range(case.shape.num_seqs + 1)]
    for i, (start, stop) in enumerate(pairwise(bounds)):
        expected = true.output[start:stop]
        difference = output[start:stop].double() - expected
        of_output.append((difference.square().sum((0, 2)), expected.square().sum((0, 2))))
        difference = final_state[i].double() - true.final_state[i]
        of_states.append((difference.square().sum((1, 2)), true.final_state[i].square().sum((1, 2))))
    return Error(*relative(of_output), *relative(of_states))


def check_reference(device: torch.device) -> float:
    """Hold the chunked form against the oracle on short sequences with tails.  RuntimeError if it is off."""
    worst = 0.0
    for gates in ("forget", "one"):
        case = Case(Shape(150, 2, 1, 2, 32), gates, torch.float32, device)
        tokens = case.tokens(seed=0)
        found = chunked(case, tokens)
        worst = max(worst, errors(case, found.output, found.final_state, oracle(case, tokens)).worst)
    if not worst <= AGREEMENT:
        raise RuntimeError(
            f"the chunked float64 reference is {worst:.1e} off the oracle on {device}; {AGREEMENT} allowed"
        )
    return worst
