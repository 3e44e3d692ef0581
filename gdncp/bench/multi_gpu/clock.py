"""Time of what all ranks do together: the slowest rank's, from a start that is the same for all."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from gdncp.bench.timing import CYCLES_PER_MS, HOLD_MS
from gdncp.collectives.wire import backend_of

Call = Callable[[], Any]


class RankClock:
    """Every method is a collective of the group.

    Under NCCL: device events.  Each GPU is first held busy, so that its host runs ahead, and then takes part in a tiny
    all_reduce, which aligns the GPUs.  Otherwise: the host's clock, after a barrier and until the device is idle.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device):
        self._group, self._device = group, device
        self._cuda = device.type == "cuda"
        self.has_events = self._cuda and backend_of(group, "cuda") == "nccl"
        self._place = device if self.has_events else torch.device("cpu")  # of what ranks tell each other
        self._flag = torch.zeros(1, device=self._place)

    def times(self, calls: Sequence[Call], count: int, hold_ms: float = 0.0) -> list[float]:
        """ms of each of `count` calls on the slowest rank; `calls` run in turn."""
        measure = self._by_events if self.has_events else self._by_host
        found = torch.tensor([measure(calls[i % len(calls)], hold_ms) for i in range(count)], device=self._place)
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self._group)
        return found.tolist()

    def median(self, calls: Sequence[Call], count: int, hold_ms: float = 0.0) -> float:
        """Of `times`, after a few calls that are left out."""
        self.times(calls, min(3, count), hold_ms)
        return statistics.median(self.times(calls, count, hold_ms))

    def host_us(self, calls: Sequence[Call], count: int) -> float:
        """Median time until a call returns, the device idle when it begins; of the slowest rank."""
        found = []
        for i in range(count):
            self._meet()
            start = time.perf_counter()
            calls[i % len(calls)]()
            found.append(1e6 * (time.perf_counter() - start))
        self._idle()
        median = torch.tensor([statistics.median(found)], device=self._place)
        dist.all_reduce(median, op=dist.ReduceOp.MAX, group=self._group)
        return float(median)

    def capture(self, call: Call) -> Call:
        """The call as a CUDA graph of this rank, to be replayed by all ranks."""
        graph = torch.cuda.CUDAGraph()
        self._idle()
        # other threads, NCCL's watchdog among them, may query events meanwhile
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            call()
        return graph.replay

    def align(self, hold_ms: float = 0.0) -> None:
        """From here on all ranks start together; with events, after the device was busy for about `hold_ms`."""
        if not self.has_events:
            self._meet()
            return
        torch.cuda._sleep(int(CYCLES_PER_MS * max(HOLD_MS, hold_ms)))
        dist.all_reduce(self._flag, group=self._group)

    # ---- private

    def _idle(self) -> None:
        if self._cuda:
            torch.cuda.synchronize(self._device)

    def _meet(self) -> None:
        """Every device idle, every host here."""
        self._idle()
        dist.all_reduce(self._flag, group=self._group)
        self._idle()

    def _by_events(self, call: Call, hold_ms: float) -> float:
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self.align(hold_ms)
        start.record()
        call()
        stop.record()
        self._idle()
        return start.elapsed_time(stop)

    def _by_host(self, call: Call, hold_ms: float) -> float:
        self.align(hold_ms)
        start = time.perf_counter()
        call()
        self._idle()
        return 1e3 * (time.perf_counter() - start)
