"""What forgetting can have cost: a bound on the error of every state and output, in absolute size, from what ran.

A CP chunk whose gain g (the product of a_t = alpha_t · max(1, |1 − beta_t ‖k_t‖²|), at least ‖M‖) is below
`forget_below` hands on N alone. With e the error of the state that enters it and S that state as it was used,

    e_next  ≤  g · e  +  dropped  +  (g · ‖S‖ where the transition was dropped)

in Frobenius norm, per head; `dropped` is what N's scan left out. A sequence starts from its initial state, so with
e = 0. Outputs are linear in the entry state: token t of the CP chunk is off by at most scale · ‖q_t‖ · a_1 ⋯ a_t · e.

Each rank takes its `rank_terms`; `error_bound` of all ranks' terms folds them. This reads the device: it is for reports
and checks, not for the hot path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from gdncp.backends.base import AffineMaps, TokenInputs
from gdncp.plan.model import CpChunk, RankCheckpoint, RankPlan
from gdncp.reference import L2_NORM_EPS

# Added to a bound, this covers what fp32 cannot hold: a gate below exp(−87) drops 2e-38 · ‖S‖, and no element is finer
# than 1e-38. States up to 1e7 are well inside it.
FP32_FLOOR = 1e-30


@dataclass(frozen=True, eq=False)
class RankTerms:
    """One rank's part of the bound, on the CPU, float64; n CP chunks, c state checkpoints.  Can be pickled."""

    items: tuple[CpChunk, ...]
    checkpoints: tuple[RankCheckpoint, ...]
    gain: torch.Tensor  # [n, H] product of a_t over the CP chunk
    output_gain: torch.Tensor  # [n, H] L2 norm over its tokens of scale · ‖q_t‖ · a_1 ⋯ a_t
    checkpoint_gain: torch.Tensor  # [c, H] product of a_t up to the checkpoint
    entry_norm: torch.Tensor  # [n, H] ‖S‖ of the entry state that was used
    dropped: torch.Tensor  # [n, H] as `AffineMaps.dropped`; 0 where the CP chunk passes nothing on
    forgot: torch.Tensor  # [n, H] bool, as `AffineMaps.forgot`
    scanned: torch.Tensor  # [n, H] int64, as `AffineMaps.scanned`


@dataclass(frozen=True, eq=False)
class ForgettingBound:
    """Bounds on ‖x − exact‖₂ that forgetting explains, float64, and how much was forgotten."""

    output: torch.Tensor  # [N, H] over all tokens of a sequence
    final_state: torch.Tensor  # [N, H]
    entry_states: tuple[torch.Tensor, ...]  # per rank [n, H]
    checkpoints: tuple[torch.Tensor, ...]  # per rank [c, H]
    num_maps: int  # heads × CP chunks that pass a state on
    num_forgot: int  # of these: whose transition was dropped
    tokens_scanned: int  # heads × tokens that stage 2 read for the local states ...
    tokens_in_maps: int  # ... of so many

    def summary(self) -> dict[str, float | int]:
        """For a report: shares and the largest bounds."""
        return {
            "num_maps": self.num_maps,
            "forgot_share": self.num_forgot / max(self.num_maps, 1),
            "tokens_scanned": self.tokens_scanned,
            "scanned_share": self.tokens_scanned / max(self.tokens_in_maps, 1),
            "output_bound": _largest(self.output),
            "final_state_bound": _largest(self.final_state),
            "state_checkpoint_bound": max((_largest(x) for x in self.checkpoints), default=0.0),
        }


@torch.no_grad()
def rank_terms(
    inputs: TokenInputs, rank_plan: RankPlan, maps: AffineMaps | None, entry_states: torch.Tensor
) -> RankTerms:
    """What one rank knows for the bound after stage 3.

    Args:
        inputs: the rank's tokens, in the order of its items.
        maps: as stage 2 filled them, row `rank_plan.map_rows[i]` for item i; None where the rank has no map.
        entry_states: [n, H, V, K] (more rows are ignored) as stage 3 left them.
    """
    num_items, num_heads = len(rank_plan.items), inputs.num_state_heads
    gain = torch.ones(num_items, num_heads, dtype=torch.float64, device="cpu")
    output_gain = torch.zeros_like(gain)
    checkpoint_gain = gain.new_ones(len(rank_plan.checkpoints), num_heads)
    for i, item in enumerate(rank_plan.items):
        if item.num_tokens:
            products, query_norm = _token_gains(inputs, slice(item.offset, item.offset + item.num_tokens))
            gain[i] = products[-1]
            output_gain[i] = (abs(inputs.scale) * query_norm * products).norm(dim=0)
            for checkpoint in rank_plan.checkpoints:
                if checkpoint.item == i:
                    checkpoint_gain[checkpoint.row] = products[checkpoint.tokens - 1]

    dropped, forgot = torch.zeros_like(gain), torch.zeros_like(gain, dtype=torch.bool)
    scanned = torch.zeros_like(gain, dtype=torch.int64)
    mapped = [i for i, row in enumerate(rank_plan.map_rows) if row >= 0]
    if maps is not None and mapped:
        rows = [rank_plan.map_rows[i] for i in mapped]
        dropped[mapped] = maps.dropped.cpu()[rows].double()
        forgot[mapped] = maps.forgot.cpu()[rows]
        scanned[mapped] = maps.scanned.cpu()[rows].long()
    return RankTerms(
        items=rank_plan.items,
        checkpoints=rank_plan.checkpoints,
        gain=gain,
        output_gain=output_gain,
        checkpoint_gain=checkpoint_gain,
        entry_norm=entry_states[:num_items].flatten(2).double().norm(dim=2).cpu(),
        dropped=dropped,
        forgot=forgot,
        scanned=scanned,
    )


def joined(groups: Sequence[RankTerms]) -> RankTerms:
    """A rank's terms from those of its groups of heads, in order."""
    names = ("gain", "output_gain", "checkpoint_gain", "entry_norm", "dropped", "forgot", "scanned")
    heads: Any = {name: torch.cat([getattr(terms, name) for terms in groups], dim=1) for name in names}
    return replace(groups[0], **heads)


def error_bound(terms: Sequence[RankTerms]) -> ForgettingBound:
    """Fold the terms of all ranks, in rank order, along every sequence."""
    num_heads = terms[0].gain.shape[1]
    num_sequences = 1 + max((item.sequence for t in terms for item in t.items), default=-1)
    entry = [torch.zeros_like(t.gain) for t in terms]
    output_square = torch.zeros(num_sequences, num_heads, dtype=torch.float64, device="cpu")
    final_state = torch.zeros_like(output_square)
    at_start = passed_on = torch.zeros(num_heads, dtype=torch.float64, device="cpu")
    for item, rank, i in sorted((item, rank, i) for rank, t in enumerate(terms) for i, item in enumerate(t.items)):
        t = terms[rank]
        error = at_start if item.is_first else passed_on
        entry[rank][i] = error
        output_square[item.sequence] += _product(t.output_gain[i], error).square()
        passed_on = _product(t.gain[i], error) + t.dropped[i]
        if item.is_last:
            final_state[item.sequence] = passed_on
        elif not item.is_first:  # a first CP chunk scans on from its entry state: `dropped` has what it lost
            passed_on = passed_on + torch.where(t.forgot[i], _product(t.gain[i], t.entry_norm[i]), 0.0)

    checkpoints = []
    for rank, t in enumerate(terms):
        bound = torch.zeros_like(t.checkpoint_gain)
        for checkpoint in t.checkpoints:
            bound[checkpoint.row] = _product(t.checkpoint_gain[checkpoint.row], entry[rank][checkpoint.item])
        checkpoints.append(bound)
    passing = [(t, i) for t in terms for i, item in enumerate(t.items) if not item.is_last]
    return ForgettingBound(
        output=output_square.sqrt(),
        final_state=final_state,
        entry_states=tuple(entry),
        checkpoints=tuple(checkpoints),
        num_maps=len(passing) * num_heads,
        num_forgot=sum(int(t.forgot[i].sum()) for t, i in passing),
        tokens_scanned=sum(int(t.scanned[i].sum()) for t, i in passing),
        tokens_in_maps=sum(t.items[i].num_tokens for t, i in passing) * num_heads,
    )


def _token_gains(inputs: TokenInputs, tokens: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a run of tokens: a_1 ⋯ a_t and ‖q_t‖, both [tokens, H] float64 on the CPU."""
    num_heads = inputs.num_state_heads
    squares = []
    for x in (inputs.q, inputs.k):
        square = x[tokens].double().square().sum(-1)
        if inputs.use_qk_l2norm:
            square = square / (square + L2_NORM_EPS)
        squares.append(square.repeat_interleave(num_heads // x.shape[1], dim=1).cpu())
    beta = 1.0 if inputs.beta is None else inputs.beta[tokens].double().cpu()
    log_a = (1 - beta * squares[1]).abs().clamp(min=1).log()
    if inputs.gate is not None:
        gate = inputs.gate[tokens].double().cpu()
        log_a = log_a + (gate if inputs.gate_space == "log" else gate.log())
    return log_a.cumsum(0).exp(), squares[0].sqrt()


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a · b where 0 · inf is 0: no error grows to no error."""
    return torch.where((a == 0) | (b == 0), 0.0, a * b)


def _largest(x: torch.Tensor) -> float:
    return float(x.max()) if x.numel() else 0.0
