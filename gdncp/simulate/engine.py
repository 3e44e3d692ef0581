"""Discrete events: processes that wait for events, and resources that serve one use after another.

A process is a generator that yields the event it waits for next.  All times are seconds from the start.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Generator
from functools import partial
from itertools import count

Process = Generator["Event", None, None]


class Event:
    """Something that happens once; a process that waits for it afterwards goes on at once."""

    __slots__ = ("fired", "waiting")

    def __init__(self) -> None:
        self.fired = False
        self.waiting: list[Callable[[], None]] = []


class Engine:
    """The clock and the queue of what is to happen; of what happens at one time, the first scheduled comes first."""

    def __init__(self) -> None:
        self.now = 0.0
        self._queue: list[tuple[float, int, Event]] = []
        self._order = count()
        self._running = 0  # processes that have not ended

    def at(self, time: float, event: Event | None = None) -> Event:
        """Let an event, a new one by default, happen at `time`."""
        event = event or Event()
        heapq.heappush(self._queue, (time, next(self._order), event))
        return event

    def after(self, seconds: float) -> Event:
        return self.at(self.now + seconds)

    def call(self, seconds: float, function: Callable[[], None]) -> None:
        """Call a function after so many seconds."""
        self.after(seconds).waiting.append(function)

    def start(self, process: Process) -> Event:
        """Run a process from now on, at once to where it first waits; the event that it has ended."""
        self._running += 1
        ended = Event()
        self._resume(process, ended)
        return ended

    def run(self) -> float:
        """Until nothing more happens; the time then.  RuntimeError where a process waits for what never happens."""
        while self._queue:
            self.now, _, event = heapq.heappop(self._queue)
            event.fired = True
            waiting, event.waiting = event.waiting, []
            for function in waiting:
                function()
        if self._running:
            raise RuntimeError(f"{self._running} processes wait for events that never happen")
        return self.now

    def _resume(self, process: Process, ended: Event) -> None:
        for event in process:
            if not event.fired:
                event.waiting.append(partial(self._resume, process, ended))
                return
        self._running -= 1
        self.at(self.now, ended)


class Resource:
    """Serves its uses one after another, in the order in which they were asked for."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.free_at = 0.0
        self.busy_seconds = 0.0

    def use(self, seconds: float) -> Event:
        """The end of a use of so many seconds."""
        return self._engine.at(self.serve(seconds))

    def serve(self, seconds: float) -> float:
        """When a use of so many seconds ends."""
        self.free_at = max(self._engine.now, self.free_at) + seconds
        self.busy_seconds += seconds
        return self.free_at
