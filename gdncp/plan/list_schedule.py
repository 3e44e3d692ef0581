"""List scheduling: units in order, each to the worker that is free first; equal units are placed many at a time."""

from __future__ import annotations

import heapq
import math


class Workers:
    """When a launch's workers are free, as a heap of (time, workers free at that time)."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._free = [(0.0, count)]

    @property
    def finish(self) -> float:
        """When the last unit ends."""
        return max(time for time, _ in self._free)

    def wait_until(self, time: float) -> None:
        """No worker starts anything before."""
        self._free = [(max(free, time), count) for free, count in self._free]
        heapq.heapify(self._free)

    def run(self, units: int, seconds: float) -> None:
        """Give out `units` units of `seconds` each."""
        if units > 2 * self._count and seconds > 0:
            units = self._run_below(units, seconds)
        free = self._free
        while units > 0:
            time, count = free[0]
            if count > units:
                heapq.heapreplace(free, (time, count - units))
                heapq.heappush(free, (time + seconds, units))
                return
            units -= count
            heapq.heapreplace(free, (time + seconds, count))

    def _run_below(self, units: int, seconds: float) -> int:
        """Give out all units that start before a time before which at most `units` start; how many are left.

        A worker that is free at t starts ceil((x − t) / seconds) units before x: at most one more than the quotient,
        so `units` bounds their sum for the x below.  What is left is less than two units a worker.
        """
        level, total, weighted = math.inf, 0, 0.0
        for time, count in sorted(self._free):
            if time >= level:
                break
            total += count
            weighted += count * time
            level = (units * seconds + weighted) / total - seconds
        moved = []
        for time, count in self._free:
            # the tolerance only moves a start that lies on the level to what is left
            rounds = max(math.ceil((level - time) / seconds - 1e-9), 0)
            units -= rounds * count
            moved.append((time + rounds * seconds, count))
        heapq.heapify(moved)
        self._free = moved
        return units
