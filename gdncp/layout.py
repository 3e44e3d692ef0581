"""A rank's layout: its work tables, and how states enter and leave them, on one device.

`layout_of_plan` comes from a host plan and is cached; `layout_of_cu_seqlens` is built on the device from upper bounds
(world size 1) for callers whose lengths are only there.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from gdncp.backends.base import AffineMaps, Fold, FoldRuns
from gdncp.plan import PrefillPlan, RankPlan
from gdncp.work import WorkTable, from_cu_seqlens, from_rank_plan, num_stand_ins, stand_in_rows, upload


@dataclass(frozen=True, eq=False)
class Layout:
    """Row counts leave out the dump rows that `WorkTable` names; index tensors are int64 on the device."""

    tables: tuple[WorkTable, ...]  # per lane
    num_items: int
    num_maps: int
    num_checkpoints: int
    num_final: int
    first_rows: torch.Tensor  # [F] entry-state rows that start a sequence here
    first_sequences: torch.Tensor  # [F] the sequences they start
    final_sequences: torch.Tensor  # [num_final] final-state row -> sequence
    starts_all: bool = False  # first_sequences are all sequences, in order
    ends_all: bool = False  # so are final_sequences
    runs: FoldRuns | None = None  # what is folded without an exchange; None: nothing is
    has_early: bool = False  # stage 4 of some items, or of some of their heads, need not wait for the exchange,
    has_late: bool = True  # and of others it has to
    num_stand_ins: int = 0  # rows of the entry states behind those of items, see `stand_in_rows`
    num_sequence_items: torch.Tensor | None = None  # [N] CP chunks per sequence, where only the device knows
    max_sequence_items: int = 1
    prepared: dict[Any, Any] = field(
        default_factory=dict, init=False, repr=False
    )  # backends' launches, by kind of call

    @property
    def has_maps(self) -> bool:
        return self.num_maps > 0

    @cached_property
    def tables_from_zeros(self) -> tuple[WorkTable, ...]:
        """See `WorkTable.from_zeros`."""
        return tuple(table.from_zeros for table in self.tables)


_Key = tuple[str, int, torch.device]
_CACHE: OrderedDict[_Key, tuple[Layout, torch.cuda.Event | None]] = OrderedDict()  # and when it has been copied
_CACHE_SIZE = 128  # layouts are a few KiB each; keyed by the plan's digest, so an entry cannot go stale
_CAPTURED: dict[_Key, Layout] = {}  # a CUDA graph reads them at every replay: these stay


def layout_of_plan(plan: PrefillPlan, rank: int, device: torch.device) -> Layout:
    """The exact layout of `rank`; copied to the device once per (plan, rank, device) without waiting for it.

    Raises:
        RuntimeError: while a CUDA graph is captured, for a plan that has not run before: its tables cannot be copied.
    """
    key = (plan.digest, rank, device)
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if key in _CAPTURED:
        return _CAPTURED[key]
    if key in _CACHE:
        layout, copied = _CACHE[key]
        _CACHE.move_to_end(key)
        if capturing:
            _CAPTURED[key] = layout
        elif copied is not None and not copied.query():  # on a stream that need not be this call's
            torch.cuda.current_stream(device).wait_event(copied)
        elif copied is not None:
            _CACHE[key] = layout, None
        return layout
    if capturing:
        raise RuntimeError(
            f"the plan's tables are not on {device} yet: call gdncp.warmup, or run once, before a capture"
        )
    layout = _build(plan, rank, device)
    _CACHE[key] = layout, torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
    if len(_CACHE) > _CACHE_SIZE:
        _CACHE.popitem(last=False)
    return layout


def _build(plan: PrefillPlan, rank: int, device: torch.device) -> Layout:
    share, late = plan.rank_plan(rank), plan.finish == "entry_late"
    first = [(row, chunk.sequence) for row, chunk in enumerate(share.items) if chunk.is_first]
    rows = upload(
        {
            "first_rows": [row for row, _ in first],
            "first_sequences": [sequence for _, sequence in first],
            "final_sequences": list(share.final_sequences),
        },
        device,
    )
    return Layout(
        runs=_runs(share, device) if late or not plan.crosses_ranks else None,
        has_early=late and any(s.previous is None or s.num_items > 1 for s in share.segments),
        has_late=not late or any(s.previous is not None for s in share.segments),
        num_stand_ins=num_stand_ins(share) if late else 0,
        tables=tuple(
            from_rank_plan(share, lane, device, with_early=late)
            for lane in range(len(share.lanes))
            if share.lanes[lane]
        ),
        num_items=len(share.items),
        num_maps=share.num_maps,
        num_checkpoints=len(share.checkpoints),
        num_final=len(share.final_sequences),
        first_rows=rows["first_rows"],
        first_sequences=rows["first_sequences"],
        final_sequences=rows["final_sequences"],
        starts_all=[sequence for _, sequence in first] == list(range(plan.num_sequences)),
        ends_all=list(share.final_sequences) == list(range(plan.num_sequences)),
    )


def _runs(share: RankPlan, device: torch.device) -> FoldRuns:
    rows = dict(zip(share.segments, stand_in_rows(share), strict=True))
    segments = [s for s in share.segments if s.num_items > 1]
    columns = {
        "entry_row": [rows[s] for s in segments],
        "map_row": [share.map_rows[s.first_item] for s in segments],
        "num_steps": [s.num_items - 1 for s in segments],
        "starts": [1 if s.previous is None else -1 for s in segments],
    }
    return FoldRuns(num_runs=len(segments), **upload(columns, device))


def layout_of_cu_seqlens(
    cu_seqlens: torch.Tensor,
    num_tokens: int,
    cp_chunk_len: int,
    *,
    checkpoint_every_n_tokens: int = 0,
    checkpoint_cu_starts: torch.Tensor | None = None,
    num_checkpoints: int = 0,
) -> Layout:
    """The layout of one rank that holds all tokens, from device lengths.  See `gdncp.work.from_cu_seqlens`."""
    table = from_cu_seqlens(
        cu_seqlens,
        num_tokens,
        cp_chunk_len,
        checkpoint_every_n_tokens=checkpoint_every_n_tokens,
        checkpoint_cu_starts=checkpoint_cu_starts,
        num_checkpoints=num_checkpoints,
    )
    num_sequences = cu_seqlens.numel() - 1
    lengths = cu_seqlens.to(torch.int64).clamp(0, num_tokens).cummax(0).values.diff()
    items = torch.clamp((lengths + cp_chunk_len - 1) // cp_chunk_len, min=1)
    sequences = torch.arange(num_sequences, device=cu_seqlens.device)
    first_rows = items.cumsum(0) - items
    splits = num_tokens > cp_chunk_len  # else no sequence can have a second CP chunk
    return Layout(
        tables=(table,),
        num_items=table.num_items,
        num_maps=table.num_maps if splits else 0,
        num_checkpoints=num_checkpoints,
        num_final=num_sequences,
        first_rows=first_rows,
        first_sequences=sequences,
        final_sequences=sequences,
        starts_all=True,
        ends_all=True,
        runs=FoldRuns(num_sequences, first_rows, first_rows, items - 1, torch.ones_like(items)),
        num_sequence_items=items,
        max_sequence_items=max(1, -(-num_tokens // cp_chunk_len)),
    )


def fold_on_device(layout: Layout, maps: AffineMaps, entry_states: torch.Tensor, fold: Fold) -> None:
    """The local fixup where only the device knows how many CP chunks a sequence has; fills `entry_states` in place.

    Step p moves every sequence one CP chunk on; a sequence that has none left writes to the spare last row.
    """
    assert layout.num_sequence_items is not None
    spare = entry_states.shape[0] - 1
    for step in range(1, layout.max_sequence_items):
        live = step < layout.num_sequence_items
        row = torch.where(live, layout.first_rows + step, spare)
        before = torch.where(live, row - 1, 0)
        state = maps.local_state[before]  # of a first CP chunk: its exit state
        if step > 1:
            state = fold(entry_states[before], maps.transition[before], state)
        entry_states.index_copy_(0, row, state)
