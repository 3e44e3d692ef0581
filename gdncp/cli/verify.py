"""Results on disk against the float64 oracle or the input file's expected values.

It reads what the ranks wrote, a few sequences at a time: what is verified is what a user will load.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from gdncp.backends.base import GateSpace, Precision
from gdncp.cli.inputs import Defaults, Source
from gdncp.forgetting import FP32_FLOOR, ForgettingBound
from gdncp.plan import PrefillPlan
from gdncp.reference import ReferenceResult, contract_ratio, gated_delta_rule_reference, relative_error

# Relative L2 error per sequence and head.  fp32: 64-token triangular inverses and fp32 folds; bf16 and fp16: their own
# rounding of operands and outputs, which beta above 1 amplifies.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 5e-3, torch.float16: 5e-3}
TOLERANCE_BETA_ABOVE_1 = 1e-2
GROUP_TOKENS = 32768  # the oracle moves the sequences of a group on together


@dataclass
class Worst:
    """The worst of one kind of result over all rows (sequences, or checkpoints) and heads."""

    ratio: float = -1.0  # error / (tolerance · norm + bound on what forgetting dropped): above 1 breaks the contract
    relative: float = 0.0  # error / norm, at its worst, which may be another row
    tolerance: float = 0.0
    row: int = -1
    head: int = -1

    def take(
        self,
        x: torch.Tensor,
        reference: torch.Tensor,
        tolerance: float,
        bound: torch.Tensor,
        first_row: int,
        seq_lens: tuple[int, ...] | None = None,
    ) -> None:
        """Outputs [T, H, V] with `seq_lens`, or states [rows, H, V, K]; `bound` [sequences or rows, H]."""
        ratio = contract_ratio(x, reference, tolerance, bound + _underflow(x, seq_lens), seq_lens)
        if not ratio.numel():
            return
        self.tolerance = max(self.tolerance, tolerance)
        self.relative = max(self.relative, float(relative_error(x, reference, seq_lens).max()))
        worst = int(ratio.argmax())
        if float(ratio.max()) > self.ratio:
            self.ratio = float(ratio.max())
            self.row, self.head = first_row + worst // ratio.shape[1], worst % ratio.shape[1]


def _underflow(x: torch.Tensor, seq_lens: tuple[int, ...] | None) -> float:
    """L2 norm of what the dtype cannot hold, over the elements of a sequence's head or of a state."""
    if x.dtype != torch.float16:
        return FP32_FLOOR
    count = x[0, 0].numel() if seq_lens is None and len(x) else max(seq_lens or (0,)) * x.shape[-1]
    return 2.0**-25 * math.sqrt(count)  # half of its finest step


def verify(
    run_dir: Path,
    plan: PrefillPlan,
    source: Source,
    call: Defaults,
    *,
    gate_space: GateSpace,
    precision: Precision,
    bound: ForgettingBound,
) -> dict[str, Any]:
    """Compare every result in `run_dir`; `bound` says what forgetting may have dropped.

    Returns "ok", "against", and the worst error of "output", "final_state" and "state_checkpoints" (see `Worst`).
    """
    wanted = ["output", "final_state", *(["checkpoints"] if plan.num_checkpoints else [])]
    from_file = call == source.defaults and all(source.expected(name, (0, 0)) is not None for name in wanted)
    of_checkpoints = torch.zeros(plan.num_checkpoints, plan.num_state_heads, dtype=torch.float64)
    for rank, rows in enumerate(bound.checkpoints):
        of_checkpoints[list(plan.checkpoint_rows(rank))] = rows
    worst = {"output": Worst(), "final_state": Worst(), "state_checkpoints": Worst()}
    for first, stop in _groups(plan.seq_lens):
        tokens = source.tokens([(plan.seq_starts[first], plan.seq_starts[stop])], gate_space)
        found = _results(run_dir, plan, first, stop)
        if from_file:
            reference = _expected(plan, source, first, stop)
        else:
            reference = _oracle(plan, source, tokens, call, gate_space, first, stop)
        dtype = torch.float32 if precision == "high" else source.shape.dtype
        tolerance = TOLERANCE[dtype]
        if dtype != torch.float32 and tokens["q"].shape[0] and _largest(tokens.get("beta")) > 1:
            tolerance = TOLERANCE_BETA_ABOVE_1
        # with precision=high too, outputs are rounded once to the input dtype
        rounding = torch.finfo(found.output.dtype).eps / 2 if found.output.dtype != dtype else 0.0
        lengths, low, high = plan.seq_lens[first:stop], *(plan.checkpoint_cu_starts[s] for s in (first, stop))
        dropped = bound.output[first:stop]
        worst["output"].take(found.output, reference.output, tolerance + rounding, dropped, first, lengths)
        dropped = bound.final_state[first:stop]
        worst["final_state"].take(found.final_state, reference.final_state, tolerance, dropped, first)
        if plan.num_checkpoints:
            dropped = of_checkpoints[low:high]
            worst["state_checkpoints"].take(found.checkpoints, reference.checkpoints, tolerance, dropped, low)
    return {
        "ok": all(value.ratio <= 1 for value in worst.values()),
        "against": "the file's expected values" if from_file else "the float64 oracle",
        **{name: asdict(value) for name, value in worst.items() if value.row >= 0},
    }


def _groups(seq_lens: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Runs of sequences [first, stop) of at most GROUP_TOKENS tokens, or one sequence."""
    first, tokens = 0, 0
    for sequence, length in enumerate(seq_lens):
        if sequence > first and tokens + length > GROUP_TOKENS:
            yield first, sequence
            first, tokens = sequence, 0
        tokens += length
    if seq_lens:
        yield first, len(seq_lens)


def _largest(beta: torch.Tensor | None) -> float:
    return 1.0 if beta is None else float(beta.max())


def _results(run_dir: Path, plan: PrefillPlan, first: int, stop: int) -> ReferenceResult:
    """What the run wrote for sequences [first, stop), each rank's output rows put back in token order."""
    start, end = plan.seq_starts[first], plan.seq_starts[stop]
    parts: dict[int, torch.Tensor] = {}
    for rank in range(plan.world_size):
        with safe_open(run_dir / "output" / f"rank{rank}.safetensors", "pt") as file:
            rows, row = file.get_slice("output"), 0
            for low, high in plan.token_ranges(rank):
                if max(low, start) < min(high, end):
                    parts[max(low, start)] = rows[row + max(low, start) - low : row + min(high, end) - low]
                row += high - low
            empty = rows[:0]
    with safe_open(run_dir / "final_state.safetensors", "pt") as file:
        final_state = file.get_slice("final_state")[first:stop]
    checkpoints = final_state[:0]
    if plan.num_checkpoints:
        with safe_open(run_dir / "state_checkpoints.safetensors", "pt") as file:
            low, high = plan.checkpoint_cu_starts[first], plan.checkpoint_cu_starts[stop]
            checkpoints = file.get_slice("state_checkpoints")[low:high]
    return ReferenceResult(torch.cat([parts[key] for key in sorted(parts)] or [empty]), final_state, checkpoints)


def _expected(plan: PrefillPlan, source: Source, first: int, stop: int) -> ReferenceResult:
    def rows(name: str, starts: tuple[int, ...]) -> torch.Tensor:
        value = source.expected(name, (starts[first], starts[stop]))
        return torch.empty(0) if value is None else value  # only checkpoints that nobody asked for

    sequences = tuple(range(plan.num_sequences + 1))
    return ReferenceResult(
        rows("output", plan.seq_starts),
        rows("final_state", sequences),
        rows("checkpoints", plan.checkpoint_cu_starts),
    )


def _oracle(
    plan: PrefillPlan,
    source: Source,
    tokens: Mapping[str, Any],
    call: Defaults,
    gate_space: GateSpace,
    first: int,
    stop: int,
) -> ReferenceResult:
    states = source.initial_states(range(first, stop))
    return gated_delta_rule_reference(
        **tokens,
        scale=call.scale,
        initial_state=None if states is None else states[first:stop],
        seq_lens=plan.seq_lens[first:stop],
        gate_space=gate_space,
        use_qk_l2norm_in_kernel=call.use_qk_l2norm_in_kernel,
        checkpoint_every_n_tokens=call.checkpoint_every_n_tokens,
    )
