"""Several tensors in one allocation: an allocation each costs the host as much as a launch, and so does a view.

Kernels that are launched by address need no tensor of them; one is made where somebody looks at it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch

_ALIGNMENT = 256  # bytes


class Field(NamedTuple):
    """One tensor, contiguous, `offset` bytes into the allocation."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int


class ScratchLayout:
    """What lies where; the same for every call of a kind, so made once."""

    def __init__(self, fields: Mapping[str, tuple[tuple[int, ...], torch.dtype]]):
        self.fields: dict[str, Field] = {}
        self.num_bytes = 0
        for name, (shape, dtype) in fields.items():
            self.fields[name] = Field(shape, dtype, self.num_bytes)
            size = math.prod(shape) * dtype.itemsize
            self.num_bytes += -(-size // _ALIGNMENT) * _ALIGNMENT

    def offset(self, name: str) -> int:
        return self.fields[name].offset


class Scratch:
    """Uninitialised memory laid out so."""

    __slots__ = ("_memory", "address", "layout")

    def __init__(self, layout: ScratchLayout, device: torch.device):
        self.layout = layout
        self._memory = torch.empty(layout.num_bytes, dtype=torch.uint8, device=device)
        self.address = self._memory.data_ptr()

    def flat(self, dtype: torch.dtype) -> torch.Tensor:
        """All of it as one tensor: a field begins at its offset over the size of an element."""
        return self._memory.view(dtype)

    def tensor(self, name: str) -> torch.Tensor:
        """A view, which keeps all of the allocation in memory."""
        shape, dtype, offset = self.layout.fields[name]
        memory = self._memory[offset : offset + math.prod(shape) * dtype.itemsize]
        return memory.view(dtype).view(shape)

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """As of a tensor: once freed, the memory goes to nobody before this stream has done what it has to by then."""
        self._memory.record_stream(stream)
