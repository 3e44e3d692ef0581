"""A GPU: workers (SMs) that take the units of launches, those of streams of high priority first."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import partial
from itertools import count

from gdncp.plan.list_schedule import Units
from gdncp.simulate.engine import Engine, Event

HIGH, NORMAL = 0, 1  # priorities of streams


class _Launch:
    """Units that wait for workers, and those under way."""

    def __init__(self, units: Sequence[Units], holds: bool) -> None:
        self.holds = holds  # workers, until they are released
        self.groups = [(number, seconds) for number, seconds in units if number][::-1]  # the next one last
        self.left, _ = self.groups[-1]  # of that group
        self.running = 0
        self.done = Event()


class Gpu:
    """A worker takes a unit of the first launch that has some left; launches wait by priority, then in order.

    No unit is interrupted: what comes later waits for workers, however high its priority.
    """

    def __init__(self, engine: Engine, workers: int) -> None:
        self._engine = engine
        self._workers = self._free = workers
        self._computing, self._since = 0, 0.0  # workers with a unit; since when there are some
        self._busy_seconds = 0.0
        self._queue: list[tuple[int, int, _Launch]] = []
        self._order = count()

    @property
    def busy_seconds(self) -> float:
        """In which some worker had a unit."""
        return self._busy_seconds + (self._engine.now - self._since if self._computing else 0.0)

    def use(self, seconds: float, priority: int = NORMAL) -> Event:
        """The end of something that takes so long on all workers."""
        return self.launch([(self._workers, seconds)], priority)

    def launch(self, units: Sequence[Units], priority: int = NORMAL) -> Event:
        """The end of the last of these units, which start in order."""
        return self._enqueue(units, priority)

    def hold(self, workers: int) -> Event:
        """When so many workers have been taken from the units, until `release`; a message of NCCL is such a kernel."""
        return self._enqueue([(workers, 0.0)], HIGH, holds=True)

    def release(self, workers: int) -> None:
        self._free += workers
        self._dispatch()

    def _enqueue(self, units: Sequence[Units], priority: int, *, holds: bool = False) -> Event:
        if not any(number for number, _ in units):
            return self._engine.after(0.0)
        launch = _Launch(units, holds)
        heapq.heappush(self._queue, (priority, next(self._order), launch))
        self._dispatch()
        return launch.done

    def _dispatch(self) -> None:
        while self._free and self._queue:
            launch = self._queue[0][2]
            (_, seconds), taken = launch.groups[-1], min(self._free, launch.left)
            self._free -= taken
            launch.left -= taken
            if not launch.left:
                launch.groups.pop()
                if launch.groups:
                    launch.left, _ = launch.groups[-1]
                else:
                    heapq.heappop(self._queue)
            if not launch.holds:
                self._begin(launch, taken, seconds)
            elif not launch.groups:
                self._engine.at(self._engine.now, launch.done)

    def _begin(self, launch: _Launch, workers: int, seconds: float) -> None:
        if not self._computing:
            self._since = self._engine.now
        self._computing += workers
        launch.running += workers
        self._engine.call(seconds, partial(self._end, launch, workers))

    def _end(self, launch: _Launch, workers: int) -> None:
        launch.running -= workers
        self._free += workers
        self._computing -= workers
        if not self._computing:
            self._busy_seconds += self._engine.now - self._since
        if not (launch.groups or launch.running):
            self._engine.at(self._engine.now, launch.done)
        self._dispatch()
