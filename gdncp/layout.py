"""A rank's layout: its work tables, and how states enter and leave them, on one device.

`layout_of_plan` comes from a host plan and is cached; `layout_of_cu_seqlens` is built on the device from upper bounds
(world size 1) for callers whose lengths are only there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field, is_dataclass
from functools import cached_property
from threading import Lock
from typing import Any

import torch

from gdncp.backends.base import AffineMaps, Fold, FoldRuns
from gdncp.collectives import chain, local
from gdncp.collectives.fixup import in_spans, tables_on
from gdncp.collectives.spans import Composing, InSpans, composing_on
from gdncp.plan import PrefillPlan
from gdncp.work import WorkTable, from_cu_seqlens, from_rank_plan, num_stand_ins, upload


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
    runs: FoldRuns | None = None  # what is folded without an exchange, of composed maps where there are; None: nothing
    composing: Composing | None = None  # with `plan.fold_span` > 1: before that and before an exchange,
    in_spans: InSpans | None = None  # and behind them; None also where an exchange is not all between the two
    exchange: tuple[chain.Round, ...] = ()  # of a chain in which states travel whole
    fixup: tuple[Any, ...] = ()  # what stage 3 reads besides
    mail: tuple[FoldRuns, ...] = ()  # of the same by mail
    has_early: bool = False  # stage 4 of some items, or of some of their heads, need not wait for the exchange,
    has_late: bool = True  # and of others it has to
    num_stand_ins: int = 0  # rows of the entry states behind those of items, see `stand_in_rows`
    num_sequence_items: torch.Tensor | None = None  # [N] CP chunks per sequence, where only the device knows
    max_sequence_items: int = 1
    prepared: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)  # backends' launches, by kind

    @property
    def has_maps(self) -> bool:
        return self.num_maps > 0

    @cached_property
    def tables_from_zeros(self) -> tuple[WorkTable, ...]:
        """See `WorkTable.from_zeros`."""
        return tuple(table.from_zeros for table in self.tables)


class _Cached:
    """A layout, and who may be reading it on the device."""

    def __init__(self, layout: Layout, device: torch.device):
        self.layout, self._device = layout, device
        self._copied: torch.cuda.Event | None = None
        self._streams: dict[int, torch.cuda.Stream] = {}  # that have read it
        self.captured = False  # a CUDA graph reads it at every replay, until `release_captured`
        if device.type == "cuda":
            self._copied = torch.cuda.current_stream(device).record_event()

    def use(self) -> None:
        """By what is enqueued on the current stream after this.  The copy may be under way on another one."""
        raw = torch._C._cuda_getCurrentRawStream(self._device.index)
        if raw not in self._streams and self._copied is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(self._copied)
            self._streams[raw] = stream

    def drop(self) -> None:
        """Its memory goes to nobody before all streams have done with it that have something enqueued."""
        for stream in self._streams.values():
            for x in _tensors(self.layout):
                x.record_stream(stream)


def _tensors(x: Any) -> Iterator[torch.Tensor]:
    """All in a layout, also those made on first use."""
    if isinstance(x, torch.Tensor):
        yield x
    elif isinstance(x, tuple):
        for part in x:
            yield from _tensors(part)
    elif is_dataclass(x):
        for part in vars(x).values():
            yield from _tensors(part)


_CACHE: OrderedDict[tuple[str, int, torch.device, int], _Cached] = OrderedDict()
_CACHE_SIZE = 128  # layouts are a few KiB each; keyed by the plan's digest, so an entry cannot go stale
_LOCK = Lock()  # of the cache


def layout_of_plan(plan: PrefillPlan, rank: int, device: torch.device, v_dim: int | None = None) -> Layout:
    """The exact layout of `rank`; copied to the device once, without waiting for it.

    Args:
        v_dim: the head dim of values; None: that of keys.

    Raises:
        RuntimeError: while a CUDA graph is captured, for a plan that has not run before: its tables cannot be copied.
    """
    v_dim = v_dim or plan.head_dim
    key, on_gpu = (plan.digest, rank, device, v_dim), device.type == "cuda"
    capturing = on_gpu and torch.cuda.is_current_stream_capturing()
    with _LOCK:
        cached = _CACHE.get(key)
        if cached is None:
            if capturing:
                raise RuntimeError(
                    f"the plan's tables are not on {device} yet: call gdncp.warmup, or run once, before a capture"
                )
            cached = _CACHE[key] = _Cached(_build(plan, rank, device, v_dim), device)
            _make_room()
        _CACHE.move_to_end(key)
        if capturing:
            cached.captured = True
        elif on_gpu:
            cached.use()
    return cached.layout


def release_captured(plan: PrefillPlan | None = None) -> int:
    """Let go of the tables that captured CUDA graphs read: of this plan, or of all.  Returns how many there were.

    Nothing says when a graph ends, so what one has read on a device (a few KiB; with very many sequences MiB) is kept
    until this is called.  No graph of theirs may be replayed after it; replays before it must lie on the current
    stream of their device, or be done.  Nothing is waited for.  The tables are then kept like those of other plans:
    the most recently used ones.
    """
    with _LOCK:
        found = [
            cached
            for (digest, *_), cached in _CACHE.items()
            if cached.captured and (plan is None or digest == plan.digest)
        ]
        for cached in found:
            cached.captured = False
            cached.use()
        _make_room()
    return len(found)


def _make_room() -> None:
    """Drop the least recently used layouts, but for those that a graph may read, see `release_captured`."""
    for key in [key for key, cached in _CACHE.items() if not cached.captured][:-_CACHE_SIZE]:
        _CACHE.pop(key).drop()


def _build(plan: PrefillPlan, rank: int, device: torch.device, v_dim: int) -> Layout:
    share, late = plan.rank_plan(rank), plan.finish == "entry_late"
    folds_here = late or not plan.crosses_ranks
    first = [(row, chunk.sequence) for row, chunk in enumerate(share.items) if chunk.is_first]
    rows = upload(
        {
            "first_rows": [row for row, _ in first],
            "first_sequences": [sequence for _, sequence in first],
            "final_sequences": list(share.final_sequences),
        },
        device,
    )
    chained, spanned = plan.crosses_ranks and plan.fixup == "chain", plan.fold_span > 1
    layout = Layout(
        runs=local.tables_on(plan, rank, device).links.runs if folds_here and not (late and spanned) else None,
        composing=composing_on(plan, rank, device) if spanned else None,
        in_spans=in_spans(plan, rank, device),
        fixup=tables_on(plan, rank, device, v_dim),
        exchange=chain.rounds_on(plan, rank, device) if chained else (),
        mail=chain.mail_on(plan, rank, device) if chained and not late else (),
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
    # with `late` they are computed on the device: now, before another stream or a graph's capture asks for them
    _ = layout.tables_from_zeros
    return layout


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
