"""List scheduling: units in order, each to the worker that is free first; equal units are placed many at a time."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache
from heapq import heapify, heappush, heapreplace

Units = tuple[int, float]  # how many, and seconds of each; plain tuples, as a plan takes tens of thousands
Launch = tuple[tuple[tuple[Units, ...], int], ...]  # units in order, and how often they come one after the other


def in_order(launch: Launch) -> list[Units]:
    return [each for units, times in launch for each in units * times]


class Workers:
    """When a launch's workers are free, as a heap of (time, workers free at that time)."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._free = [(0.0, count)]

    @property
    def finish(self) -> float:
        """When the last unit ends."""
        return max(self._free)[0]

    def wait_until(self, time: float) -> None:
        """No worker starts anything before."""
        self._free = [(max(free, time), count) for free, count in self._free]
        heapify(self._free)

    def run(self, units: Iterable[Units]) -> None:
        """Give out units in order."""
        free, many = self._free, 2 * self._count
        for left, seconds in units:
            if left > many and seconds > 0:
                left = self._run_below(left, seconds)
                free = self._free
            while left > 0:
                time, count = free[0]
                if count > left:
                    free[0] = (time, count - left)  # still the least
                    heappush(free, (time + seconds, left))
                    break
                left -= count
                heapreplace(free, (time + seconds, count))

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
        heapify(moved)
        self._free = moved
        return units


@lru_cache(1 << 11)  # stage 4 is the same whatever the gates, and stage 2 of most ranks whether or not sequences open
def finish(count: int, launch: Launch) -> float:
    """When so many workers are done."""
    workers = Workers(count)
    workers.run(in_order(launch))
    return workers.finish
