"""This process among its peers: who it is, how all agree on a step, and the group that carries data."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")
CONTROL_TIMEOUT = timedelta(days=1)  # peers wait here while rank 0 computes a reference
DATA_TIMEOUT = timedelta(minutes=5)  # how long a rank waits in a collective for a peer that failed


class RunFailure(Exception):
    """A step failed on some rank; every rank raises it with the same text."""


@dataclass
class Ranks:
    """`control` is a gloo group over all ranks, for agreeing and for small things; None: one rank without torchrun."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    control: dist.ProcessGroup | None = None
    _data: dict[str, dist.ProcessGroup] = field(default_factory=dict)

    @property
    def is_leader(self) -> bool:
        return self.rank == 0

    def broadcast(self, value: T | None = None) -> T:
        """Rank 0's `value`, on every rank."""
        box = [value]
        if self.control is not None:
            dist.broadcast_object_list(box, src=0, group=self.control)
        return box[0]  # type: ignore[return-value]  # filled above

    def gather(self, value: T) -> list[T]:
        """Every rank's `value`, in rank order, on every rank."""
        if self.control is None:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.control)
        return values

    def agree(self, step: Callable[[], T]) -> T:
        """Run a step on every rank and wait for all; where it failed on one, raise on all.

        Raises:
            RunFailure: naming the ranks that failed and why.
        """
        failure, value = None, None
        try:
            value = step()
        except (ValueError, NotImplementedError) as error:  # the user's to mend
            failure = str(error)
        except Exception as error:
            traceback.print_exc()
            failure = f"{type(error).__name__}: {error}"
        failures = self.gather(failure)
        if any(failures):
            raise RunFailure(_describe(failures))
        return value  # type: ignore[return-value]  # no rank failed, so there is one

    def to_leader(self, rows: torch.Tensor, counts: list[int]) -> list[torch.Tensor]:
        """On rank 0 every rank's rows, `counts[r]` of them from rank r, on the CPU; on others an empty list."""
        mine = rows.detach().cpu().contiguous()
        if not self.is_leader:
            if mine.numel():
                dist.send(mine, 0, group=self.control)
            return []
        parts = [mine]
        for rank, count in enumerate(counts[1:], start=1):
            part = torch.empty(count, *mine.shape[1:], dtype=mine.dtype)
            if part.numel():
                dist.recv(part, rank, group=self.control)
            parts.append(part)
        return parts

    def place(self, word: str) -> tuple[torch.device, dist.ProcessGroup | None, str]:
        """Device, data group and its backend for `device=auto|cpu|cuda`; the same choice on every rank.

        NCCL wants a GPU for each rank; more ranks than GPUs share them round robin and talk over gloo.
        """
        has_gpu, fits = map(all, zip(*self.gather(self._gpus()), strict=True))
        if word == "cuda" and not has_gpu:
            raise ValueError("device=cuda, but some rank sees no CUDA device; must be auto or cpu here")
        if word == "cpu" or not has_gpu:
            device = torch.device("cpu")
        else:
            device = torch.device("cuda", self.local_rank % torch.cuda.device_count())
            torch.cuda.set_device(device)
        backend = "nccl" if device.type == "cuda" and fits else "gloo"
        if self.control is None:
            return device, None, "none"
        if backend not in self._data:
            self._data[backend] = dist.new_group(backend=backend, timeout=DATA_TIMEOUT)
        return device, self._data[backend], backend

    def _gpus(self) -> tuple[bool, bool]:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return count > 0, self.local_world_size <= count


def _describe(failures: list[str | None]) -> str:
    """Every distinct failure with the ranks that had it, in rank order."""
    ranks_of: dict[str, list[int]] = {}
    for rank, failure in enumerate(failures):
        if failure is not None:
            ranks_of.setdefault(failure, []).append(rank)
    if list(ranks_of.values()) == [list(range(len(failures)))]:
        return next(iter(ranks_of))
    return "; ".join(f"rank {', '.join(map(str, ranks))}: {text}" for text, ranks in ranks_of.items())


@contextmanager
def join() -> Iterator[Ranks]:
    """Take part as torchrun's environment says; without torchrun as the only rank."""
    if not dist.is_torchelastic_launched():
        yield Ranks()
        return
    dist.init_process_group("gloo", timeout=CONTROL_TIMEOUT)
    ranks = Ranks(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        local_rank=int(os.environ["LOCAL_RANK"]),
        local_world_size=int(os.environ["LOCAL_WORLD_SIZE"]),
        control=dist.group.WORLD,
    )
    try:
        yield ranks
    finally:
        ranks.control = None  # a group that outlives the next line can abort the process as it exits
        ranks._data.clear()
        dist.destroy_process_group()
