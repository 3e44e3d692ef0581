"""Engines that compute the right thing or a wrong one, on a clock that they move themselves."""

from __future__ import annotations

from gdncp.bench.engines import Bound, Engine, Result
from gdncp.bench.reference import chunked


class FakeClock:
    """Time in ms passes only where an engine says so."""

    host_matters = False

    def __init__(self, graphs=True):
        self.now, self.graphs, self.lost = 0.0, graphs, False

    def synchronize(self):
        if self.lost:
            raise RuntimeError("device lost")

    def hold(self, ms):
        self.now += 100.0  # what passes before the first event is in no figure

    def times(self, calls, count, hold_ms=0.0):
        found = []
        for i in range(count):
            self.hold(hold_ms)
            start = self.now
            calls[i % len(calls)]()
            found.append(self.now - start)
        return found

    def capture(self, calls):
        if not self.graphs:
            raise RuntimeError("no graphs")
        return lambda: [call() for call in calls], calls[-1]()

    def allocated(self):
        return 1000

    def peak(self, call):
        call()
        return 9000


class FakeEngine(Engine):
    """Takes `ms` of the clock a call and is off by the factor `off`; the n-th call of a bound case may do something."""

    compiles_to_disk = False

    def __init__(self, name, clock, ms=1.0, off=1.0, ours=False, rejects=None, at_call=None):
        self.name, self.ours = name, ours
        self.clock, self.ms, self.off, self.rejects, self.at_call = clock, ms, off, rejects, at_call
        self.num_calls = 0

    def absent_reason(self, device):
        return None

    def version(self):
        return "1.0"

    def rejection_reason(self, case):
        return self.rejects

    def bind(self, case, sets):
        true = [chunked(case, tokens) for tokens in sets]

        def call(i):
            self.num_calls += 1
            self.clock.now += self.ms
            if self.at_call is not None:
                self.at_call(self)
            return Result((true[i].output * self.off).to(case.dtype), true[i].final_state.float())

        return Bound([lambda i=i: call(i) for i in range(len(sets))], {"fake": True})
