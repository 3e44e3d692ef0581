"""The queue, the resources and the machine on cases that a person can work out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from gdncp.plan import PROFILES
from gdncp.simulate.engine import Engine, Event, Process, Resource
from gdncp.simulate.gpu import HIGH, NORMAL, Gpu
from gdncp.simulate.machine import Link, Machine, parse_link, with_topology

PROFILE = replace(
    PROFILES["h200"], ranks_per_node=2, message_s=1.0, bytes_per_s=10.0, node_message_s=5.0, node_bytes_per_s=2.0,
    node_peer_s=0.5, collective_s=100.0,
)  # fmt: skip


def test_a_resource_serves_one_use_after_another() -> None:
    engine, seen = Engine(), []
    gpu = Resource(engine)

    def process(name: str, start: float, seconds: float) -> Process:
        yield engine.after(start)
        yield gpu.use(seconds)
        seen.append((name, engine.now))

    for arguments in (("late", 2.0, 1.0), ("first", 0.0, 5.0), ("last", 9.0, 1.0)):
        engine.start(process(*arguments))
    assert engine.run() == 10.0
    assert seen == [("first", 5.0), ("late", 6.0), ("last", 10.0)]
    assert gpu.busy_seconds == 7.0


def test_workers_take_units_of_streams_of_high_priority_first() -> None:
    engine = Engine()
    gpu, ends = Gpu(engine, 4), {}

    def process(
        name: str, start: float, launch: Callable[[], Event], then: Callable[[], None] | None = None
    ) -> Process:
        yield engine.after(start)
        yield launch()
        ends[name] = engine.now
        if then:
            yield engine.after(10.0)
            then()

    # six units on four workers are two rounds; of the second the last unit goes beside
    engine.start(process("first", 0.0, lambda: gpu.launch([(4, 3.0), (2, 3.0)], NORMAL)))
    engine.start(process("second", 0.0, lambda: gpu.launch([(2, 5.0)], NORMAL)))
    engine.start(process("urgent", 1.0, lambda: gpu.launch([(1, 1.0)], HIGH)))  # interrupts nothing: from 3 on
    engine.start(process("message", 2.0, lambda: gpu.hold(2), lambda: gpu.release(2)))  # and this from 3, two workers
    engine.start(process("last", 2.0, lambda: gpu.use(1.0)))  # on all four
    engine.run()
    # at 3 urgent, message and one unit of the first begin, at 4 its other one, at 6 and 7 the second's, then the last
    assert ends == {"message": 3.0, "urgent": 4.0, "first": 7.0, "second": 12.0, "last": 14.0}
    assert gpu.busy_seconds == 14.0  # a message computes nothing: it held two workers until 13


def test_waiting_for_what_never_happens_is_an_error() -> None:
    machine = Machine(PROFILE, 2)

    def receiver() -> Process:
        yield from machine.exchange(1, [], [(0, 10)])

    machine.engine.start(receiver())
    with pytest.raises(RuntimeError, match="1 processes wait"):
        machine.engine.run()


def exchange(sends: list[tuple[int, int, int]], delays: dict[int, float]) -> dict[int, float]:
    """(source, target, bytes); ranks post at their delay -> when each rank's exchange is over."""
    machine = Machine(PROFILE, 4)
    ends: dict[int, float] = {}

    def rank(own: int) -> Process:
        yield machine.engine.after(delays.get(own, 0.0))
        out = [(target, size) for source, target, size in sends if source == own]
        into = [(source, size) for source, target, size in sends if target == own]
        yield from machine.exchange(own, out, into)
        ends[own] = machine.engine.now

    for own in range(4):
        machine.engine.start(rank(own))
    machine.engine.run()
    assert sum(machine.bytes_sent) == sum(machine.bytes_received) == sum(size for *_, size in sends)
    return ends


def test_messages_within_and_between_nodes() -> None:
    assert exchange([(0, 1, 20)], {}) == {0: 3.0, 1: 3.0, 2: 0.0, 3: 0.0}  # 1 + 20 / 10
    assert exchange([(1, 2, 20)], {})[2] == 15.0  # 5 + 20 / 2
    assert exchange([(0, 1, 20)], {1: 7.0})[0] == 10.0  # a message waits for both ends
    # two from one port follow each other; one that comes and one that goes do not disturb each other
    assert exchange([(0, 2, 20), (0, 3, 20)], {})[3] == 25.0
    assert exchange([(0, 1, 20), (1, 0, 20)], {}) == {0: 3.0, 1: 3.0, 2: 0.0, 3: 0.0}


def test_ends_that_disagree_are_an_error() -> None:
    machine = Machine(PROFILE, 2)
    machine.exchange(0, [(1, 10)], [])
    with pytest.raises(RuntimeError, match="10 and 11 bytes"):
        machine.exchange(1, [], [(0, 11)])


def test_collectives() -> None:
    machine = Machine(PROFILE, 2)
    ends = []

    def rank(delay: float) -> Process:
        yield machine.engine.after(delay)
        yield machine.meet("maps", 3.0)
        ends.append(machine.engine.now)

    machine.engine.start(rank(0.0))
    machine.engine.start(rank(4.0))
    machine.engine.run()
    assert ends == [7.0, 7.0]
    assert machine.all_gather_seconds(20) == 100 + 1 + 2
    assert Machine(PROFILE, 4).all_gather_seconds(20) == 100 + 1 + 3 * 20 / 2
    assert machine.all_to_all_seconds([20, 0], [1, 1]) == 100 + 1 + 2
    # between nodes: 2 peers for half a peer's price each, 40 bytes at 2 a second
    assert Machine(PROFILE, 4).all_to_all_seconds([20, 0, 0, 0], [1, 1, 1, 1]) == 100 + 5 + 2 * 0.25 + 20


def test_topology() -> None:
    assert parse_link("--link", "10:50") == Link(1e-5, 5e10)
    profile = with_topology(PROFILE, 4, parse_link("--link", "nvlink4"), Link(1.0, 2.0))
    assert (profile.ranks_per_node, profile.bytes_per_s, profile.node_message_s) == (4, 400e9, 1.0)
    for text in ("nvlink", "10", "-1:5", "1:0", "nan:1", "1:inf"):
        with pytest.raises(ValueError, match="--link must be"):
            parse_link("--link", text)
