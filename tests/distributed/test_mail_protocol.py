"""How kernels use mailboxes, step by step and without GPUs: programs that take the tables and the steps of
`fold_runs_kernel`, in any order that several ranks and few SMs allow.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gdncp.collectives import chain, peer_memory
from gdncp.collectives.peer_memory import PLACES, Count
from gdncp.collectives.schedule import Link
from gdncp.plan import PrefillPlan
from tests.distributed.affine import make_plan, random_ranges
from tests.distributed.test_fixup import MANY
from tests.distributed.test_schedule import plans

CPU = torch.device("cpu")


def _wrapped(x: int) -> int:
    """As 32 bits."""
    return (x + (1 << 31)) % (1 << 32) - (1 << 31)


class _Memory:
    """Of one rank: counts [which][number], and places [number][e mod 2]."""

    def __init__(self, num_channels: int, start: int):
        self.counts = [[start] * num_channels for _ in range(peer_memory.COUNTS)]
        self.places: list[list[Any]] = [[None] * PLACES for _ in range(num_channels)]


def _program(
    memories: list[_Memory], capacity: int, rank: int, runs: Any, run: int, block: int, wide: int, link: Link, call: int
) -> Iterator[bool]:
    """`fold_runs_kernel` of `wide` channels from `block` on, in steps; yields whether it could take one."""
    own, (to, source) = memories[rank], (int(runs.target[run]), int(runs.source[run]))
    per_message = len(runs.per_message)
    out = int(runs.target_message[run]) * per_message + block
    into = int(runs.source_message[run]) * per_message + block
    if to >= 0:
        sent = _wrapped(own.counts[Count.SENT][to * capacity + out] + 1)
        for u in range(wide):
            while _wrapped(own.counts[Count.READ][to * capacity + out + u] - (sent - PLACES)) < 0:
                yield False
            yield True
    if source >= 0:
        received = _wrapped(own.counts[Count.RECEIVED][source * capacity + into] + 1)
        for u in range(wide):
            while _wrapped(own.counts[Count.WRITTEN][source * capacity + into + u] - received) < 0:
                yield False
            yield True
        for u in range(wide):
            found = own.places[source * capacity + into + u][received % PLACES]
            assert found == (call, link.sequence, link.depth, block + u), "not what was sent to it"
            yield True
    if to >= 0:
        for u in range(wide):
            memories[to].places[rank * capacity + out + u][sent % PLACES] = (
                call,
                link.sequence,
                link.depth + 1,
                block + u,
            )
            yield True
        for u in range(wide):
            memories[to].counts[Count.WRITTEN][rank * capacity + out + u] = sent
            own.counts[Count.SENT][to * capacity + out + u] = sent
            yield True
    if source >= 0:
        for u in range(wide):
            memories[source].counts[Count.READ][rank * capacity + into + u] = received
            own.counts[Count.RECEIVED][source * capacity + into + u] = received
            yield True


def _play(calls: list[tuple[PrefillPlan, int]], sms: int, draw: random.Random) -> None:
    """The calls, of (plan, channels a message), on all ranks, whose SMs hold `sms` programs; all in any order."""
    size = calls[0][0].world_size
    capacity = max(peer_memory.most_messages(plan) * channels for plan, channels in calls)
    start = draw.choice([0, _wrapped((1 << 31) - 1 - draw.randrange(4)), _wrapped(-draw.randrange(1, 4))])
    memories = [_Memory(size * capacity, start) for _ in range(size)]
    launches: list[list[list[Iterator[bool]]]] = [[] for _ in range(size)]
    for rank in range(size):
        for number, (plan, channels) in enumerate(calls):
            for runs, links in zip(chain.mail_on(plan, rank, CPU), chain.mail_links(plan, rank), strict=True):
                wide = draw.choice([1, 2])  # each end chooses for itself
                table = SimpleNamespace(per_message=range(channels), **vars(runs))
                programs = [
                    _program(memories, capacity, rank, table, run, block, wide, link, number)
                    for run, link in enumerate(links)
                    for block in range(0, channels, wide)
                ]
                draw.shuffle(programs)
                launches[rank].append(programs)
    resident: list[list[Iterator[bool]]] = [[] for _ in range(size)]
    idle = 0
    while any(launches) or any(resident):
        for rank in range(size):
            if launches[rank] and not launches[rank][0] and not resident[rank]:
                launches[rank].pop(0)  # a launch begins when the one before has ended
            while launches[rank] and launches[rank][0] and len(resident[rank]) < sms:
                resident[rank].append(launches[rank][0].pop())
        moved = False
        for rank in draw.sample(range(size), size):
            for program in draw.sample(resident[rank], len(resident[rank])):
                if draw.random() < 0.5:
                    moved = True
                    continue
                step = next(program, None)
                if step is None:
                    resident[rank].remove(program)
                moved = moved or step is not False
        idle = 0 if moved else idle + 1
        assert idle < 3, "all wait"


@settings(max_examples=40, deadline=None)
@given(first=plans(), seed=st.integers(0, 1 << 20), sms=st.integers(1, 3))
def test_no_order_of_steps_loses_a_state_or_waits_for_ever(first, seed, sms):
    """Two plans alternate, and are repeated as a graph's replays are; one has more heads."""
    draw = random.Random(seed)
    total, size = 64 * draw.randrange(1, 12), first.world_size
    other = make_plan([total], size, random_ranges([total], range(size), size, seed, grid=64))
    calls = [(plan, channels) for plan, channels in ((first, 2), (other, 4)) for _ in range(draw.randrange(1, 4))]
    draw.shuffle(calls)
    _play(calls, sms, draw)


@pytest.mark.parametrize("plan", [make_plan([64 * 16], 4, "zigzag", "chain"), make_plan(MANY, 3, "zigzag", "chain")])
def test_many_calls_in_a_row(plan):
    _play([(plan, 4)] * 12, 2, random.Random(5))
