"""States in and out: from the caller's tensors or pool slots to fp32 rows, and back with one rounding."""

from __future__ import annotations

import torch

STATE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)


def _movable(states: torch.Tensor) -> torch.Tensor:
    """A view that index operations accept: fp8 has none of its own, so its bytes move."""
    return states.view(torch.uint8) if states.element_size() == 1 else states


def load_states(
    source: torch.Tensor | None, rows: torch.Tensor | None, out: torch.Tensor, out_rows: torch.Tensor
) -> None:
    """out[out_rows[i]] = source[rows[i]] in fp32; zeros where `source` is None or the row is out of its range.

    source [P, H, V, K] in any state dtype and strides; rows [n] int, None: all P in order; out_rows [n] int64; out
    [.., H, V, K] fp32.
    """
    if out_rows.numel() == 0:
        return
    if source is None or source.shape[0] == 0:
        out.index_fill_(0, out_rows, 0.0)
        return
    if rows is None:
        out.index_copy_(0, out_rows, source.to(torch.float32))
        return
    rows = rows.to(torch.int64)
    inside = (rows >= 0) & (rows < source.shape[0])
    picked = _movable(source).index_select(0, rows.clamp(0, source.shape[0] - 1))
    states = picked.view(source.dtype).to(torch.float32)
    out.index_copy_(0, out_rows, torch.where(inside[:, None, None, None], states, 0.0))


def store_states(states: torch.Tensor, destination: torch.Tensor, rows: torch.Tensor | None) -> None:
    """destination[rows[i]] = states[i], rounded once to its dtype; rows out of range are skipped, no other is touched.

    states [n, H, V, K] fp32; destination [P, H, V, K] in any state dtype and strides; rows [n] int, None: all
    P in order.
    """
    if rows is None:
        destination.copy_(states)
        return
    num_slots = destination.shape[0]
    if rows.numel() == 0 or num_slots == 0:
        return
    rows = rows.to(torch.int64)
    target, narrow = _movable(destination), _movable(states.to(destination.dtype))
    inside = (rows >= 0) & (rows < num_slots)
    # Nothing is read back to see which rows to leave out: they repeat the first valid one, same row, same value.
    # With none valid all rewrite what slot 0 holds.
    anchor = inside.to(torch.int8).argmax().view(1)
    anchor_row = rows.index_select(0, anchor).clamp(0, num_slots - 1)
    anchor_value = torch.where(inside.any(), narrow.index_select(0, anchor), target.index_select(0, anchor_row))
    target.index_copy_(
        0,
        torch.where(inside, rows, anchor_row),
        torch.where(inside[:, None, None, None], narrow, anchor_value),
    )
