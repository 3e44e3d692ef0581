"""Our fixups as processes of a rank: the same schedule as `gdncp.collectives`, with times in place of tensors.

Each function mirrors the `run` of its namesake there, line by line: what it folds, sends and waits for, in that order;
`state_fixup`, `local` and `compose` with spans too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import accumulate

from gdncp.collectives.chain import MIN_BLOCK_BYTES, mail_links, row_blocks
from gdncp.collectives.folding import MAX_BATCH
from gdncp.collectives.schedule import (
    Link,
    arrivals,
    chain_rounds,
    crossing_routes,
    head_range,
    links_to_fill,
    manifests,
    own_links,
    tree_rounds,
)
from gdncp.collectives.spans import Span, spans_of
from gdncp.plan import PrefillPlan
from gdncp.plan.cost import copy_seconds, fold_seconds, load_of, mail_seconds, span_launches, span_start
from gdncp.plan.overlap import EXCHANGE_WORKERS
from gdncp.plan.profiles import CostProfile
from gdncp.simulate.engine import Event, Process
from gdncp.simulate.gpu import NORMAL
from gdncp.simulate.machine import Machine, Message

FOLD_ROWS = 16  # V rows in multiples of which a backend's fold may be cut
PROGRAM_ROWS = 8  # the fewest that a program folds


def fold_launches(runs: Iterable[range]) -> int:
    """Calls of the fold, as `fold_runs` batches them: at each position, the runs that fold a map there, together."""
    change: dict[int, int] = defaultdict(int)
    for run in runs:
        change[run.start] += 1
        change[run.stop] -= 1
    launches = live = previous = 0
    for position, more in sorted(change.items()):
        launches += (position - previous) * -(-live // MAX_BATCH)
        live, previous = live + more, position
    return launches


def fold_steps(profile: CostProfile, runs: Sequence[range]) -> int:
    """What takes `fold_launch_s`: calls of the fold, or the steps of the longest of runs that one call takes whole."""
    return max(map(len, runs), default=0) if profile.folds_runs else fold_launches(runs)


def folded(link: Link) -> range:
    """Positions of a link's own maps at which something is folded: a first CP chunk's is taken as it is."""
    return range(int(link.starts), link.num_maps)


class Turns:
    """A rank's groups of heads exchange over one process group: one group's exchanges all come before the next's."""

    def __init__(self, machine: Machine, groups: int) -> None:
        self._machine = machine
        self._over = [Event() for _ in range(groups)]

    def before(self, group: int) -> Process:
        if group:
            yield self._over[group - 1]

    def over(self, group: int) -> None:
        self._machine.engine.at(self._machine.engine.now, self._over[group])


class Rank:
    """One rank's fixup, of all heads or of a group of them: what it folds and sends, and where it waits."""

    def __init__(
        self,
        machine: Machine,
        plan: PrefillPlan,
        rank: int,
        group: int = 0,
        turns: Turns | None = None,
        priority: int = NORMAL,
    ) -> None:
        """priority: of the stream on which it folds."""
        self.machine, self.plan, self.rank, self.group = machine, plan, rank, group
        self._turns, self._priority = turns or Turns(machine, group + 1), priority
        start, stop = plan.head_groups[group]
        self._opened = False
        self.num_heads = stop - start
        self.state_bytes = self.num_heads * plan.head_dim**2 * 4

    # ---- folds, on this rank's GPU

    def fold(self, runs: Iterable[range], heads: float | None = None, *, copies: int = 1, alone: bool = False) -> Event:
        """Fold runs, given as positions of maps; `heads`: of how many, all by default.

        copies: what a step takes, see `span_launches`.  alone: see `fold_seconds`.
        """
        plan, profile = self.plan, self.machine.profile
        heads = self.num_heads if heads is None else heads
        runs = [run for run in runs if run]  # a sequence of one CP chunk has nothing to fold
        maps = sum(map(len, runs))
        steps = copies * fold_steps(profile, runs)
        seconds = fold_seconds(profile, steps, maps, heads, plan.head_dim, alone)
        # a program per head and 8 rows of V, as long as there are workers
        programs = min(-(-int(heads * len(runs) * plan.head_dim) // PROGRAM_ROWS), profile.workers)
        return self.machine.gpus[self.rank].launch([(programs, seconds)], self._priority)

    def fold_inside(self, links: Iterable[Link]) -> Event:
        return self.fold(range(link.starts, link.num_maps - (link.next_rank is not None)) for link in links)

    def copy(self, num_maps: float, heads: float | None = None, launches: int = 1) -> Event:
        """Copy maps; a transition, a local state or another state is half of one."""
        profile = self.machine.profile
        seconds = copy_seconds(
            profile, num_maps, self.num_heads if heads is None else heads, self.plan.head_dim, launches
        )
        units = [(profile.workers, seconds)] if num_maps and heads != 0 else []
        return self.machine.gpus[self.rank].launch(units, self._priority)

    def compose(self) -> Process:
        """Maps of spans: local states, then transitions, or both in one launch."""
        spans = [span for span in spans_of(self.plan, self.rank) if span.row >= 0]
        profile, copies = self.machine.profile, span_launches(self.machine.profile)
        local_states = [range(span.num_items - 1) for span in spans]
        transitions = [range(span.num_items - 1) for span in spans if not span.starts]
        if profile.folds_runs:
            yield self._span_start([*local_states, *transitions])
            yield self.fold([*local_states, *transitions])
        else:
            yield self.fold(local_states, copies=copies)
            yield self.fold(transitions, copies=copies)

    def fold_in_spans(self, spans: Iterable[Span], entered: int) -> Process:
        """entered: how many of their entry states have to be copied there."""
        runs = [range(int(span.starts), span.num_items - 1) for span in spans]
        if self.machine.profile.folds_runs:
            yield self._span_start(runs)
        else:
            yield self.copy(entered / 2, launches=2)
        yield self.fold(runs, copies=span_launches(self.machine.profile))

    def _span_start(self, runs: Sequence[range]) -> Event:
        seconds = span_start(self.machine.profile, len(runs), self.num_heads, self.plan.head_dim) if runs else 0.0
        return self.machine.engine.after(seconds)

    def starting(self) -> Iterable[Link]:
        return (link for link in links_to_fill(self.plan, self.rank) if link.starts)

    # ---- exchanges: each is a kernel that holds a few of the GPU's workers while it waits and sends

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Process:
        """Messages; before the first ones a start of a collective."""
        if not self._opened:
            self._opened = True
            yield from self._turns.before(self.group)
            yield self.machine.engine.after(self.machine.profile.collective_s)
        if any(peer != self.rank for peer, _ in (*sends, *receives)):
            yield from self._held(lambda: self.machine.exchange(self.rank, sends, receives))

    def meet(self, join: Callable[[], Event]) -> Event:
        """A collective, under way at once; its end."""

        def process() -> Process:
            yield from self._turns.before(self.group)
            yield from self._held(lambda: [join()])

        return self.machine.engine.start(process())

    def leave(self) -> Process:
        """After the last exchange."""
        yield from self._turns.before(self.group)
        self._turns.over(self.group)

    def _held(self, begin: Callable[[], Sequence[Event]]) -> Process:
        gpu, workers = self.machine.gpus[self.rank], min(EXCHANGE_WORKERS, self.machine.profile.workers)
        yield gpu.hold(workers)
        yield from begin()
        gpu.release(workers)


def state_fixup(at: Rank) -> Process:
    """From composed maps, where there are spans, to the entry states that an exchange fills."""
    plan = at.plan
    yield from FIXUPS[plan.fixup](at)
    if plan.fold_span > 1:
        segments = plan.rank_plan(at.rank).segments
        filled = [plan.finish == "entry_first" or segment.previous is not None for segment in segments]
        spans = [span for span in spans_of(plan, at.rank) if filled[span.segment]]
        yield from at.fold_in_spans(spans, sum(not span.starts for span in spans))


def local(at: Rank) -> Process:
    if at.plan.fold_span > 1 and not at.plan.crosses_ranks:
        yield from at.compose()
    yield at.fold_inside(own_links(at.plan, at.rank))
    if at.plan.fold_span > 1:
        spans = spans_of(at.plan, at.rank)
        yield from at.fold_in_spans(spans, sum(not span.starts and span.first > 0 for span in spans))


def chain(at: Rank) -> Process:
    plan, rank, machine = at.plan, at.rank, at.machine
    if mail_seconds(machine.profile, load_of(plan)) is not None:
        yield from _by_mail(at)
        return
    dim, heads = plan.head_dim, at.num_heads
    rows = [dim]
    if not machine.profile.folds_runs:
        blocks = row_blocks(dim, heads * dim * 4, FOLD_ROWS, MIN_BLOCK_BYTES)
        rows = [block.stop - block.start for block in blocks]
    rounds = chain_rounds(plan, rank, len(rows))
    for folds, receives in rounds:
        # only the last block may have fewer rows: the largest share stands for a round's
        share = max((rows[block] for _, block in folds), default=0) / dim
        yield at.fold([folded(link) for link, _ in folds], heads * share)
        sends = [(link.next_rank, at.state_bytes // dim * rows[b]) for link, b in folds if link.next_rank is not None]
        landing = [
            (link.previous_rank, at.state_bytes // dim * rows[b])
            for link, b in receives
            if link.previous_rank is not None
        ]
        yield from at.exchange(sends, landing)
    yield from at.leave()
    yield at.fold_inside(link for link in links_to_fill(plan, rank) if link.next_rank is None)


def _by_mail(at: Rank) -> Process:
    """A launch takes its states as they arrive, and hands on what it folds."""
    yield at.machine.engine.after(at.machine.profile.launch_s)
    for links in mail_links(at.plan, at.rank):
        for link in links:
            if not link.starts:
                yield at.machine.arrivals[link.sequence, link.depth]
        yield at.fold(map(folded, links))
        for link in links:
            if link.next_rank is not None:
                at.machine.mail(at.rank, link.next_rank, at.state_bytes, link.sequence, link.depth + 1)


@lru_cache(8)
def _before(plan: PrefillPlan) -> tuple[tuple[range, ...], ...]:
    """Per rank: for each of its links past the first of a crossing route, the maps to fold before it."""
    runs: list[list[range]] = [[] for _ in range(plan.world_size)]
    for route in crossing_routes(plan):
        maps = list(accumulate((link.num_maps for link in route[:-1]), initial=0))
        for link in route[1:]:
            runs[link.rank].append(range(1, maps[link.depth]))
    return tuple(map(tuple, runs))


@lru_cache(8)
def maps_before(plan: PrefillPlan) -> tuple[int, ...]:
    """Per rank: the maps of crossing routes before the last of its links of each."""
    numbers = [0] * plan.world_size
    for route in crossing_routes(plan):
        maps = list(accumulate((link.num_maps for link in route[:-1]), initial=0))
        last = {link.rank: link.depth for link in route}  # ascending depths: the deepest stays
        for rank, depth in last.items():
            numbers[rank] += maps[depth]
    return tuple(numbers)


@lru_cache(8)
def _shipped(plan: PrefillPlan) -> tuple[int, ...]:
    """Per rank: transitions and local states that it ships."""
    return tuple(manifest.num_transitions + manifest.num_local_states for manifest in manifests(plan))


def all_gather(at: Rank) -> Process:
    plan, machine, world = at.plan, at.machine, at.plan.world_size
    size = max(_shipped(plan)) * at.state_bytes

    def join() -> Event:
        machine.count(at.rank, world - 1, size * (world - 1), size * (world - 1))
        return machine.meet(f"maps {at.group}", machine.all_gather_seconds(size))

    yield at.copy(_shipped(plan)[at.rank] / 2)
    gathering = at.meet(join)
    yield at.fold_inside(at.starting())  # meanwhile
    yield gathering
    yield from at.leave()
    yield at.copy(maps_before(plan)[at.rank])
    yield at.fold(_before(plan)[at.rank])
    yield at.fold_inside(arrivals(plan)[at.rank])


class AllToAll:
    """Rank r sends `sent[r] * taken[p] * unit` bytes to rank p."""

    def __init__(self, machine: Machine, sent: Sequence[int], taken: Sequence[int], unit: int) -> None:
        self._machine, self._sent, self._taken, self._unit = machine, sent, taken, unit
        self._all_sent, self._all_taken = sum(sent), sum(taken)
        self._takers = sum(n > 0 for n in taken)
        self._seconds = machine.all_to_all_seconds([n * unit for n in sent], taken)

    def meet(self, rank: int, name: str) -> Event:
        sent, taken = self._sent[rank], self._taken[rank]
        messages = self._takers - (taken > 0) if sent else 0
        out, into = sent * (self._all_taken - taken), taken * (self._all_sent - sent)
        self._machine.count(rank, messages, out * self._unit, into * self._unit)
        return self._machine.meet(name, self._seconds)


@lru_cache(8)
def _exchanges(machine: Machine, plan: PrefillPlan, num_heads: int) -> tuple[tuple[int, ...], AllToAll, AllToAll]:
    """Per rank: the heads that it folds; maps to those who fold them; entry states back."""
    ranges = (head_range(rank, plan.world_size, num_heads) for rank in range(plan.world_size))
    heads = tuple(stop - start for start, stop in ranges)
    head_bytes = plan.head_dim**2 * 4
    there = AllToAll(machine, _shipped(plan), heads, head_bytes)
    return heads, there, AllToAll(machine, heads, [len(links) for links in arrivals(plan)], head_bytes)


def head_sharded(at: Rank) -> Process:
    plan, rank = at.plan, at.rank
    heads, there, back = _exchanges(at.machine, plan, at.num_heads)
    yield at.copy(_shipped(plan)[rank] / 2)
    exchange = at.meet(lambda: there.meet(rank, f"maps {at.group}"))
    yield at.fold_inside(at.starting())  # meanwhile
    yield exchange
    if heads[rank]:
        maps = [sum(link.num_maps for link in route[:-1]) for route in crossing_routes(plan)]
        yield at.copy(sum(maps), heads[rank])
        yield at.fold([range(1, n) for n in maps], heads[rank])
        yield at.copy(sum(map(len, arrivals(plan))) / 2, heads[rank])
    yield at.meet(lambda: back.meet(rank, f"entry states {at.group}"))
    yield from at.leave()
    yield at.copy(len(arrivals(plan)[rank]) / 2)
    yield at.fold_inside(arrivals(plan)[rank])


def tree(at: Rank) -> Process:
    plan, rank = at.plan, at.rank
    links = [link for link in own_links(plan, rank) if link.next_rank is not None]
    rounds = tree_rounds(plan, rank)
    yield at.fold([range(link.starts, link.num_maps - (not link.starts)) for link in links], alone=True)  # states
    yield at.fold([range(link.num_maps - 1) for link in links if not link.starts], alone=True)  # transitions
    for number, (sends, receives) in enumerate(rounds):
        outgoing = [(t.target.rank, (1 + t.whole) * at.state_bytes) for t in sends]
        landing = [(t.source.rank, (1 + t.whole) * at.state_bytes) for t in receives]
        packed = sum(t.whole for t in sends)
        yield at.copy(packed, launches=packed)
        yield from at.exchange(outgoing, landing)
        if number:  # the first is the hand-over
            yield at.fold([range(1) for _ in receives], alone=True)
            yield at.fold([range(1) for t in receives if t.whole], alone=True)
    yield from at.leave()
    number = len(arrivals(plan)[rank])
    yield at.copy(number / 2, launches=number)
    yield at.fold_inside(links_to_fill(plan, rank))


FIXUPS: dict[str, Callable[[Rank], Process]] = {
    "local": local,
    "chain": chain,
    "all_gather": all_gather,
    "head_sharded": head_sharded,
    "tree": tree,
}
