"""State checkpoints of the torch set: after any token of an item, from the entry state of the chunk that holds it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import torch

from gdncp.backends.base import CHUNK, Sinks
from gdncp.backends.torch_scan import Walk, state_after
from gdncp.backends.torch_tiles import Tiles
from gdncp.work import WorkTable

# called at each step of the walk with (step, entry states, U, tiles, pairs)
Writer = Callable[[int, torch.Tensor, torch.Tensor, Tiles, torch.Tensor], None]
# step -> item, last token within the chunk, and row of each checkpoint to write
Finder = Callable[[int], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


def checkpoint_writer(
    table: WorkTable, sinks: Sinks, walk: Walk, num_heads: int, looks: bool, wanted: torch.Tensor | None
) -> Writer:
    """looks: the table lies on the CPU and may be read there.  wanted [items, H]: what is written; None: all."""
    sink = sinks.checkpoints
    if sink is None or table.num_checkpoints == 0:
        return lambda step, entry, u, tiles, pairs: None
    find = _find_listed(table, looks) if looks or table.host is not None else _find_any(table, sink.shape[0] - 1)
    heads = torch.arange(num_heads, device=sink.device)
    place = None if walk.source is None else torch.argsort(walk.source)  # where the walk put each item and head

    def write(step: int, entry: torch.Tensor, u: torch.Tensor, tiles: Tiles, pairs: torch.Tensor) -> None:
        item, last, row = find(step)
        if item.shape[0] == 0:
            return
        at = (item[:, None] * num_heads + heads).flatten()
        at = at if place is None else place[at]
        if wanted is not None:  # the others may not walk this far
            at = at.clamp(max=entry.shape[0] - 1)
        last = last[:, None].expand(-1, num_heads).flatten()
        state = state_after(entry[at], u[at], tiles, pairs[at], last).unflatten(0, (-1, num_heads))
        sink[row] = state if wanted is None else torch.where(wanted[item][:, :, None, None], state, sink[row])

    return write


def _find_listed(table: WorkTable, looks: bool) -> Finder:
    """Any number of checkpoints per chunk, from counts that the host knows."""
    if looks:
        tokens = table.checkpoint_tokens.tolist()
    else:
        assert table.host is not None
        tokens = list(table.host.checkpoint_tokens)
    chunk = torch.div(table.checkpoint_tokens - 1, CHUNK, rounding_mode="floor")
    order = torch.argsort(chunk, stable=True)
    counts = [0] * (table.max_chunks + 1)  # chunk -1: a row that no sequence earned, never written
    for n in tokens:
        counts[(n - 1) // CHUNK + 1] += 1
    ends = list(accumulate(counts))

    def find(step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        some = order[ends[step] : ends[step + 1]]
        return table.checkpoint_item[some], (table.checkpoint_tokens[some] - 1) % CHUNK, table.checkpoint_row[some]

    return find


def _find_any(table: WorkTable, dump_row: int) -> Finder:
    """At most one checkpoint per chunk, looked up on the device for every item; those without one write to the dump."""
    chunk = torch.div(table.checkpoint_tokens - 1, CHUNK, rounding_mode="floor")
    stride = table.max_chunks + 1
    key = table.checkpoint_item * stride + chunk + 1  # rises: the table is sorted by item and tokens
    item = torch.arange(table.num_items, device=key.device)

    def find(step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        wanted = item * stride + step + 1
        found = torch.searchsorted(key, wanted).clamp(max=key.shape[0] - 1)
        hit = key[found] == wanted
        last = torch.where(hit, (table.checkpoint_tokens[found] - 1) % CHUNK, CHUNK - 1)
        return item, last, torch.where(hit, table.checkpoint_row[found], dump_row)

    return find
