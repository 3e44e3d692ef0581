"""The portable set: the four stages in plain torch, on any device, in fp32 arithmetic whatever the input dtype.

Stage 1 is in `torch_tiles`, the order of the walk over chunks in `torch_scan`, the forgetting bound in `torch_forget`.
On the CPU the work that a mask would throw away is skipped, by looking at the data; elsewhere nothing is read back.
The arithmetic of each state is the same either way, and with any other states beside it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gdncp.backends.base import CHUNK, AffineMaps, Part, Precision, Sinks, TokenInputs
from gdncp.backends.torch_checkpoints import checkpoint_writer
from gdncp.backends.torch_forget import cut_scans, round_up
from gdncp.backends.torch_scan import (
    Walk,
    compact_walk,
    corrections,
    item_chunks,
    keep_active,
    masked_walk,
    pair_chunks,
    state_after,
)
from gdncp.backends.torch_shield import ieee_fp32
from gdncp.backends.torch_tiles import Tiles, build_tiles, load_key_or_query, tree_sum
from gdncp.work import WorkTable

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class TorchFold:
    """See `gdncp.backends.base.Fold`.  A product, then a sum; V in blocks, so that a block's bits are its own."""

    block_rows = 32

    def __call__(self, state: torch.Tensor, transition: torch.Tensor, local_state: torch.Tensor) -> torch.Tensor:
        v_dim, k_dim = state.shape[-2:]
        with ieee_fp32(state.device):
            flat = state.reshape(-1, v_dim, k_dim)
            transition = transition.reshape(-1, k_dim, k_dim)
            product = torch.empty_like(flat, memory_format=torch.contiguous_format)
            for start in range(0, v_dim, self.block_rows):
                rows = slice(start, start + self.block_rows)
                product[:, rows] = torch.bmm(flat[:, rows].contiguous(), transition)
            return product.view(state.shape) + local_state


class TorchBackend:
    """See `gdncp.backends.base.Backend`.

    never_looks: mask on the CPU too, as on other devices (for tests of that path).
    """

    name = "torch"
    exact_rows = False

    def __init__(self, never_looks: bool = False) -> None:
        self._never_looks = never_looks
        self._fold = TorchFold()

    def rejection_reason(
        self, *, device: torch.device, dtype: torch.dtype, k_dim: int, v_dim: int, precision: Precision
    ) -> str | None:
        if device.type == "meta":
            return "the torch backend needs tensors that hold values, and these are on the meta device"
        if device.type == "mps":
            return "the torch backend sums gates in float64, which the mps device does not have"
        if dtype not in DTYPES:
            return f"the torch backend takes float32, bfloat16 and float16 inputs, not {dtype}"
        if k_dim < 1 or v_dim < 1:
            return f"the torch backend needs head dims of at least 1, not {k_dim} (keys) and {v_dim} (values)"
        return None

    @property
    def fold(self) -> TorchFold:
        return self._fold

    def precompute_t(self, inputs: TokenInputs, table: WorkTable) -> Tiles:
        with ieee_fp32(inputs.q.device):
            return build_tiles(inputs, table)

    def precompute_mn(
        self,
        inputs: TokenInputs,
        tiles: Tiles,
        table: WorkTable,
        entry_states: torch.Tensor,
        maps: AffineMaps,
        forget_below: float,
    ) -> None:
        if table.num_maps == 0:
            return
        with ieee_fp32(inputs.q.device):
            num_heads = inputs.num_state_heads
            is_first = table.map_is_first[:, None].expand(-1, num_heads)
            initial = entry_states[table.item_row[table.map_item]]  # [maps, H, V, K]
            norm = tree_sum(initial.flatten(2).double().square()).sqrt()
            cut = cut_scans(inputs, tiles, table, torch.where(is_first, norm, 0.0), forget_below)

            starts_there = (is_first & (cut.start == 0))[:, :, None, None]
            local_state = torch.where(starts_there, initial, 0.0).flatten(0, 1)
            self._scan(local_state, torch.ones_like(is_first), cut.start, tiles, table, forget_below, with_values=True)

            k_dim, keep = initial.shape[3], ~(is_first | cut.forgot)
            transition = torch.eye(k_dim, dtype=torch.float32, device=initial.device)
            transition = transition.repeat(keep.numel(), 1, 1)
            everything = torch.zeros_like(cut.start)
            self._scan(transition, keep, everything, tiles, table, forget_below, with_values=False)
            transition = torch.where(keep.flatten()[:, None, None], transition, 0.0)

            row, shape = table.map_row, is_first.shape
            maps.local_state[row] = local_state.view(*shape, *local_state.shape[1:])
            maps.transition[row] = transition.view(*shape, k_dim, k_dim)
            maps.gain[row], maps.dropped_rows[row], maps.forgot[row] = (
                round_up(cut.gain),
                round_up(cut.dropped),
                cut.forgot,
            )
            tokens = table.num_tokens[table.map_item][:, None] - cut.start * CHUNK
            maps.scanned[row] = tokens.to(maps.scanned.dtype)

    def cp_prefill(
        self,
        inputs: TokenInputs,
        tiles: Tiles,
        table: WorkTable,
        entry_states: torch.Tensor,
        sinks: Sinks,
        part: Part | None = None,
    ) -> None:
        if table.num_items == 0:
            return
        with ieee_fp32(inputs.q.device):
            num_heads, num_pairs = inputs.num_state_heads, tiles.k.shape[0]
            first, length = _per_head(*item_chunks(table), num_heads)
            wanted = None if part is None else part.pairs(table)
            if wanted is not None:
                length = torch.where(wanted.flatten(), length, 0)
            walk = self._walk(first, length, table, range(table.num_items), exact=wanted is None)
            state = walk.arrange(entry_states[table.item_row].flatten(0, 1))  # [items · H, V, K]
            output = sinks.output.new_empty(num_pairs + 1, CHUNK, state.shape[1])  # the last row is a dump
            write_checkpoints = checkpoint_writer(table, sinks, walk, num_heads, self._looks(table), wanted)
            for step, bound in enumerate(walk.bounds):
                active, pairs = walk.active(step), pair_chunks(walk, step, num_heads, num_pairs)
                entry = state[:bound]
                u = corrections(entry, tiles, pairs)
                o = _outputs(inputs, tiles, pairs, entry, u).to(output.dtype)
                output[pairs if active is None else torch.where(active, pairs, num_pairs)] = o
                write_checkpoints(step, entry, u, tiles, pairs)
                state[:bound] = keep_active(active, state_after(entry, u, tiles, pairs, CHUNK - 1), entry)
            final, row = walk.restore(state).unflatten(0, (-1, num_heads)), table.final_row
            if wanted is not None:
                final = torch.where(wanted[:, :, None, None], final, sinks.final_states[row])
                wanted = wanted[table.chunk_item]
            sinks.final_states[row] = final
            _scatter_outputs(output[:-1], sinks.output, tiles, exact=table.host is not None, wanted=wanted)

    def _looks(self, table: WorkTable) -> bool:
        """Whether the host may read the table and the gates: they lie on the CPU."""
        return table.num_tokens.device.type == "cpu" and not self._never_looks

    def _walk(
        self, first: torch.Tensor, length: torch.Tensor, table: WorkTable, items: Sequence[int], exact: bool
    ) -> Walk:
        """Walk over pairs of `items` (falling in length) and heads; see `masked_walk` for `exact`."""
        if self._looks(table):
            return compact_walk(first, length)
        if table.host is None:
            return masked_walk(first, length, None, table.max_chunks, exact=False)
        chunks = [-(-table.host.num_tokens[item] // CHUNK) for item in items]
        return masked_walk(first, length, chunks, table.max_chunks, exact)

    def _scan(
        self,
        state: torch.Tensor,
        wanted: torch.Tensor,
        start: torch.Tensor,
        tiles: Tiles,
        table: WorkTable,
        forget_below: float,
        with_values: bool,
    ) -> None:
        """Move state [maps · H, R, K] in place over its map's chunks from `start` on.

        wanted, start [maps, H].  A state that is not wanted may be moved or not.
        """
        num_heads = wanted.shape[1]
        chunk_first, chunk_count = (x[table.map_item][:, None] for x in item_chunks(table))
        head = torch.arange(num_heads, device=start.device)
        first = ((chunk_first + start) * num_heads + head).flatten()
        length = torch.where(wanted, chunk_count - start, 0).flatten()
        items = table.host.map_item if table.host is not None else ()
        walk = self._walk(first, length, table, items, exact=forget_below == 0)
        moving = walk.arrange(state)
        for step, bound in enumerate(walk.bounds):
            pairs = pair_chunks(walk, step, num_heads, tiles.k.shape[0])
            entry = moving[:bound]
            u = corrections(entry, tiles, pairs, with_values)
            moving[:bound] = keep_active(walk.active(step), state_after(entry, u, tiles, pairs, CHUNK - 1), entry)
        state.copy_(walk.restore(moving))


def _per_head(first_chunk: torch.Tensor, length: torch.Tensor, num_heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """First pair and length of every item and head, [items · H]."""
    head = torch.arange(num_heads, device=first_chunk.device)
    first = first_chunk[:, None] * num_heads + head
    return first.flatten(), length[:, None].expand_as(first).flatten()


def _outputs(
    inputs: TokenInputs, tiles: Tiles, pairs: torch.Tensor, entry: torch.Tensor, u: torch.Tensor
) -> torch.Tensor:
    """o [n, 64, V] = scale (gamma q Sᵀ + (decay ∘ q kᵀ) U)."""
    q = load_key_or_query(inputs.q, inputs, tiles, pairs) * inputs.scale
    before = tiles.gamma[pairs][:, :, None] * torch.bmm(q, entry.mT)
    return before + torch.bmm(tiles.decay[pairs] * torch.bmm(q, tiles.k[pairs].mT), u)


def _scatter_outputs(
    computed: torch.Tensor, output: torch.Tensor, tiles: Tiles, exact: bool, wanted: torch.Tensor | None
) -> None:
    """Write computed [P, 64, V] to the tokens' rows of output [T, H, V], and to no other row.

    What is no token writes what some token writes, to the same place.  exact: every chunk has a token.
    wanted [chunks, H]: what is not is rewritten as it is.
    """
    num_chunks, num_heads, device = tiles.rows.shape[0], output.shape[1], output.device
    if num_chunks == 0:
        return
    count = tiles.valid.sum(1)
    chunk = torch.arange(num_chunks, device=device)
    if not exact:
        chunk = torch.where(count > 0, chunk, (count > 0).long().argmax())
    token = torch.minimum(torch.arange(CHUNK, device=device), (count[chunk] - 1).clamp(min=0)[:, None])
    rows = tiles.rows[chunk[:, None], token][:, None, :]  # [chunks, 1, 64]
    head = torch.arange(num_heads, device=device)[:, None]
    computed = computed.view(num_chunks, num_heads, CHUNK, -1)
    for start in range(0, num_chunks, 256):
        some = slice(start, start + 256)
        values = computed[chunk[some, None, None], head, token[some, None, :]]  # [.., H, 64, V]
        if not exact:  # not a single token: rewrite a row as it is
            values = torch.where((count > 0).any(), values, output[rows[some], head])
        if wanted is not None:
            values = torch.where(wanted[chunk[some], :, None, None], values, output[rows[some], head])
        output[rows[some], head] = values
