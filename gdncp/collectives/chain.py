"""Fixup by a chain: the state alone travels, from rank to rank along each sequence, in blocks of V rows.

Each rank folds a block through its own CP chunks and hands it on; block b + 1 is folded while block b is under way to
the next rank.  Volume: one state per hop.  Time: hops + blocks − 1 rounds.
"""

from __future__ import annotations

import torch

from gdncp.backends.base import AffineMaps, Fold
from gdncp.collectives.folding import Run, fold_inside, fold_runs, own_steps
from gdncp.collectives.schedule import Link, chain_rounds, links_to_fill
from gdncp.collectives.wire import Wire
from gdncp.plan import PrefillPlan

# A block is at least this large: below, a message costs its latency and splitting only adds rounds.
MIN_BLOCK_BYTES = 1 << 20


def row_blocks(v_dim: int, bytes_per_row: int, block_rows: int, min_block_bytes: int) -> list[slice]:
    """V rows cut at multiples of the fold's `block_rows`, so that blocks have the bits of the whole."""
    rows = block_rows * max(1, -(-min_block_bytes // (bytes_per_row * block_rows)))
    return [slice(start, min(start + rows, v_dim)) for start in range(0, v_dim, rows)]


def run(wire: Wire, plan: PrefillPlan, rank: int, maps: AffineMaps, entry_states: torch.Tensor, fold: Fold) -> None:
    _, num_heads, v_dim, k_dim = entry_states.shape
    blocks = row_blocks(v_dim, num_heads * k_dim * 4, fold.block_rows, MIN_BLOCK_BYTES)

    def new_block(block: int) -> torch.Tensor:
        return entry_states.new_empty(num_heads, blocks[block].stop - blocks[block].start, k_dim)

    wire.open_point_to_point()
    to_fill = links_to_fill(plan, rank)
    arrived: dict[tuple[Link, int], torch.Tensor] = {}
    for folds, receives in chain_rounds(plan, rank, len(blocks)):
        sends, runs = [], []
        for link, block in folds:
            exit_state = new_block(block)
            assert link.next_rank is not None
            sends.append((link.next_rank, exit_state))
            entry_state = None if link.starts else arrived.pop((link, block))
            steps = own_steps(link, maps, entry_states, blocks[block], exit_state, fill=link in to_fill)
            runs.append(Run(entry_state, steps))
        fold_runs(runs, fold)

        landing = []
        for link, block in receives:
            arrived[link, block] = new_block(block)
            assert link.previous_rank is not None
            landing.append((link.previous_rank, arrived[link, block]))
        wire.exchange(sends, landing).wait()
        for link, block in receives:
            entry_states[link.item][:, blocks[block]].copy_(arrived[link, block])
    # links that hand nothing on were in no round; they now have their entry states
    fold_inside((link for link in to_fill if link.next_rank is None), maps, entry_states, fold)
    wire.finish()
