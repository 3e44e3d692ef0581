"""Our plain Triton kernels: any NVIDIA GPU from sm_80, or Triton's interpreter on the CPU (TRITON_INTERPRET=1)."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from gdncp.backends.base import AffineMaps, Fold, Part, Precision, Sinks, TokenInputs
from gdncp.backends.triton_version import MIN_TRITON, triton_rejection_reason
from gdncp.work import WorkTable

if TYPE_CHECKING:
    from gdncp_kernels.precompute_t import Tiles

HEAD_DIMS = (16, 32, 64, 128, 256)
MIN_CAPABILITY = (8, 0)


class TritonBackend:
    """`Backend` in Triton.  Kernels are imported on first use, so that this module imports without triton.

    Triton launches on the current device, which need not be the tensors': hence `device_of`.
    """

    name = "triton"
    exact_rows = True

    def rejection_reason(
        self, *, device: torch.device, dtype: torch.dtype, k_dim: int, v_dim: int, precision: Precision
    ) -> str | None:
        """Why this backend cannot run such a call, as a sentence; None if it can."""
        if (reason := triton_rejection_reason(MIN_TRITON)) is not None:
            return reason
        if dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"inputs are {dtype}; float32, bfloat16 and float16 are supported."
        for name, dim in (("K", k_dim), ("V", v_dim)):
            if dim not in HEAD_DIMS:
                return f"head dim {name} is {dim}; allowed are {', '.join(map(str, HEAD_DIMS))}."
        if _is_interpreted():
            return None
        if device.type != "cuda" or torch.version.hip:
            return f"the device is {device}; an NVIDIA GPU is needed, or TRITON_INTERPRET=1 for the interpreter."
        capability = torch.cuda.get_device_capability(device)
        if capability < MIN_CAPABILITY:
            return (
                f"the GPU has compute capability {_dotted(capability)}; {_dotted(MIN_CAPABILITY)} or newer is needed."
            )
        return None

    def precompute_t(self, inputs: TokenInputs, table: WorkTable) -> Tiles:
        from gdncp_kernels.precompute_t import precompute_t

        with torch.cuda.device_of(inputs.k):
            return precompute_t(_interpretable(inputs), table, _dot_precision(inputs))

    def precompute_mn(
        self,
        inputs: TokenInputs,
        tiles: Tiles,
        table: WorkTable,
        entry_states: torch.Tensor,
        maps: AffineMaps,
        forget_below: float,
    ) -> None:
        from gdncp_kernels.precompute_mn import precompute_mn

        precision = _dot_precision(inputs)
        with torch.cuda.device_of(inputs.k):
            precompute_mn(_interpretable(inputs), tiles, table, entry_states, maps, forget_below, precision)

    @property
    def fold(self) -> Fold:
        from gdncp_kernels.state_fixup import StateFold

        return StateFold()

    def cp_prefill(
        self,
        inputs: TokenInputs,
        tiles: Tiles,
        table: WorkTable,
        entry_states: torch.Tensor,
        sinks: Sinks,
        part: Part | None = None,
    ) -> None:
        from gdncp_kernels.cp_prefill import cp_prefill

        precision = _dot_precision(inputs)
        with torch.cuda.device_of(inputs.k):
            if _is_interpreted() and sinks.output.dtype == torch.bfloat16:
                wide = replace(sinks, output=sinks.output.float())
                cp_prefill(_interpretable(inputs), tiles, table, entry_states, wide, precision, part)
                sinks.output.copy_(wide.output)
            else:
                cp_prefill(inputs, tiles, table, entry_states, sinks, precision, part)


def _dot_precision(inputs: TokenInputs) -> str:
    """tf32 keeps 5e-3 for narrow inputs; float32's 2e-5 over any length needs sums that do not truncate."""
    return "tf32" if inputs.precision == "fast" and inputs.q.dtype != torch.float32 else "ieee"


def _interpretable(inputs: TokenInputs) -> TokenInputs:
    """The interpreter multiplies and rounds bfloat16 wrongly: there, and only there, compute on float32 copies."""
    if not _is_interpreted() or inputs.q.dtype != torch.bfloat16:
        return inputs
    return replace(inputs, q=inputs.q.float(), k=inputs.k.float(), v=inputs.v.float())


def _is_interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
