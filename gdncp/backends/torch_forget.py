"""How much of a CP chunk's scan can be left out: the forgetting bound of DESIGN section 3, in float64.

With a_t = alpha_t · max(1, |1 − beta_t ‖k_t‖²|), a state that enters at token s contributes at most
‖S‖ · a_s ⋯ a_end at the end, and token t itself brings at most |beta_t| ‖v_t‖ ‖k_t‖ into the state.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from gdncp.backends.base import TokenInputs
from gdncp.backends.torch_scan import item_chunks
from gdncp.backends.torch_tiles import Tiles, load, pair_blocks, tree_sum
from gdncp.work import WorkTable


@dataclass(frozen=True, eq=False)
class Cut:
    """Per map and head, all [maps, H]."""

    start: torch.Tensor  # int64: the scan starts at this chunk of the item; what lies before is left out
    gain: torch.Tensor  # float64
    dropped: torch.Tensor  # float64
    forgot: torch.Tensor  # bool


def cut_scans(
    inputs: TokenInputs, tiles: Tiles, table: WorkTable, initial_norm: torch.Tensor, forget_below: float
) -> Cut:
    """initial_norm [maps, H] float64: ‖initial state‖ for first CP chunks, 0 for others."""
    num_heads, device = inputs.num_state_heads, tiles.k.device
    gain, brought = _chunk_bounds(inputs, tiles, with_brought=forget_below > 0)
    chunk_first, chunk_count = (x[table.map_item] for x in item_chunks(table))
    ordinal = torch.arange(table.max_chunks, device=device)
    present = (ordinal < chunk_count[:, None])[:, :, None]  # [maps, chunks, 1]
    chunk = (chunk_first[:, None] + ordinal).clamp(max=max(tiles.rows.shape[0] - 1, 0))

    def per_chunk(x: torch.Tensor) -> torch.Tensor:  # [P] -> [maps, chunks + 1, H]; nothing past the item's end
        grid = torch.where(present, x.view(-1, num_heads)[chunk], 0.0)
        return torch.cat([grid, grid.new_zeros(grid.shape[0], 1, num_heads)], dim=1)

    # log of the product from each chunk boundary to the end; sums of zeros in front or behind change no bit
    suffix = per_chunk(gain).flip(1).cumsum(1).flip(1)
    forgot = suffix[:, 0] < (math.log(forget_below) if forget_below > 0 else -math.inf)
    start = torch.zeros_like(forgot, dtype=torch.int64)
    dropped = torch.zeros_like(suffix[:, 0])
    if forget_below > 0:
        below = present & (suffix[:, :-1] < math.log(forget_below)) & forgot[:, None]
        start = torch.where(below, ordinal[:, None], 0).amax(1)
        left_out = _product(suffix[:, 1:].exp(), per_chunk(brought)[:, :-1])
        left_out = torch.where(ordinal[:, None] < start[:, None], left_out, 0.0).cumsum(1)[:, -1]
        dropped = left_out + torch.where(start > 0, _product(suffix[:, 0].exp(), initial_norm), 0.0)
    return Cut(start, suffix[:, 0].exp(), dropped, forgot)


def round_up(x: torch.Tensor) -> torch.Tensor:
    """float64 -> the nearest fp32 that is not below it."""
    narrow = x.float()
    return torch.where(narrow.double() < x, torch.nextafter(narrow, torch.full_like(narrow, math.inf)), narrow)


def _chunk_bounds(inputs: TokenInputs, tiles: Tiles, with_brought: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Per pair [P] float64: log of the product of a_t over the chunk; bound on what its tokens leave at its end."""
    num_pairs, device = tiles.k.shape[0], tiles.k.device
    gain = torch.empty(num_pairs, dtype=torch.float64, device=device)
    brought = torch.zeros(num_pairs, dtype=torch.float64, device=device)
    for block in pair_blocks(num_pairs, device):
        beta = tiles.beta[block].double()
        square = tree_sum(tiles.k[block].double().square())
        log_a = tiles.log_alpha[block] + (1 - beta * square).abs().clamp(min=1).log()
        gain[block] = tree_sum(log_a)
        if with_brought:
            pairs = torch.arange(block.start, block.stop, device=device)
            values = tree_sum(load(inputs.v, tiles, pairs, inputs.num_state_heads).double().square()).sqrt()
            after = log_a.flip(1).cumsum(1).flip(1)  # from a token on
            after = torch.cat([after[:, 1:], torch.zeros_like(after[:, :1])], dim=1)  # from the next one on
            brought[block] = tree_sum(_product(after.exp(), beta.abs() * values * square.sqrt()))
    return gain, brought


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a · b where 0 · inf is 0: nothing grows to nothing."""
    return torch.where((a == 0) | (b == 0), 0.0, a * b)
