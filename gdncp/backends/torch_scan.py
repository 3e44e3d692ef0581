"""The order in which the torch set walks chunks: many states side by side, one chunk of each per step."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gdncp.backends.base import CHUNK
from gdncp.backends.torch_tiles import Tiles
from gdncp.work import WorkTable


@dataclass(frozen=True, eq=False)
class Walk:
    """B states, each of one item and head, that walk `length` chunks from the chunk at pair `first` on.

    At step s the states of leading rows [:bounds[s]] take their s-th chunk; behind them none is left that would.
    """

    source: torch.Tensor | None  # [B] row of each state before they were put in order; None: they lie as they lay
    first: torch.Tensor  # [B] pair of its first chunk; its s-th chunk is the pair first + s · H
    length: torch.Tensor  # [B]
    bounds: list[int]  # per step
    exact: bool  # whether all of the leading rows still walk; else `active` says which

    def active(self, step: int) -> torch.Tensor | None:
        """[bounds[step]] bool, None for all: rows that take a chunk in this step."""
        return None if self.exact else step < self.length[: self.bounds[step]]

    def arrange(self, states: torch.Tensor) -> torch.Tensor:
        """States as they lay [B, ..] -> in the order of the walk."""
        return states if self.source is None else states[self.source]

    def restore(self, states: torch.Tensor) -> torch.Tensor:
        """The inverse of `arrange`."""
        if self.source is None:
            return states
        restored = torch.empty_like(states)
        restored[self.source] = states
        return restored


def item_chunks(table: WorkTable) -> tuple[torch.Tensor, torch.Tensor]:
    """First flat chunk and number of chunks of each item."""
    num_chunks = (table.num_tokens + CHUNK - 1) // CHUNK
    return num_chunks.cumsum(0) - num_chunks, num_chunks


def compact_walk(first: torch.Tensor, length: torch.Tensor) -> Walk:
    """Longest first, so that no step does work that is masked away.  Reads `length`: for the CPU."""
    source = torch.argsort(length, descending=True, stable=True)
    first, length = first[source], length[source]
    counts = torch.bincount(length)  # how many walk exactly n chunks
    bounds = counts.flip(0).cumsum(0).flip(0)[1:].tolist()
    return Walk(source, first, length, bounds, exact=True)


def masked_walk(
    first: torch.Tensor, length: torch.Tensor, chunks_of_items: list[int] | None, max_chunks: int, exact: bool
) -> Walk:
    """In the order given, without reading the device: rows beyond their length are masked.

    chunks_of_items: the items' chunks, falling, where the host knows them: it bounds each step.
    exact: every state walks all chunks of its item.
    """
    num_rows = first.shape[0]
    if chunks_of_items is None:
        bounds, exact = [num_rows] * max_chunks, False
    else:
        per_item = num_rows // max(len(chunks_of_items), 1)
        bounds = [per_item * sum(n > step for n in chunks_of_items) for step in range(max_chunks)]
    return Walk(None, first, length, bounds, exact)


def pair_chunks(walk: Walk, step: int, num_heads: int, num_pairs: int) -> torch.Tensor:
    """[bounds[step]] pairs that are read in this step; a masked row reads one that exists, and is not asked for it."""
    pairs = walk.first[: walk.bounds[step]] + step * num_heads
    return pairs if walk.exact else pairs.clamp(max=num_pairs - 1)


def keep_active(active: torch.Tensor | None, new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    return new if active is None else torch.where(active[:, None, None], new, old)


def corrections(state: torch.Tensor, tiles: Tiles, pairs: torch.Tensor, with_values: bool = True) -> torch.Tensor:
    """U = U0 − W Sᵀ [n, 64, V] of a chunk each, from its entry state [n, V, K]; U0 = 0 for the transition."""
    product = torch.bmm(tiles.w[pairs], state.mT)
    return tiles.u0[pairs] - product if with_values else -product


def state_after(
    state: torch.Tensor, u: torch.Tensor, tiles: Tiles, pairs: torch.Tensor, last: torch.Tensor | int
) -> torch.Tensor:
    """The state after tokens 0 ... `last` of the chunk: gamma S + sum over i of decay(last, i) u_i k_iᵀ."""
    keys = tiles.k[pairs] * tiles.decay[pairs, last][:, :, None]
    return state * tiles.gamma[pairs, last][:, None, None] + torch.bmm(u.mT, keys)
