"""Our kernels for Hopper GPUs (compute capability 9.0), in Gluon: bf16 tokens, head dims of 128."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from gdncp.backends.base import AffineMaps, Fold, Precision, Sinks, TokenInputs
from gdncp.backends.triton_version import triton_rejection_reason
from gdncp.work import WorkTable

if TYPE_CHECKING:
    from gdncp_kernels.hopper.precompute_t import Tiles

MIN_TRITON = (3, 6)
TMA_ALIGNMENT = 16  # bytes


class HopperBackend:
    """`Backend` in Gluon.  Kernels are imported on first use, so that this module imports without triton.

    Triton launches on the current device, which need not be the tensors': hence `device_of`.
    """

    name = "hopper"
    exact_rows = True

    def rejection_reason(
        self, *, device: torch.device, dtype: torch.dtype, k_dim: int, v_dim: int, precision: Precision
    ) -> str | None:
        """Why this backend cannot run such a call, as a sentence; None if it can."""
        if (reason := triton_rejection_reason(MIN_TRITON, "triton.experimental.gluon")) is not None:
            return reason
        if precision != "fast":
            return f"precision is {precision!r}; only 'fast' is supported."
        if dtype != torch.bfloat16:
            return f"inputs are {dtype}; only bfloat16 is supported."
        if (k_dim, v_dim) != (128, 128):
            return f"head dims are K = {k_dim} and V = {v_dim}; only 128 is supported."
        if device.type != "cuda" or torch.version.hip:
            return f"the device is {device}; an NVIDIA Hopper GPU is needed."
        capability = torch.cuda.get_device_capability(device)
        if capability != (9, 0):
            return f"the GPU has compute capability {capability[0]}.{capability[1]}; only 9.0 (Hopper) is supported."
        return None

    def precompute_t(self, inputs: TokenInputs, table: WorkTable) -> Tiles:
        from gdncp_kernels.hopper.precompute_t import precompute_t

        with torch.cuda.device_of(inputs.k):
            return precompute_t(_aligned(inputs), table)

    def precompute_mn(
        self,
        inputs: TokenInputs,
        tiles: Tiles,
        table: WorkTable,
        entry_states: torch.Tensor,
        maps: AffineMaps,
        forget_below: float,
    ) -> None:
        from gdncp_kernels.hopper.recurrence import precompute_mn

        with torch.cuda.device_of(inputs.k):
            precompute_mn(_aligned(inputs), tiles, table, entry_states, maps, forget_below)

    def precompute_mn_and_open(
        self,
        inputs: TokenInputs,
        tiles: Tiles,
        table: WorkTable,
        entry_states: torch.Tensor,
        maps: AffineMaps,
        forget_below: float,
        sinks: Sinks,
    ) -> None:
        from gdncp_kernels.hopper.recurrence import precompute_mn

        with torch.cuda.device_of(inputs.k), _aligned_output(sinks) as sinks:
            precompute_mn(_aligned(inputs), tiles, table, entry_states, maps, forget_below, sinks)

    @property
    def fold(self) -> Fold:
        from gdncp_kernels.hopper.state_fixup import StateFold

        return StateFold()

    def cp_prefill(
        self, inputs: TokenInputs, tiles: Tiles, table: WorkTable, entry_states: torch.Tensor, sinks: Sinks
    ) -> None:
        self._cp_prefill(inputs, tiles, table, entry_states, sinks, opened=False)

    def cp_prefill_after_opening(
        self, inputs: TokenInputs, tiles: Tiles, table: WorkTable, entry_states: torch.Tensor, sinks: Sinks
    ) -> None:
        self._cp_prefill(inputs, tiles, table, entry_states, sinks, opened=True)

    def _cp_prefill(
        self,
        inputs: TokenInputs,
        tiles: Tiles,
        table: WorkTable,
        entry_states: torch.Tensor,
        sinks: Sinks,
        opened: bool,
    ) -> None:
        from gdncp_kernels.hopper.recurrence import cp_prefill

        if inputs.k.shape[0] == 0:  # only empty sequences
            sinks.final_states[table.final_row] = entry_states[table.item_row]
            return
        with torch.cuda.device_of(inputs.k), _aligned_output(sinks) as sinks:
            cp_prefill(_aligned(inputs), tiles, table, entry_states, sinks, opened)


def _aligned(inputs: TokenInputs) -> TokenInputs:
    """The copy engine reads from multiples of 16 bytes only: allocations start at one, views into them may not."""
    q, k, v = (_aligned_tensor(x) for x in (inputs.q, inputs.k, inputs.v))
    return inputs if q is inputs.q and k is inputs.k and v is inputs.v else replace(inputs, q=q, k=k, v=v)


@contextmanager
def _aligned_output(sinks: Sinks) -> Iterator[Sinks]:
    output = _aligned_tensor(sinks.output)
    yield sinks if output is sinks.output else replace(sinks, output=output)
    if output is not sinks.output:
        sinks.output.copy_(output)


def _aligned_tensor(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy of it where x does not start at a multiple of 16 bytes."""
    return x if x.data_ptr() % TMA_ALIGNMENT == 0 else x.clone(memory_format=torch.contiguous_format)
