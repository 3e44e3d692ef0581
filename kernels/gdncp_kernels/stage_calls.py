"""Each stage of one call on one device as a call of its own, to compile it or to time it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch

from gdncp.backends.base import (
    AffineMaps,
    Backend,
    ComposingRuns,
    FoldRuns,
    Part,
    Sinks,
    TokenInputs,
    folds_by_mail,
    folds_runs,
    opens,
)
from gdncp.collectives.peer_memory import Mailboxes, table_of
from gdncp.layout import layout_of_plan
from gdncp.plan import PrefillPlan, plan_prefill
from gdncp.work import EarlyTable, WorkTable

MANY_RUNS = 5, 9, 17  # with two heads of 64 or 128 the Hopper set's programs then have 8, 16 or 32 rows


def plan_of(inputs: TokenInputs, **arguments: Any) -> PrefillPlan:
    """The plan of one sequence that is all the tokens."""
    heads = {f"num_{name}_heads": getattr(inputs, name).shape[1] for name in "qkv"}
    return plan_prefill([inputs.q.shape[0]], **heads, head_dim=inputs.q.shape[2], **arguments)


def stage_calls(
    backend: Backend, inputs: TokenInputs, plan: PrefillPlan, forget_below: float
) -> dict[str, Callable[[], Any]]:
    """By stage, in order; stage 1 is run once here, for what the others read."""
    device, num_heads = inputs.k.device, inputs.num_state_heads
    k_dim, v_dim = inputs.k.shape[2], inputs.v.shape[2]
    layout = layout_of_plan(plan, 0, device)
    (table,) = layout.tables

    def states(rows: int) -> torch.Tensor:
        return torch.zeros(rows, num_heads, v_dim, k_dim, device=device)

    entry_states = states(layout.num_items)
    maps = AffineMaps.empty(layout.num_maps, num_heads, k_dim, v_dim, device)
    in_row = (
        num_heads if inputs.gate is None else inputs.gate.stride(0)
    )  # more where the inputs are views of some heads
    output = torch.zeros(inputs.q.shape[0], in_row, v_dim, dtype=inputs.v.dtype, device=device)[:, :num_heads]
    kept = states(layout.num_checkpoints + 1) if layout.num_checkpoints else None
    sinks = Sinks(output, states(layout.num_final + 1), kept)
    tiles = backend.precompute_t(inputs, table)
    after_1 = (inputs, tiles, table, entry_states)
    calls: dict[str, Callable[[], Any]] = {
        "precompute_t": partial(backend.precompute_t, inputs, table),
        "precompute_mn": partial(backend.precompute_mn, *after_1, maps, forget_below),
        "dropped": lambda: maps.dropped,  # launches what makes it, where that was put off
        "cp_prefill": partial(backend.cp_prefill, *after_1, sinks),
    }
    if opens(backend):
        calls["precompute_mn_and_open"] = partial(backend.precompute_mn_and_open, *after_1, maps, forget_below, sinks)
        calls["cp_prefill_after_opening"] = partial(backend.cp_prefill_after_opening, *after_1, sinks)
    calls["cp_prefill, in parts"] = partial(_in_parts, backend, *after_1, maps, sinks)
    fold = backend.fold
    if folds_runs(fold) and layout.runs is not None:
        calls["fold_runs"] = partial(fold.fold_runs, maps, entry_states, layout.runs)
        for count in MANY_RUNS:
            many = _with_idle_runs(layout.runs, count)
            calls[f"fold_runs, {count} runs"] = partial(fold.fold_runs, maps, entry_states, many)
        at = layout.runs.map_row
        composing = ComposingRuns(layout.runs.num_runs, at, layout.runs.num_steps, at, torch.ones_like(at))
        composed = AffineMaps.empty(layout.runs.num_runs, num_heads, k_dim, v_dim, device)
        calls["compose_runs"] = partial(fold.compose_runs, maps, composing, composed)
        spans = states(layout.runs.num_runs)
        runs = replace(layout.runs, span_row=at)
        calls["fold_runs, inside spans"] = partial(fold.fold_runs, maps, entry_states, runs, spans=spans)
    if folds_by_mail(fold) and layout.runs is not None:
        steps, none = layout.runs.num_steps, torch.full_like(layout.runs.entry_row, -1)
        runs = replace(layout.runs, num_fills=steps, source=none, source_message=none, target=none, target_message=none)
        boxes = Mailboxes(1, torch.tensor(table_of(0, 1, 0, [0]), device=device))
        calls["fold_runs_by_mail"] = partial(fold.fold_runs_by_mail, maps, entry_states, runs, boxes)
        for count in MANY_RUNS:
            many = _with_idle_runs(runs, count)
            calls[f"fold_runs_by_mail, {count} runs"] = partial(fold.fold_runs_by_mail, maps, entry_states, many, boxes)
    calls["fold"] = lambda: fold(entry_states[0], maps.transition[0], maps.local_state[0])
    return calls


def _with_idle_runs(runs: FoldRuns, count: int) -> FoldRuns:
    """`count` runs, of which all but the first ones fold nothing."""
    columns = {f.name: column for f in fields(runs) if isinstance(column := getattr(runs, f.name), torch.Tensor)}
    padded: dict[str, Any] = {name: torch.cat([x, x[-1:].expand(count - len(x))]) for name, x in columns.items()}
    for name in {"num_steps", "num_fills"} & set(padded):
        padded[name][runs.num_runs :] = 0
    return replace(runs, num_runs=count, **padded)


def _in_parts(
    backend: Backend,
    inputs: TokenInputs,
    tiles: Any,
    table: WorkTable,
    entry_states: torch.Tensor,
    maps: AffineMaps,
    sinks: Sinks,
) -> None:
    """As beside an exchange on which no entry state depends."""
    early = EarlyTable(table.item_row, torch.full_like(table.item_row, -1), torch.full_like(table.item_row, -1))
    run = backend.cp_prefill_after_opening if opens(backend) else backend.cp_prefill
    for is_early in (True, False):
        run(inputs, tiles, replace(table, early=early), entry_states, sinks, Part(is_early, maps))
