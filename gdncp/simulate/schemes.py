"""What runs on the simulated machine: a plan of ours, or a peer's scheme; every rank is a process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from gdncp.plan import PrefillPlan
from gdncp.plan.checks import CHUNK
from gdncp.plan.cost import STAGES
from gdncp.plan.stage_model import Kind, StageSeconds
from gdncp.simulate.collectives import FIXUPS, Rank
from gdncp.simulate.engine import Process
from gdncp.simulate.machine import Machine
from gdncp.simulate.memory import rank_bytes


@dataclass(frozen=True)
class Outcome:
    """What a run took."""

    seconds: float  # until the last rank is done
    stages: Mapping[str, tuple[float, ...]]  # stage -> seconds of each rank, waiting included
    busy_share: float  # of all GPUs' time, in which they computed
    bytes_sent: tuple[int, ...]  # per rank
    bytes_received: tuple[int, ...]
    messages_sent: tuple[int, ...]
    memory_bytes: tuple[int, ...]  # per rank; empty: not known


def simulate_plan(plan: PrefillPlan) -> Outcome:
    """The program on `plan.profile`'s machine: all ranks start at once."""
    machine = Machine(plan.profile, plan.world_size)
    known: dict[frozenset[tuple[Kind, int]], StageSeconds] = {}  # ranks with equal work share its schedule of units
    marks: list[list[float]] = [[] for _ in range(plan.world_size)]

    def work(rank: int) -> StageSeconds:
        items = plan.rank_plan(rank).items
        kinds = Counter(
            Kind(-(-item.num_tokens // CHUNK), item.is_first, item.is_last) for item in items if item.num_tokens
        )
        key = frozenset(kinds.items())
        if key not in known:
            known[key] = plan.stage_model.seconds(kinds)
        return known[key]

    def run(rank: int) -> Process:
        t, mn, prefill = work(rank)
        gpu, engine = machine.gpus[rank], machine.engine
        yield gpu.use(t)
        marks[rank].append(engine.now)
        yield gpu.use(mn)
        marks[rank].append(engine.now)
        yield from FIXUPS[plan.fixup](Rank(machine, plan, rank))
        marks[rank].append(engine.now)
        yield gpu.use(prefill)
        marks[rank].append(engine.now)

    for rank in range(plan.world_size):
        machine.engine.start(run(rank))
    machine.engine.run()
    memory = tuple(rank_bytes(plan, rank) for rank in range(plan.world_size))
    return outcome(machine, STAGES, marks, memory)


def outcome(
    machine: Machine, stages: tuple[str, ...], marks: list[list[float]], memory: tuple[int, ...] = ()
) -> Outcome:
    """marks: per rank when each stage ended."""
    per_rank = [[stop - start for start, stop in zip([0.0, *ends], ends, strict=False)] for ends in marks]
    seconds = max(ends[-1] for ends in marks)
    busy = sum(gpu.busy_seconds for gpu in machine.gpus)
    return Outcome(
        seconds=seconds,
        stages=dict(zip(stages, zip(*per_rank, strict=True), strict=True)),
        busy_share=busy / (seconds * machine.world_size) if seconds else 1.0,
        bytes_sent=tuple(machine.bytes_sent),
        bytes_received=tuple(machine.bytes_received),
        messages_sent=tuple(machine.messages_sent),
        memory_bytes=memory,
    )
