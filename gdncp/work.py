"""Work tables: what one lane of one rank runs, as index tensors that kernels read.

Two builders make the same table: `from_rank_plan` from a host plan, exact, and `from_cu_seqlens` on the device from
upper bounds, for callers who only have lengths there.  A table never needs reading back: all sizes are host ints.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch

from gdncp.plan.checks import CHUNK
from gdncp.plan.model import CpChunk, RankPlan


@dataclass(frozen=True)
class HostTable:
    """The same numbers on the host, where they are known."""

    num_tokens: tuple[int, ...]  # per item
    map_item: tuple[int, ...]
    checkpoint_item: tuple[int, ...]
    checkpoint_tokens: tuple[int, ...]

    @cached_property
    def checkpoints_inside_chunks(self) -> bool:
        """Whether some do not stand on a chunk's first token or behind its last."""
        return any(n % CHUNK for n in self.checkpoint_tokens)


@dataclass(frozen=True, eq=False)
class EarlyTable:
    """What is known of each item's entry state before anything comes from another rank; [num_items] int64 each.

    Where the sequence starts on this rank: all.  Elsewhere what follows, on this rank, a map that dropped its
    transition, which is for the device to see, per head: the fold that finds it starts from zeros and goes to rows of
    its own (`stand_in_rows`), which hold nothing of use for the other heads.
    """

    row: torch.Tensor  # in the rank's entry states; < 0: zeros
    maps_start: (
        torch.Tensor
    )  # rows [maps_start, maps_stop) of the rank's maps lead from the segment's start to the item;
    maps_stop: torch.Tensor  # maps_start < 0: the sequence starts on this rank


@dataclass(frozen=True, eq=False)
class WorkTable:
    """Items are CP chunks.  All tensors int64, on one device.

    Where lengths are known on the host, items in `opens` come first, since their stage 4 takes longer than the maps
    beside it, and then the longest first.

    An item, chunk, map or checkpoint past the true count (tables built from upper bounds) has no tokens or points to a
    dump row, so that running it changes nothing.
    """

    num_items: int
    num_chunks: int  # flat 64-token chunks over all items
    max_chunks: int  # most chunks in one item
    num_maps: int
    num_checkpoints: int
    token_start: torch.Tensor  # [num_items] first row in the rank's token tensors
    num_tokens: torch.Tensor  # [num_items]; may be 0
    item_row: torch.Tensor  # [num_items] row of the item in the rank's entry states; < 0: zeros (see `from_zeros`)
    entering_row: torch.Tensor  # [num_items] the same, -1 where the item starts its sequence
    final_row: torch.Tensor  # [num_items] row in `Sinks.final_states`; the dump row where the item is not a last one
    first_chunk: torch.Tensor  # [num_items] the item's first flat chunk
    chunk_item: torch.Tensor  # [num_chunks] flat chunk -> item
    chunk_ordinal: torch.Tensor  # [num_chunks] which chunk of its item; past the item's end: an empty chunk
    chunk_token: torch.Tensor  # [num_chunks] first row of the chunk in the rank's token tensors
    chunk_rows: torch.Tensor  # [num_chunks] its tokens, 64 but in a tail; 0: an empty chunk
    opens: torch.Tensor  # [num_items] bool: the item starts its sequence and passes a state on
    map_item: torch.Tensor  # [num_maps] item whose map this is
    map_row: torch.Tensor  # [num_maps] row in the rank's `AffineMaps`; the dump row (the last one) if not a real map
    map_is_first: torch.Tensor  # [num_maps] bool: starts from its entry state, transition is zero
    checkpoint_item: torch.Tensor  # [num_checkpoints], sorted by (item, tokens)
    checkpoint_tokens: torch.Tensor  # [num_checkpoints] tokens of the item seen, 1 ... num_tokens
    checkpoint_row: torch.Tensor  # [num_checkpoints] row in `Sinks.checkpoints`
    checkpoint_start: torch.Tensor  # [num_items + 1] the item's first checkpoint
    host: HostTable | None  # None: built on the device
    early: EarlyTable | None = None  # only where stage 4 does not wait for the exchange as a whole
    prepared: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)  # backends' launches over this table

    @cached_property
    def from_zeros(self) -> WorkTable:
        """The same work where no sequence has an initial state, for backends with `exact_rows`."""
        early = self.early
        if early is not None:
            early = replace(early, row=torch.where(self.entering_row < 0, -1, early.row))
        return replace(self, item_row=self.entering_row, early=early)

    @cached_property
    def before_exchange(self) -> WorkTable:
        """The same work from the entry states that are known before the exchange."""
        assert self.early is not None
        return replace(self, item_row=self.early.row)


def stand_in_rows(rank_plan: RankPlan) -> tuple[int, ...]:
    """Per segment of the rank the row of its first item among the entry states that are known before the exchange.

    Its other items follow.  Segments that start a sequence have their own rows; of the others, whose first item is not
    known, the rest have rows behind those of all items.
    """
    rows, behind = [], len(rank_plan.items)
    for segment in rank_plan.segments:
        rows.append(segment.first_item if segment.previous is None else behind - 1)
        behind += 0 if segment.previous is None else segment.num_items - 1
    return tuple(rows)


def num_stand_ins(rank_plan: RankPlan) -> int:
    return sum(s.num_items - 1 for s in rank_plan.segments if s.previous is not None)


def from_rank_plan(rank_plan: RankPlan, lane: int, device: torch.device, with_early: bool = False) -> WorkTable:
    """The exact table of one lane.  Copies to the device without waiting for it."""

    def opens(chunk: CpChunk) -> bool:
        return chunk.is_first and not chunk.is_last

    own = ((i, rank_plan.items[i]) for i in rank_plan.lanes[lane])  # stable: ties in token order
    items = [i for i, _ in sorted(own, key=lambda pair: (not opens(pair[1]), -pair[1].num_tokens))]
    position = {item: p for p, item in enumerate(items)}
    chunks = [rank_plan.items[i] for i in items]
    num_chunks = [-(-c.num_tokens // CHUNK) for c in chunks]
    maps = [p for p, i in enumerate(items) if rank_plan.map_rows[i] >= 0]
    checkpoints = sorted((position[c.item], c.tokens, c.row) for c in rank_plan.checkpoints if c.item in position)
    num_final = len(rank_plan.final_sequences)
    final_rows = [rank_plan.final_rows[i] for i in items]

    columns = {
        "token_start": [c.offset for c in chunks],
        "num_tokens": [c.num_tokens for c in chunks],
        "item_row": items,
        "entering_row": [-1 if c.is_first else i for c, i in zip(chunks, items, strict=True)],
        "final_row": [row if row >= 0 else num_final for row in final_rows],
        "first_chunk": [0, *accumulate(num_chunks)][: len(items)],
        "chunk_item": [p for p, n in enumerate(num_chunks) for _ in range(n)],
        "chunk_ordinal": [c for n in num_chunks for c in range(n)],
        "chunk_token": [c.offset + CHUNK * i for c, n in zip(chunks, num_chunks, strict=True) for i in range(n)],
        "chunk_rows": [
            min(CHUNK, c.num_tokens - CHUNK * i) for c, n in zip(chunks, num_chunks, strict=True) for i in range(n)
        ],
        "opens": [int(opens(c)) for c in chunks],
        "map_item": maps,
        "map_row": [rank_plan.map_rows[items[p]] for p in maps],
        "map_is_first": [int(chunks[p].is_first) for p in maps],
        "checkpoint_item": [c[0] for c in checkpoints],
        "checkpoint_tokens": [c[1] for c in checkpoints],
        "checkpoint_row": [c[2] for c in checkpoints],
        "checkpoint_start": [bisect_left(checkpoints, (p,)) for p in range(len(items) + 1)],
    }
    tensors = upload(columns, device)
    return WorkTable(
        early=EarlyTable(**upload(_early_columns(rank_plan, items), device)) if with_early else None,
        num_items=len(items),
        num_chunks=sum(num_chunks),
        max_chunks=max(num_chunks, default=0),
        num_maps=len(maps),
        num_checkpoints=len(checkpoints),
        **{**tensors, **{name: tensors[name].bool() for name in ("opens", "map_is_first")}},
        host=HostTable(
            num_tokens=tuple(columns["num_tokens"]),
            map_item=tuple(maps),
            checkpoint_item=tuple(columns["checkpoint_item"]),
            checkpoint_tokens=tuple(columns["checkpoint_tokens"]),
        ),
    )


def _early_columns(rank_plan: RankPlan, items: list[int]) -> dict[str, list[int]]:
    """Of `EarlyTable`, for these items of the rank."""
    of_item = []  # of all of the rank's
    for segment, row in zip(rank_plan.segments, stand_in_rows(rank_plan), strict=True):
        first = rank_plan.map_rows[segment.first_item]  # −1 where no map is asked for, as the segment has one item
        for i in range(segment.num_items):
            of_item.append(
                (row + i, -1, -1) if segment.previous is None else (row + i, max(first, 0), max(first, 0) + i)
            )
    names = ("row", "maps_start", "maps_stop")
    return {name: [of_item[item][column] for item in items] for column, name in enumerate(names)}


def upload(columns: dict[str, list[int]], device: torch.device) -> dict[str, torch.Tensor]:
    """Columns as int64 tensors on `device`, by one pinned copy: a pageable one would make the host wait.

    Raises RuntimeError while a CUDA graph is captured: its replays would copy what then lies in that pinned memory.
    """
    # each starts at a multiple of 16 bytes, as allocations do: kernels are compiled for that
    sizes = [len(column) + len(column) % 2 for column in columns.values()]
    padded = [x for column in columns.values() for x in (*column, *[0] * (len(column) % 2))]
    flat = torch.tensor(padded, dtype=torch.int64, device="cpu")
    if device.type == "cuda":
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"the plan's tables are not all on {device}: call gdncp.warmup, or run once, before a capture"
            )
        flat = flat.pin_memory().to(device, non_blocking=True)
    parts = zip(columns.items(), flat.split(sizes), strict=True)
    return {name: part[: len(column)] for (name, column), part in parts}


def from_cu_seqlens(
    cu_seqlens: torch.Tensor,
    num_tokens: int,
    cp_chunk_len: int,
    *,
    checkpoint_every_n_tokens: int = 0,
    checkpoint_cu_starts: torch.Tensor | None = None,
    num_checkpoints: int = 0,
) -> WorkTable:
    """A table for world size 1 built where `cu_seqlens` [N+1] lies, from upper bounds only; nothing is read back.

    Offsets are clamped to [0, num_tokens] and made non-decreasing.  Bounds come from `num_tokens` alone, so a
    `max_seqlen` that lies costs no token.  Items, maps and entry states are rows in sequence order; row N of the final
    states, row num_items of the maps and the last checkpoint row are dumps.
    """
    device = cu_seqlens.device
    num_sequences = cu_seqlens.numel() - 1
    length = cp_chunk_len
    offsets = cu_seqlens.to(torch.int64).clamp(0, num_tokens).cummax(0).values
    seq_start, seq_len = offsets[:-1], offsets.diff()
    # an empty sequence still has one (empty) item, which hands its initial state over
    items_of = torch.clamp((seq_len + length - 1) // length, min=1)
    item_end = items_of.cumsum(0)
    first_item = item_end - items_of
    num_items = num_tokens // length + num_sequences
    item = torch.arange(num_items, device=device)
    sequence = torch.searchsorted(item_end, item, right=True).clamp(max=num_sequences - 1)
    ordinal = item - first_item[sequence]
    real = item < item_end[-1]
    item_tokens = torch.where(real, (seq_len[sequence] - ordinal * length).clamp(0, length), 0)
    token_start = torch.where(real, seq_start[sequence] + ordinal * length, 0)
    is_last = real & (ordinal == items_of[sequence] - 1)

    chunks_of = (item_tokens + CHUNK - 1) // CHUNK
    chunk_end = chunks_of.cumsum(0)
    num_chunks = num_tokens // CHUNK + num_items
    chunk = torch.arange(num_chunks, device=device)
    chunk_item = torch.searchsorted(chunk_end, chunk, right=True).clamp(max=num_items - 1)
    first_chunk = chunk_end - chunks_of
    chunk_ordinal = chunk - first_chunk[chunk_item]
    before = chunk_ordinal * CHUNK

    empty = torch.empty(0, dtype=torch.int64, device=device)
    checkpoint_item = checkpoint_tokens = checkpoint_row = empty
    if checkpoint_every_n_tokens and num_checkpoints:
        assert checkpoint_cu_starts is not None
        starts = checkpoint_cu_starts.to(torch.int64)
        row = torch.arange(num_checkpoints, device=device)
        owner = (torch.searchsorted(starts, row, right=True) - 1).clamp(0, num_sequences - 1)
        position = (row - starts[owner] + 1) * checkpoint_every_n_tokens
        # a row that no sequence earns gets 0 tokens of its item: it is skipped
        earned = (position >= 1) & (position <= seq_len[owner]) & (row < starts[-1])
        checkpoint_item = torch.where(earned, first_item[owner] + (position - 1) // length, first_item[owner])
        checkpoint_tokens = torch.where(earned, position - (position - 1) // length * length, 0)
        checkpoint_row = torch.where(earned, row, num_checkpoints)
        key, order = (checkpoint_item * (length + 1) + checkpoint_tokens).sort(stable=True)
        checkpoint_item, checkpoint_tokens = key // (length + 1), key % (length + 1)
        checkpoint_row = checkpoint_row[order]

    return WorkTable(
        num_items=num_items,
        num_chunks=num_chunks,
        max_chunks=-(-min(length, num_tokens) // CHUNK),
        num_maps=num_items,
        num_checkpoints=num_checkpoints,
        token_start=token_start,
        num_tokens=item_tokens,
        item_row=item,
        entering_row=torch.where(ordinal == 0, -1, item),
        final_row=torch.where(is_last, sequence, num_sequences),
        first_chunk=first_chunk,
        chunk_item=chunk_item,
        chunk_ordinal=chunk_ordinal,
        chunk_token=token_start[chunk_item] + before,
        chunk_rows=(item_tokens[chunk_item] - before).clamp(0, CHUNK),
        opens=real & ~is_last & (ordinal == 0),
        map_item=item,
        map_row=torch.where(real & ~is_last, item, num_items),
        map_is_first=ordinal == 0,
        checkpoint_item=checkpoint_item,
        checkpoint_tokens=checkpoint_tokens,
        checkpoint_row=checkpoint_row,
        checkpoint_start=torch.searchsorted(checkpoint_item, torch.arange(num_items + 1, device=device)),
        host=None,
    )
