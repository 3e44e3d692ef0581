"""The ranks of a run: their process group, their devices, and decisions that all of them must make alike."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """This process among its peers, which are the default process group."""

    rank: int
    size: int
    device: torch.device
    backend: str  # between tensors on `device`: "nccl" or "gloo"
    deadline: float  # on time.monotonic() of rank 0

    @property
    def captures(self) -> bool:
        """Whether a CUDA graph can hold an exchange: gloo between CUDA tensors waits on the host."""
        return self.backend == "nccl"

    @property
    def group(self) -> dist.ProcessGroup:
        assert dist.group.WORLD is not None
        return dist.group.WORLD

    def together(self, value: T) -> list[T]:
        """Every rank's value, by rank; over the CPU."""
        gathered: list[T | None] = [None] * self.size
        dist.all_gather_object(gathered, value)
        return gathered  # type: ignore[return-value]  # filled above

    def out_of_time(self) -> bool:
        """Whether the budget is spent: rank 0's clock decides, so that no rank goes on alone."""
        spent = torch.tensor([time.monotonic() > self.deadline])
        dist.broadcast(spent, src=0)
        return bool(spent)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@contextmanager
def join(backend: str, budget: float, timeout: float = 120.0) -> Iterator[Ranks]:
    """Join the ranks that torchrun started.  Over NCCL each has a GPU of its own; over gloo they share what there is.

    Args:
        budget: seconds from here on after which no new case is begun.
        timeout: seconds that a collective may take; compiling on one rank is such a wait for the others.
    """
    deadline = time.monotonic() + budget
    local = int(os.environ["LOCAL_RANK"])
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if backend == "nccl" and local >= gpus:
        raise ValueError(f"backend must be gloo where {local + 1} ranks share {gpus} GPUs, got nccl")
    device = torch.device("cuda", local % gpus) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    # objects and decisions travel over the CPU in any case
    dist.init_process_group("cpu:gloo,cuda:nccl" if backend == "nccl" else "gloo", timeout=timedelta(seconds=timeout))
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size(), device, backend, deadline)
    finally:
        dist.destroy_process_group()
