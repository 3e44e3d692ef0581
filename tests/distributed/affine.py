"""Maps and states for fixup tests: made up, the same on every rank, and folded by one process as the reference."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from gdncp.backends.base import AffineMaps, ComposingRuns, FoldRuns
from gdncp.plan import PrefillPlan, plan_prefill

HEADS, K_DIM, V_DIM = 5, 16, 80  # heads that do not divide by a world size; K and V that cannot be mistaken
CP_CHUNK_LEN = 64


class BlockFold:
    """What a backend's fold promises, in its plainest form."""

    block_rows = 32

    def __call__(self, state: torch.Tensor, transition: torch.Tensor, local_state: torch.Tensor) -> torch.Tensor:
        assert state.is_contiguous() and transition.is_contiguous() and local_state.is_contiguous()
        blocks = [
            torch.bmm(rows.contiguous(), transition) + add
            for rows, add in zip(state.split(self.block_rows, 1), local_state.split(self.block_rows, 1), strict=True)
        ]
        return torch.cat(blocks, 1)


class RunsFold(BlockFold):
    """One that takes whole runs, and counts its calls."""

    def __init__(self) -> None:
        self.run_launches = self.single_launches = 0

    def __call__(self, state: torch.Tensor, transition: torch.Tensor, local_state: torch.Tensor) -> torch.Tensor:
        self.single_launches += 1
        return super().__call__(state, transition, local_state)

    def compose_runs(self, maps: AffineMaps, runs: ComposingRuns, composed: AffineMaps) -> None:
        assert runs.num_runs == len(runs.map_row)
        self.run_launches += 1
        for run in range(runs.num_runs):
            row, steps, made, of_transitions = (
                int(x[run]) for x in (runs.map_row, runs.num_steps, runs.composed_row, runs.of_transitions)
            )
            states, out = maps.local_state, composed.local_state
            if of_transitions:
                states, out = maps.transition, composed.transition
            state = states[row]
            for j in range(row + 1, row + steps):
                add = torch.zeros_like(state) if of_transitions else maps.local_state[j]
                state = super().__call__(state, maps.transition[j], add)
            out[made] = state

    def fold_runs(
        self,
        maps: AffineMaps,
        entry_states: torch.Tensor,
        runs: FoldRuns,
        exits: torch.Tensor | None = None,
        spans: torch.Tensor | None = None,
    ) -> None:
        assert (spans is None) == (runs.span_row is None)
        assert runs.num_runs == len(runs.entry_row)
        self.run_launches += 1
        for run in range(runs.num_runs):
            entry, row, steps, starts = (
                int(x[run]) for x in (runs.entry_row, runs.map_row, runs.num_steps, runs.starts)
            )
            fills = steps if runs.num_fills is None else int(runs.num_fills[run])
            leave = -1 if runs.exit_row is None else int(runs.exit_row[run])
            if spans is not None and not starts:
                assert runs.span_row is not None
                entry_states[entry] = spans[int(runs.span_row[run])]
            state = torch.zeros_like(entry_states[0]) if starts < 0 else entry_states[entry].clone()
            for j in range(steps):
                local = maps.local_state[row + j]
                state = local if starts > 0 and j == 0 else super().__call__(state, maps.transition[row + j], local)
                if j < fills:
                    entry_states[entry + j + 1] = state
            if leave >= 0:
                assert exits is not None and steps
                exits[leave] = state


class ElementwiseFold:
    """The same without a matrix product, whose kernel a GPU may choose by batch: no bit depends on the batch."""

    block_rows = 16

    def __call__(self, state: torch.Tensor, transition: torch.Tensor, local_state: torch.Tensor) -> torch.Tensor:
        total = torch.zeros_like(local_state)
        for k in range(transition.shape[1]):
            total = total + state[:, :, k, None] * transition[:, None, k]
        return total + local_state


def fold_for(device: str) -> BlockFold | ElementwiseFold:
    return BlockFold() if device == "cpu" else ElementwiseFold()


def make_plan(
    seq_lens: Sequence[int],
    world_size: int,
    ownership: Any = "contiguous",
    fixup: str = "auto",
    fold_span: int = 1,
    finish: str = "entry_first",  # all entry states by the exchange
) -> PrefillPlan:
    return plan_prefill(
        seq_lens,
        world_size=world_size,
        ownership=ownership,
        num_q_heads=HEADS,
        num_k_heads=HEADS,
        num_v_heads=HEADS,
        head_dim=K_DIM,
        cp_chunk_len=CP_CHUNK_LEN,
        fixup=fixup,
        fold_span=fold_span,
        finish=finish,
    )


def random_ranges(seq_lens: Sequence[int], ranks: Sequence[int], world_size: int, seed: int, grid: int = 1) -> list:
    """Explicit ownership: tokens cut anywhere (on multiples of `grid`), each piece on any of `ranks`."""
    draw = random.Random(seed)
    total = sum(seq_lens)
    cuts = sorted({0, total, *(draw.randrange(0, total + 1) // grid * grid for _ in range(4 * world_size))})
    ranges: list[list[tuple[int, int]]] = [[] for _ in range(world_size)]
    for start, stop in pairwise(cuts):
        ranges[draw.choice(ranks)].append((start, stop))
    return ranges


@dataclass
class Problem:
    """Every CP chunk's map and entry state, by `plan.cp_chunks`, and each sequence's initial state."""

    transition: torch.Tensor
    local_state: torch.Tensor
    entry_states: torch.Tensor  # by the left fold


def make_problem(plan: PrefillPlan, device: str = "cpu", seed: int = 0) -> Problem:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    count = len(plan.cp_chunks)
    # reflections: maps that remember, the only ones that tell a right transition from a wrong one
    keys = torch.nn.functional.normalize(draw(count, HEADS, K_DIM), dim=-1)
    transition = torch.eye(K_DIM) - 2 * keys[..., :, None] * keys[..., None, :]
    transition[(draw(count, HEADS) > 1.5)] = 0.0  # some heads forget
    local_state = draw(count, HEADS, V_DIM, K_DIM)
    local_state[:, :, :2] = -0.0  # the sign of a zero is a bit too
    for chunk in plan.cp_chunks:
        if chunk.is_first:
            transition[chunk.index] = 0.0
    transition, local_state = transition.to(device), local_state.to(device)
    entry_states = draw(count, HEADS, V_DIM, K_DIM).to(device)
    fold = fold_for(device)
    for chunk in plan.cp_chunks:  # the others are folded: one map at a time, in sequence order
        if not chunk.is_first:
            before = chunk.index - 1
            if plan.cp_chunks[before].is_first:
                entry_states[chunk.index] = local_state[before]
            else:
                entry_states[chunk.index] = fold(entry_states[before], transition[before], local_state[before])
    return Problem(transition, local_state, entry_states)


def rank_share(plan: PrefillPlan, rank: int, problem: Problem) -> tuple[AffineMaps, torch.Tensor, torch.Tensor]:
    """A rank's maps, its entry states before the fixup (NaN where unknown), and as they have to become."""
    share = plan.rank_plan(rank)
    device = problem.transition.device
    maps = AffineMaps.empty(share.num_maps, HEADS, K_DIM, V_DIM, device)
    expected = torch.empty(len(share.items), HEADS, V_DIM, K_DIM, device=device)
    entry_states = torch.full_like(expected, float("nan"))
    for i, item in enumerate(share.items):
        expected[i] = problem.entry_states[item.index]
        if item.is_first:
            entry_states[i] = problem.entry_states[item.index]
        if share.map_rows[i] >= 0:
            maps.transition[share.map_rows[i]] = problem.transition[item.index]
            maps.local_state[share.map_rows[i]] = problem.local_state[item.index]
    return maps, entry_states, expected


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))
