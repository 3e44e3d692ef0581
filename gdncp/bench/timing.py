"""How time and memory are taken: device events over rotated inputs, graph replays, the host's clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

Call = Callable[[], Any]

HOLD_MS = 1.0  # at least; the stream is held busy before the first event while the host enqueues the call
CYCLES_PER_MS = 2_000_000  # at about 2 GHz


@dataclass
class Sample:
    """Times in ms of one engine, by round."""

    rounds: list[list[float]] = field(default_factory=list)

    @property
    def median(self) -> float | None:
        """Of the medians of the rounds: a round in which the clock was off counts once."""
        medians = self.medians
        return statistics.median(medians) if medians else None

    @property
    def medians(self) -> list[float]:
        return [statistics.median(times) for times in self.rounds if times]


def interleave(measures: Mapping[Any, Callable[[], Sequence[float]]], num_rounds: int) -> dict[Any, Sample]:
    """Run every measure once a round, every other round backwards, so that clock drift hits all alike."""
    samples: dict[Any, Sample] = {key: Sample() for key in measures}
    for i in range(num_rounds):
        order = list(measures)
        for key in reversed(order) if i % 2 else order:
            samples[key].rounds.append(list(measures[key]()))
    return samples


class Clock(Protocol):
    """A device's times and memory.  `calls` run in turn, one per input set."""

    host_matters: bool  # whether the host's time to enqueue is another one than the device's

    def synchronize(self) -> None: ...

    def hold(self, ms: float) -> None:
        """Keep the device busy for about so long from here on, so that the host can run ahead of it."""
        ...

    def times(self, calls: Sequence[Call], count: int, hold_ms: float = 0.0) -> list[float]:
        """ms of each of `count` calls on the device; waits on the host that a call itself makes are in it."""
        ...

    def capture(self, calls: Sequence[Call]) -> tuple[Call, Any]:
        """(replay of all calls as one graph, what the last one returned).  RuntimeError where there are no graphs."""
        ...

    def allocated(self) -> int: ...

    def peak(self, call: Call) -> int:
        """The most bytes that were allocated at once during a call."""
        ...


class CudaClock:
    host_matters = True

    def __init__(self, device: torch.device):
        self._device = device

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)

    def hold(self, ms: float) -> None:
        torch.cuda._sleep(int(CYCLES_PER_MS * max(HOLD_MS, ms)))

    def times(self, calls: Sequence[Call], count: int, hold_ms: float = 0.0) -> list[float]:
        found = []
        for i in range(count):
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            self.hold(hold_ms)
            start.record()
            calls[i % len(calls)]()
            stop.record()
            self.synchronize()
            found.append(start.elapsed_time(stop))
        return found

    def capture(self, calls: Sequence[Call]) -> tuple[Call, Any]:
        graph, result = torch.cuda.CUDAGraph(), None
        self.synchronize()
        with torch.cuda.graph(graph):
            for call in calls:
                result = call()
        return graph.replay, result

    def allocated(self) -> int:
        self.synchronize()
        return torch.cuda.memory_allocated(self._device)

    def peak(self, call: Call) -> int:
        self.synchronize()
        torch.cuda.reset_peak_memory_stats(self._device)
        call()
        self.synchronize()
        return torch.cuda.max_memory_allocated(self._device)


class CpuClock:
    """Wall time; no graphs, and no memory figures."""

    host_matters = False

    def synchronize(self) -> None:
        pass

    def hold(self, ms: float) -> None:
        pass

    def times(self, calls: Sequence[Call], count: int, hold_ms: float = 0.0) -> list[float]:
        return [1e3 * _seconds(calls[i % len(calls)]) for i in range(count)]

    def capture(self, calls: Sequence[Call]) -> tuple[Call, Any]:
        raise RuntimeError("no graphs on a CPU")

    def allocated(self) -> int:
        return 0

    def peak(self, call: Call) -> int:
        call()
        return 0


def clock_of(device: torch.device) -> Clock:
    return CudaClock(device) if device.type == "cuda" else CpuClock()


def _seconds(call: Call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def host_microseconds(clock: Clock, calls: Sequence[Call], count: int) -> float:
    """Median time until a call returns, the device idle when it begins: what one call costs the host to enqueue."""
    found = []
    for i in range(count):
        clock.synchronize()
        found.append(1e6 * _seconds(calls[i % len(calls)]))
    clock.synchronize()
    return statistics.median(found)
