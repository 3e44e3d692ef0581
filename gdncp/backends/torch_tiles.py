"""Stage 1 of the torch set: what a 64-token chunk does, before its entry state is known.

Everything is laid out by pair: pair p = chunk · H + state head.  With the names of DESIGN section 3,

    A_ij = beta_i decay_ij k_i·k_j  (j < i)      T = (I + A)⁻¹      W = T diag(beta gamma) K      U0 = T diag(beta) V
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from gdncp.backends.base import CHUNK, TokenInputs
from gdncp.backends.torch_inverse import unit_lower_inverse
from gdncp.work import WorkTable

RESET_BELOW = -87.0  # a log gate below this leaves nothing that fp32 holds: the state starts anew
L2_NORM_EPS = 1e-6


@dataclass(frozen=True, eq=False)
class Tiles:
    """Stage 1's results; P = chunks · H pairs, fp32 where not said otherwise."""

    rows: torch.Tensor  # [chunks, 64] int64 row in the token tensors, always inside them
    valid: torch.Tensor  # [chunks, 64] bool: the item has this token
    k: torch.Tensor  # [P, 64, K] normalised where asked, zero where not valid
    w: torch.Tensor  # [P, 64, K]
    u0: torch.Tensor  # [P, 64, V]
    decay: torch.Tensor  # [P, 64, 64] product of alpha over (j, i]; 0 for j > i and across a reset
    gamma: torch.Tensor  # [P, 64] product of alpha from the chunk's start through i
    log_alpha: torch.Tensor  # [P, 64] float64, resets as given
    beta: torch.Tensor  # [P, 64], zero where not valid


def build_tiles(inputs: TokenInputs, table: WorkTable) -> Tiles:
    num_heads, device = inputs.num_state_heads, inputs.q.device
    k_dim, v_dim = inputs.k.shape[2], inputs.v.shape[2]
    rows, valid = _token_rows(table, inputs.q.shape[0])
    num_pairs = rows.shape[0] * num_heads

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(num_pairs, *shape, dtype=dtype, device=device)

    tiles = Tiles(
        rows=rows,
        valid=valid,
        k=new(CHUNK, k_dim),
        w=new(CHUNK, k_dim),
        u0=new(CHUNK, v_dim),
        decay=new(CHUNK, CHUNK),
        gamma=new(CHUNK),
        log_alpha=new(CHUNK, dtype=torch.float64),
        beta=new(CHUNK),
    )
    for block in pair_blocks(num_pairs, device):
        _fill(tiles, inputs, block)
    return tiles


def pair_blocks(num_pairs: int, device: torch.device) -> Iterator[slice]:
    """All pairs in blocks, so that temporaries stay in cache (CPU) or small beside the results (elsewhere)."""
    size = 128 if device.type == "cpu" else 8192
    return (slice(start, min(start + size, num_pairs)) for start in range(0, num_pairs, size))


def load(x: torch.Tensor, tiles: Tiles, pairs: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Tokens of x [T, heads, D] that the pairs see -> [pairs, 64, D] fp32.

    Rows that are not the item's may hold anything, NaN too: they are replaced, never multiplied away.
    """
    heads, dim = x.shape[1:]
    per_row = x.stride(0) // dim  # more than `heads` where these are some of a tensor's
    chunk, head = pairs // num_heads, pairs % num_heads * heads // num_heads
    index = tiles.rows[chunk] * per_row + head[:, None]
    flat = x.as_strided((max((x.shape[0] - 1) * per_row + heads, 0), dim), (dim, 1))
    tokens = flat.index_select(0, index.flatten()).view(*index.shape, -1)
    return torch.where(tiles.valid[chunk][:, :, None], tokens.float(), 0.0)


def load_key_or_query(x: torch.Tensor, inputs: TokenInputs, tiles: Tiles, pairs: torch.Tensor) -> torch.Tensor:
    x = load(x, tiles, pairs, inputs.num_state_heads)
    if inputs.use_qk_l2norm:
        x = x * torch.rsqrt(tree_sum(x.square())[..., None] + L2_NORM_EPS)
    return x


def tree_sum(x: torch.Tensor) -> torch.Tensor:
    """Sum over the last dim in an order that depends on nothing but its length: additions of halves, one by one."""
    while (n := x.shape[-1]) > 1:
        half = x[..., : n // 2] + x[..., n // 2 : n // 2 * 2]
        if n % 2:
            half[..., :1] += x[..., -1:]
        x = half
    return x[..., 0]


def _token_rows(table: WorkTable, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and validity of each of a chunk's 64 tokens; no chunk at all where there is no token to read."""
    chunks = slice(0, table.num_chunks if num_tokens else 0)
    item, ordinal = table.chunk_item[chunks], table.chunk_ordinal[chunks]
    in_item = ordinal[:, None] * CHUNK + torch.arange(CHUNK, device=item.device)
    valid = in_item < table.num_tokens[item][:, None]
    return (table.token_start[item][:, None] + in_item).clamp(max=max(num_tokens - 1, 0)), valid


def _fill(tiles: Tiles, inputs: TokenInputs, block: slice) -> None:
    pairs = torch.arange(block.start, block.stop, device=tiles.k.device)
    k = load_key_or_query(inputs.k, inputs, tiles, pairs)
    v = load(inputs.v, tiles, pairs, inputs.num_state_heads)
    log_alpha, beta = _gates(inputs, tiles, pairs)
    decay, gamma = _decays(log_alpha)

    a = beta[:, :, None] * decay * torch.bmm(k, k.mT)
    t = unit_lower_inverse(a)
    tiles.k[block], tiles.decay[block], tiles.gamma[block] = k, decay, gamma
    tiles.w[block] = torch.bmm(t, (beta * gamma)[:, :, None] * k)
    tiles.u0[block] = torch.bmm(t, beta[:, :, None] * v)
    tiles.log_alpha[block], tiles.beta[block] = log_alpha, beta


def _gates(inputs: TokenInputs, tiles: Tiles, pairs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """log alpha (float64) and beta (fp32) [pairs, 64], 0 where there is no token."""
    num_heads = inputs.num_state_heads
    chunk = pairs // num_heads
    row, head, valid = tiles.rows[chunk], (pairs % num_heads)[:, None], tiles.valid[chunk]

    def take(gate: torch.Tensor | None, default: float) -> torch.Tensor:
        if gate is None:
            return torch.full(row.shape, default, dtype=torch.float32, device=row.device)
        return gate[row, head]

    if inputs.gate_space == "log":
        log_alpha = take(inputs.gate, 0.0).double()
    else:
        log_alpha = take(inputs.gate, 1.0).double().log()
    return torch.where(valid, log_alpha, 0.0), torch.where(valid, take(inputs.beta, 1.0), 0.0)


def _decays(log_alpha: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """decay [.., 64, 64] and gamma [.., 64] of `Tiles`, fp32, from float64 sums of all gates but the resets."""
    reset = log_alpha < RESET_BELOW
    resets = reset.cumsum(-1)
    total = torch.where(reset, 0.0, log_alpha).cumsum(-1)
    causal = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=total.device).tril()
    connected = causal & (resets[:, :, None] == resets[:, None, :])
    decay = torch.where(connected, (total[:, :, None] - total[:, None, :]).exp(), 0.0)
    gamma = torch.where(resets == 0, total.exp(), 0.0)
    return decay.float(), gamma.float()
