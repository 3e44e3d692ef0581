"""Our kernels for Hopper GPUs (compute capability 9.0), in Gluon: bf16 and fp16 tokens, head dims of 64 and 128."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from gdncp import states
from gdncp.backends.base import AffineMaps, Fold, Part, Precision, Sinks, TokenInputs
from gdncp.backends.triton_version import triton_rejection_reason
from gdncp.work import WorkTable

if TYPE_CHECKING:
    from gdncp.collectives import FixupStats
    from gdncp.stages import Call
    from gdncp_kernels.hopper.tiles import Tiles

MIN_TRITON = (3, 6)
HEAD_DIMS = (64, 128)
TMA_ALIGNMENT = 16  # bytes


class HopperBackend:
    """`Backend` in Gluon.  Kernels are imported on first use, so that this module imports without triton.

    Triton launches on the current device, which need not be the tensors': hence `_device_of`.
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
        if dtype not in (torch.bfloat16, torch.float16):
            return f"inputs are {dtype}; only bfloat16 and float16 are supported."
        if k_dim != v_dim or k_dim not in HEAD_DIMS:
            return f"head dims are K = {k_dim} and V = {v_dim}; only K = V = 64 and K = V = 128 are supported."
        if device.type != "cuda" or torch.version.hip:
            return f"the device is {device}; an NVIDIA Hopper GPU is needed."
        capability = torch.cuda.get_device_capability(device)
        if capability != (9, 0):
            return f"the GPU has compute capability {capability[0]}.{capability[1]}; only 9.0 (Hopper) is supported."
        return None

    @cached_property
    def _kernels(self) -> SimpleNamespace:
        """Imported once: an import statement costs the host a microsecond each time."""
        from gdncp_kernels.hopper.precompute_t import precompute_t
        from gdncp_kernels.hopper.recurrence_launches import cp_prefill, precompute_mn
        from gdncp_kernels.hopper.state_fixup import StateFold
        from gdncp_kernels.hopper.states import load_states, store_states
        from gdncp_kernels.hopper.whole import Whole, is_whole

        return SimpleNamespace(
            precompute_t=precompute_t,
            precompute_mn=precompute_mn,
            cp_prefill=cp_prefill,
            fold=StateFold(),
            load_states=load_states,
            store_states=store_states,
            Whole=Whole,
            is_whole=is_whole,
        )

    def precompute_t(self, inputs: TokenInputs, table: WorkTable) -> Tiles:
        with _device_of(inputs.k):
            tiles: Tiles = self._kernels.precompute_t(_aligned(inputs), table)
            return tiles

    def precompute_mn(
        self,
        inputs: TokenInputs,
        tiles: Tiles,
        table: WorkTable,
        entry_states: torch.Tensor,
        maps: AffineMaps,
        forget_below: float,
    ) -> None:
        with _device_of(inputs.k):
            self._kernels.precompute_mn(tiles, table, entry_states, maps, forget_below)

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
        with _device_of(inputs.k):
            self._kernels.precompute_mn(tiles, table, entry_states, maps, forget_below, sinks)

    def load_states(
        self, source: torch.Tensor | None, rows: torch.Tensor | None, out: torch.Tensor, out_rows: torch.Tensor
    ) -> None:
        if source is None or source.element_size() == 1:  # Triton and torch round to fp8 differently
            states.load_states(source, rows, out, out_rows)
            return
        with _device_of(out):
            self._kernels.load_states(source, rows, out, out_rows)

    def store_states(self, final: torch.Tensor, destination: torch.Tensor, rows: torch.Tensor | None) -> None:
        if destination.element_size() == 1:
            states.store_states(final, destination, rows)
            return
        with _device_of(destination):
            self._kernels.store_states(final, destination, rows)

    @property
    def fold(self) -> Fold:
        fold: Fold = self._kernels.fold
        return fold

    def cp_prefill(
        self,
        inputs: TokenInputs,
        tiles: Tiles,
        table: WorkTable,
        entry_states: torch.Tensor,
        sinks: Sinks,
        part: Part | None = None,
    ) -> None:
        self._cp_prefill(inputs, tiles, table, entry_states, sinks, part, opened=False)

    def cp_prefill_after_opening(
        self,
        inputs: TokenInputs,
        tiles: Tiles,
        table: WorkTable,
        entry_states: torch.Tensor,
        sinks: Sinks,
        part: Part | None = None,
    ) -> None:
        self._cp_prefill(inputs, tiles, table, entry_states, sinks, part, opened=True)

    def _cp_prefill(
        self,
        inputs: TokenInputs,
        tiles: Tiles,
        table: WorkTable,
        entry_states: torch.Tensor,
        sinks: Sinks,
        part: Part | None,
        opened: bool,
    ) -> None:
        if inputs.k.shape[0] == 0:  # only empty sequences
            sinks.final_states[table.final_row] = entry_states[table.item_row]
            return
        with _device_of(inputs.k):
            self._kernels.cp_prefill(tiles, table, entry_states, sinks, opened, part)

    def run_whole(self, call: Call) -> FixupStats | None:
        prepared = call.layout.prepared
        with _device_of(call.output):
            whole = prepared.get(call.kind, _UNKNOWN)
            if whole is _UNKNOWN:
                if len(prepared) >= _MOST_KINDS:
                    prepared.clear()
                whole = prepared[call.kind] = self._kernels.Whole(call) if self._kernels.is_whole(call) else None
            return None if whole is None else whole(call)


_NOTHING = nullcontext()
_UNKNOWN: Any = object()
_MOST_KINDS = 64  # of calls over one layout whose launches are kept


def _device_of(x: torch.Tensor) -> AbstractContextManager[Any]:
    """Where Triton launches; entered only where it is another than the current one."""
    device = x.get_device()
    return _NOTHING if device < 0 or device == torch.cuda.current_device() else torch.cuda.device(device)


def _aligned(inputs: TokenInputs) -> TokenInputs:
    """The copy engine reads from multiples of 16 bytes only: allocations start at one, views into them may not."""
    if (inputs.q.data_ptr() | inputs.k.data_ptr() | inputs.v.data_ptr()) % TMA_ALIGNMENT == 0:
        return inputs
    q, k, v = (x if x.data_ptr() % TMA_ALIGNMENT == 0 else x.clone() for x in (inputs.q, inputs.k, inputs.v))
    return replace(inputs, q=q, k=k, v=v)
