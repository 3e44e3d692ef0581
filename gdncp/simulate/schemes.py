"""What runs on the simulated machine: a plan of ours, or a peer's scheme; every rank is a process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gdncp.plan import PrefillPlan
from gdncp.plan.cost import STAGES
from gdncp.simulate.collectives import Rank, Turns, local, state_fixup
from gdncp.simulate.engine import Process
from gdncp.simulate.gpu import HIGH, NORMAL
from gdncp.simulate.machine import Machine
from gdncp.simulate.memory import rank_bytes
from gdncp.simulate.work import GroupWork, Launch


@dataclass(frozen=True)
class Outcome:
    """What a run took."""

    seconds: float  # until the last rank is done
    # stage -> seconds of each rank from the end of the one before, waiting included; an exchange beside stage 4
    # (`entry_late`) is part of "cp_prefill", and of groups of heads the last one's end counts
    stages: Mapping[str, tuple[float, ...]]
    exchange: tuple[float, ...]  # seconds of each rank from the first group's begin of stage 3 to the last one's end
    busy_share: float  # of all GPUs' time, in which they computed
    bytes_sent: tuple[int, ...]  # per rank
    bytes_received: tuple[int, ...]
    messages_sent: tuple[int, ...]
    memory_bytes: tuple[int, ...]  # per rank; empty: not known


def simulate_plan(plan: PrefillPlan) -> Outcome:
    """The program on `plan.profile`'s machine: all ranks start at once."""
    machine = Machine(plan.profile, plan.world_size)
    works = [GroupWork(plan, group) for group in range(len(plan.head_groups))]
    runs: list[list[_Run]] = [[] for _ in range(plan.world_size)]
    for rank in range(plan.world_size):
        turns = Turns(machine, len(works))
        for group, work in enumerate(works):
            runs[rank].append(_Run(machine, plan, rank, group, work, turns))
            machine.engine.start(runs[rank][-1].all_stages())
    machine.engine.run()
    # a stage of a rank ends with the last of its groups
    marks = [[max(ends) for ends in zip(*(run.marks for run in of_rank), strict=True)] for of_rank in runs]
    exchange = tuple(
        max(run.exchange[1] for run in of_rank) - min(run.exchange[0] for run in of_rank) for of_rank in runs
    )
    memory = tuple(rank_bytes(plan, rank) for rank in range(plan.world_size))
    return outcome(machine, STAGES, marks, exchange, memory)


class _Run:
    """A rank's stages for one group of heads, as `gdncp.stages` enqueues them."""

    def __init__(
        self, machine: Machine, plan: PrefillPlan, rank: int, group: int, work: GroupWork, turns: Turns
    ) -> None:
        self._machine, self._plan, self._rank, self._work = machine, plan, rank, work
        self._gpu = machine.gpus[rank]
        self._here = Rank(machine, plan, rank, group, turns)
        self._beside = Rank(machine, plan, rank, group, turns, HIGH)
        self.marks: list[float] = []  # when each stage ended
        self.exchange = (0.0, 0.0)  # from when to when stage 3 ran

    def all_stages(self) -> Process:
        launches, crosses = self._work.launches(self._rank), self._plan.crosses_ranks
        yield from self._stage(launches.precompute_t)
        yield from self._stage(launches.precompute_mn)
        begun = self._machine.engine.now
        if crosses and self._plan.fold_span > 1:
            yield from self._here.compose()
        if self._plan.finish == "entry_first":
            yield from state_fixup(self._here) if crosses else local(self._here)
            self.exchange = begun, self._machine.engine.now
            self._mark()
            yield from self._side_by_side(launches.cp_prefill)
        else:
            early, late = self._work.prefills(self._rank)
            behind = self._machine.engine.start(self._exchange_and(late, begun))
            yield from local(self._here)
            self._mark()
            yield from self._side_by_side([] if early is None else [early])
            yield behind
        self._mark()

    def _exchange_and(self, late: Launch | None, begun: float) -> Process:
        """On a stream of high priority."""
        yield from state_fixup(self._beside)
        self.exchange = begun, self._machine.engine.now
        yield from self._side_by_side([] if late is None else [late], HIGH)

    def _stage(self, launches: Sequence[Launch]) -> Process:
        yield from self._side_by_side(launches)
        self._mark()

    def _side_by_side(self, launches: Sequence[Launch], priority: int = NORMAL) -> Process:
        if launches:
            yield self._machine.engine.after(self._plan.profile.launch_s)
            yield from [self._gpu.launch(units, priority) for units in launches]

    def _mark(self) -> None:
        self.marks.append(self._machine.engine.now)


def outcome(
    machine: Machine,
    stages: tuple[str, ...],
    marks: list[list[float]],
    exchange: tuple[float, ...] | None = None,
    memory: tuple[int, ...] = (),
) -> Outcome:
    """marks: per rank when each stage ended; exchange: None: it is the stage of that name."""
    per_rank = [[stop - start for start, stop in zip([0.0, *ends], ends, strict=False)] for ends in marks]
    seconds = max(ends[-1] for ends in marks)
    busy = sum(gpu.busy_seconds for gpu in machine.gpus)
    of_stages = dict(zip(stages, zip(*per_rank, strict=True), strict=True))
    return Outcome(
        seconds=seconds,
        stages=of_stages,
        exchange=of_stages["all_gather"] if exchange is None else exchange,
        busy_share=busy / (seconds * machine.world_size) if seconds else 1.0,
        bytes_sent=tuple(machine.bytes_sent),
        bytes_received=tuple(machine.bytes_received),
        messages_sent=tuple(machine.messages_sent),
        memory_bytes=memory,
    )
