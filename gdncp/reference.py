"""The token-by-token float64 oracle, one decode step, and the measures by which results are held against the oracle.

Per token of a sequence, with a state S [V, K] for each state head:

    S_t = alpha_t · S_{t-1} · (I − beta_t k_t k_tᵀ) + beta_t v_t k_tᵀ        o_t = scale · S_t q_t
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from gdncp.backends.base import GateSpace

L2_NORM_EPS = 1e-6


class ReferenceResult(NamedTuple):
    """What the oracle gives; all float64 on the CPU."""

    output: torch.Tensor  # [T, H, V]
    final_state: torch.Tensor  # [N, H, V, K]
    checkpoints: torch.Tensor  # [rows, H, V, K]: sequences in order, then positions in order; no rows if none asked for


@torch.no_grad()
def gated_delta_rule_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    *,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    seq_lens: Sequence[int] | None = None,
    gate_space: GateSpace = "linear",
    use_qk_l2norm_in_kernel: bool = False,
    checkpoint_every_n_tokens: int = 0,
    checkpoint_positions: Sequence[Sequence[int]] | None = None,
) -> ReferenceResult:
    """The gated delta rule, one token at a time, in float64 on the CPU: slow, and what every result is held against.

    Args:
        q: [T, Hq, K], k: [T, Hk, K], v: [T, Hv, V], any floating dtype and device.  H = max(Hq, Hv) state heads;
            state head h reads q head h·Hq // H, k head h·Hk // H and v head h·Hv // H.
        g: [T, H] gates: alpha in [0, 1], or its natural log with `gate_space="log"` (−inf allowed); None: ones.
        beta: [T, H]; None: ones.
        scale: factor on the outputs; None or 0: 1/√K.
        initial_state: [N, H, V, K]; None: zeros.
        seq_lens: tokens of each of the N sequences, which lie one after another; None: one sequence of T tokens.
        use_qk_l2norm_in_kernel: x · rsqrt(Σx² + 1e-6) on every q and k first.
        checkpoint_every_n_tokens: keep the state after every n-th token of each sequence; 0: none.
        checkpoint_positions: keep it after these numbers of tokens instead, one ascending list a sequence.

    Raises:
        ValueError: lengths that do not sum to T, head counts that do not divide, or bad checkpoint positions.
    """
    num_tokens, num_heads = q.shape[0], max(q.shape[1], v.shape[1])
    k_dim, v_dim = q.shape[2], v.shape[2]
    lens = [num_tokens] if seq_lens is None else [int(n) for n in seq_lens]
    if sum(lens) != num_tokens or min(lens, default=0) < 0:
        raise ValueError(
            f"seq_lens is {lens}, which sums to {sum(lens)}; allowed are lengths ≥ 0 that sum to {num_tokens}"
        )
    positions = _positions(lens, checkpoint_every_n_tokens, checkpoint_positions)

    host = torch.empty(0, dtype=torch.float64, device="cpu")
    q, k, v, alpha, beta = _token_inputs(q, k, v, g, beta, gate_space, use_qk_l2norm_in_kernel, like=host)
    if initial_state is None:
        final = torch.zeros(len(lens), num_heads, v_dim, k_dim, dtype=torch.float64, device="cpu")
    else:
        final = initial_state.detach().to("cpu", torch.float64, copy=True)
    output = torch.empty(num_tokens, num_heads, v_dim, dtype=torch.float64, device="cpu")

    # sequences advance together, longest first: the active ones are always the leading rows
    order = sorted(range(len(lens)), key=lambda i: -lens[i])
    starts = [0]
    for n in lens:
        starts.append(starts[-1] + n)
    state = final[order]
    first = torch.tensor([starts[i] for i in order], dtype=torch.int64, device="cpu")
    kept: dict[tuple[int, int], torch.Tensor] = {}
    wanted = [set(p) for p in positions]
    active = len(order)
    for t in range(max(lens, default=0)):
        while lens[order[active - 1]] <= t:
            active -= 1
        rows = slice(starts[order[0]] + t, starts[order[0]] + t + 1) if active == 1 else first[:active] + t
        output[rows] = _advance(state[:active], q[rows], k[rows], v[rows], alpha[rows], beta[rows])
        for i, sequence in enumerate(order[:active]):
            if t + 1 in wanted[sequence]:
                kept[sequence, t + 1] = state[i].clone()
    final[order] = state
    output *= scale or k_dim**-0.5

    rows_kept = [kept[i, p] for i, sequence_positions in enumerate(positions) for p in sequence_positions]
    checkpoints = torch.stack(rows_kept) if rows_kept else final.new_empty(0, num_heads, v_dim, k_dim)
    return ReferenceResult(output, final, checkpoints)


@torch.no_grad()
def decode_step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    *,
    state: torch.Tensor,
    scale: float | None = None,
    gate_space: GateSpace = "linear",
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One more token for each of N sequences: what a decode kernel does with the state that a prefill handed over.

    Args: as `gated_delta_rule_reference`, with N tokens (one a sequence) in place of T, on any one device;
        state: [N, H, V, K], left as it is.

    Returns:
        output [N, H, V] and the new state [N, H, V, K], in float64 if `state` is float64, else float32.
    """
    new_state = state.to(torch.float64 if state.dtype == torch.float64 else torch.float32, copy=True)
    q, k, v, alpha, beta = _token_inputs(q, k, v, g, beta, gate_space, use_qk_l2norm_in_kernel, like=new_state)
    output = _advance(new_state, q, k, v, alpha, beta)
    return output * (scale or q.shape[2] ** -0.5), new_state


def error_norms(
    x: torch.Tensor, reference: torch.Tensor, seq_lens: Sequence[int] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """‖x − reference‖₂ and ‖reference‖₂ per sequence (or state) and head, float64 on the CPU.

    With `seq_lens`, x is outputs [T, H, V] and each norm runs over all tokens of a sequence; without, x is states
    [rows, H, V, K] and each norm runs over one state.  Both results are [N or rows, H].
    """
    x, reference = (t.detach().to("cpu", torch.float64) for t in (x, reference))

    def norms(t: torch.Tensor) -> torch.Tensor:
        if seq_lens is None:
            return t.flatten(2).norm(dim=2)
        return torch.stack([part.square().sum((0, 2)).sqrt() for part in t.split(list(seq_lens))])

    return norms(x - reference), norms(reference)


def relative_error(x: torch.Tensor, reference: torch.Tensor, seq_lens: Sequence[int] | None = None) -> torch.Tensor:
    """‖x − reference‖₂ / ‖reference‖₂ as `error_norms` lays them out; 0 where both are 0, never NaN."""
    return contract_ratio(x, reference, tolerance=1.0, seq_lens=seq_lens)


def contract_ratio(
    x: torch.Tensor,
    reference: torch.Tensor,
    tolerance: float,
    bound: torch.Tensor | float = 0.0,
    seq_lens: Sequence[int] | None = None,
) -> torch.Tensor:
    """The error as a share of what the numeric contract allows: ‖x − ref‖₂ / (tolerance · ‖ref‖₂ + bound).

    At most 1 where the contract holds.  `bound` is absolute, a number or [N or rows, H] as `error_norms` lays it out.
    An error that is not finite, or any error where none is allowed, gives inf.
    """
    error, norm = error_norms(x, reference, seq_lens)
    ratio = error / (tolerance * norm + torch.as_tensor(bound, dtype=torch.float64, device="cpu"))
    return torch.where(error == 0, 0.0, ratio.nan_to_num(nan=float("inf"), posinf=float("inf")))


def _advance(
    state: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, alpha: torch.Tensor, beta: torch.Tensor
) -> torch.Tensor:
    """Move state [N, H, V, K] one token on, in place; return S q [N, H, V]."""
    state *= alpha[:, :, None, None]
    update = beta[:, :, None] * (v - _times(state, k))
    state += update[:, :, :, None] * k[:, :, None, :]
    return _times(state, q)


def _times(state: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    if state.dtype == torch.float64:
        return torch.matmul(state, x[..., None])[..., 0]
    return (state * x[:, :, None, :]).sum(-1)  # out of reach of TF32 and autocast


def _token_inputs(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None,
    beta: torch.Tensor | None,
    gate_space: GateSpace,
    use_l2norm: bool,
    like: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v spread over the state heads and normalised where asked, alpha and beta [T, H]; all made `like`."""
    q, k, v = q.to(like), k.to(like), v.to(like)
    num_heads = max(q.shape[1], v.shape[1])
    if use_l2norm:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_NORM_EPS) for x in (q, k))
    if g is None:
        alpha = q.new_ones(q.shape[0], num_heads)
    else:
        alpha = g.to(like).exp() if gate_space == "log" else g.to(like)
    beta = q.new_ones(q.shape[0], num_heads) if beta is None else beta.to(like)
    return _heads("q", q, num_heads), _heads("k", k, num_heads), _heads("v", v, num_heads), alpha, beta


def _heads(name: str, x: torch.Tensor, num_heads: int) -> torch.Tensor:
    """[T, heads, D] -> [T, num_heads, D]: contiguous groups of state heads share a head."""
    if x.shape[1] < 1 or num_heads % x.shape[1]:
        raise ValueError(
            f"{name} has {x.shape[1]} heads; allowed are divisors of {num_heads}, the number of state heads"
        )
    return x.repeat_interleave(num_heads // x.shape[1], dim=1)


def _positions(lens: list[int], every: int, positions: Sequence[Sequence[int]] | None) -> list[list[int]]:
    """After how many tokens of each sequence its state is kept."""
    if every < 0 or (every and positions is not None):
        raise ValueError(
            f"checkpoint_every_n_tokens is {every}; allowed are numbers ≥ 0, and only 0 beside checkpoint_positions"
        )
    if positions is None:
        return [list(range(every, n + 1, every)) if every else [] for n in lens]
    result = [[int(p) for p in sequence_positions] for sequence_positions in positions]
    if len(result) != len(lens) or any(
        sorted(set(p)) != p or (p and not 1 <= p[0] <= p[-1] <= n) for p, n in zip(result, lens, strict=False)
    ):
        raise ValueError(
            f"checkpoint_positions is {positions}; allowed is one ascending list of numbers from 1 to its length "
            f"for each of the {len(lens)} sequences of lengths {lens}"
        )
    return result
