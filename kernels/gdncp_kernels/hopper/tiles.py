"""What stage 1 leaves for stages 2 and 4."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from gdncp.scratch import Scratch, ScratchLayout
from gdncp_kernels.hopper.common import CHUNK, NUM_GATES

if TYPE_CHECKING:
    from gdncp.backends.base import TokenInputs
    from gdncp.work import WorkTable


@dataclass(eq=False)
class Tiles:
    """One entry per flat chunk and state head, chunk-major; those of empty chunks are never written or read."""

    inputs: TokenInputs  # as the kernels read them: the copy engine takes no tensor that starts off 16 bytes
    scratch: Scratch  # laid out by `tiles_of`; the properties are its tensors

    @property
    def solve(self) -> torch.Tensor:
        """[chunks · H · 64, 64] in the tokens' dtype: T."""
        return self.scratch.tensor("solve")

    @property
    def gates(self) -> torch.Tensor:
        """[chunks · H, NUM_GATES · 64] fp32: see `common`."""
        return self.scratch.tensor("gates")

    @property
    def keys(self) -> torch.Tensor:
        """[chunks · HK, 64] fp32: with L2 norm what it multiplies the key by; without, the key's square."""
        return self.scratch.tensor("keys")

    @property
    def growth(self) -> torch.Tensor:
        """[chunks · H] fp32: log2 of the product of a_t (see `forgetting`), rounded up."""
        return self.scratch.tensor("growth")

    @property
    def start_chunk(self) -> torch.Tensor:
        """[maps, H] int32: the chunk from which stage 2, which writes it, scans for N."""
        return self.scratch.tensor("start_chunk")


def tiles_of(inputs: TokenInputs, table: WorkTable) -> ScratchLayout:
    """How the tiles of such inputs lie."""
    sizes = (table.num_chunks, inputs.num_state_heads, inputs.k.shape[1], table.num_maps)
    return _layout(*sizes, inputs.k.dtype)


@lru_cache(maxsize=256)
def _layout(num_chunks: int, num_heads: int, num_k_heads: int, num_maps: int, dtype: torch.dtype) -> ScratchLayout:
    entries = num_chunks * num_heads
    return ScratchLayout(
        {
            "solve": ((entries * CHUNK, CHUNK), dtype),
            "gates": ((entries, NUM_GATES * CHUNK), torch.float32),
            "keys": ((num_chunks * num_k_heads, CHUNK), torch.float32),
            "growth": ((entries,), torch.float32),
            "start_chunk": ((num_maps, num_heads), torch.int32),
        }
    )
