"""Our fixups as processes of a rank: the same schedule as `gdncp.collectives`, with times in place of tensors.

Each function mirrors the `run` of its namesake there, line by line: what it folds, sends and waits for, in that order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import accumulate

from gdncp.collectives.chain import MIN_BLOCK_BYTES, row_blocks
from gdncp.collectives.folding import MAX_BATCH
from gdncp.collectives.schedule import (
    Link,
    arrivals,
    chain_rounds,
    crossing_routes,
    head_range,
    manifests,
    own_links,
    tree_rounds,
)
from gdncp.plan import PrefillPlan
from gdncp.plan.cost import fold_seconds
from gdncp.simulate.engine import Event, Process
from gdncp.simulate.machine import Machine

FOLD_ROWS = 16  # V rows in multiples of which a backend's fold may be cut


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


def folded(link: Link) -> range:
    """Positions of a link's own maps at which something is folded: a first CP chunk's is taken as it is."""
    return range(int(link.starts), link.num_maps)


class Rank:
    """One rank's fixup: what it folds and where it waits."""

    def __init__(self, machine: Machine, plan: PrefillPlan, rank: int) -> None:
        self.machine, self.plan, self.rank = machine, plan, rank
        self.state_bytes = plan.num_state_heads * plan.head_dim**2 * 4

    def fold(self, runs: Iterable[range], heads: float | None = None) -> Event:
        """Fold runs, given as positions of maps, on this rank's GPU; `heads`: of how many, all by default."""
        plan = self.plan
        heads = plan.num_state_heads if heads is None else heads
        runs = [run for run in runs if run]  # a sequence of one CP chunk has nothing to fold
        maps = sum(map(len, runs))
        seconds = fold_seconds(self.machine.profile, fold_launches(runs), maps, heads, plan.head_dim)
        return self.machine.gpus[self.rank].use(seconds)

    def fold_inside(self, links: Iterable[Link]) -> Event:
        return self.fold(range(link.starts, link.num_maps - (link.next_rank is not None)) for link in links)

    def starting(self) -> Iterable[Link]:
        return (link for link in own_links(self.plan, self.rank) if link.starts)


def local(at: Rank) -> Process:
    yield at.fold_inside(own_links(at.plan, at.rank))


def chain(at: Rank) -> Process:
    plan, rank, machine = at.plan, at.rank, at.machine
    dim, heads = plan.head_dim, plan.num_state_heads
    rows = [dim]
    if not machine.profile.folds_runs:
        blocks = row_blocks(dim, heads * dim * 4, FOLD_ROWS, MIN_BLOCK_BYTES)
        rows = [block.stop - block.start for block in blocks]
    rounds = chain_rounds(plan, rank, len(rows))
    if rounds:
        yield machine.engine.after(machine.profile.collective_s)
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
        yield from machine.exchange(rank, sends, landing)
    yield at.fold_inside(link for link in own_links(plan, rank) if link.next_rank is None)


@lru_cache(8)
def _before(plan: PrefillPlan) -> tuple[tuple[range, ...], ...]:
    """Per rank: for each crossing route of which it has a link past the first, the maps to fold before its last."""
    runs: list[list[range]] = [[] for _ in range(plan.world_size)]
    for route in crossing_routes(plan):
        maps = list(accumulate((link.num_maps for link in route[:-1]), initial=0))
        last = {link.rank: link.depth for link in route}  # ascending depths: the deepest stays
        for rank, depth in last.items():
            if depth:
                runs[rank].append(range(1, maps[depth]))
    return tuple(map(tuple, runs))


@lru_cache(8)
def _shipped(plan: PrefillPlan) -> tuple[int, ...]:
    """Per rank: transitions and local states that it ships."""
    return tuple(manifest.num_transitions + manifest.num_local_states for manifest in manifests(plan))


def all_gather(at: Rank) -> Process:
    plan, machine, world = at.plan, at.machine, at.plan.world_size
    size = max(_shipped(plan)) * at.state_bytes
    machine.count(at.rank, world - 1, size * (world - 1), size * (world - 1))
    gathering = machine.meet("maps", machine.all_gather_seconds(size))
    yield at.fold_inside(at.starting())  # meanwhile
    yield gathering
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
def _exchanges(machine: Machine, plan: PrefillPlan) -> tuple[tuple[int, ...], AllToAll, AllToAll]:
    """Per rank: the heads that it folds; maps to those who fold them; entry states back."""
    ranges = (head_range(rank, plan.world_size, plan.num_state_heads) for rank in range(plan.world_size))
    heads = tuple(stop - start for start, stop in ranges)
    head_bytes = plan.head_dim**2 * 4
    there = AllToAll(machine, _shipped(plan), heads, head_bytes)
    return heads, there, AllToAll(machine, heads, [len(links) for links in arrivals(plan)], head_bytes)


def head_sharded(at: Rank) -> Process:
    plan, rank = at.plan, at.rank
    heads, there, back = _exchanges(at.machine, plan)
    exchange = there.meet(rank, "maps")
    yield at.fold_inside(at.starting())  # meanwhile
    yield exchange
    if heads[rank]:
        runs = [range(1, sum(link.num_maps for link in route[:-1])) for route in crossing_routes(plan)]
        yield at.fold(runs, heads[rank])
    yield back.meet(rank, "entry states")
    yield at.fold_inside(arrivals(plan)[rank])


def tree(at: Rank) -> Process:
    plan, rank, machine = at.plan, at.rank, at.machine
    links = [link for link in own_links(plan, rank) if link.next_rank is not None]
    rounds = tree_rounds(plan, rank)
    if any(sends or receives for sends, receives in rounds):
        yield machine.engine.after(machine.profile.collective_s)
    yield at.fold([range(link.starts, link.num_maps - (not link.starts)) for link in links])  # local states
    yield at.fold([range(link.num_maps - 1) for link in links if not link.starts])  # transitions
    for number, (sends, receives) in enumerate(rounds):
        outgoing = [(t.target.rank, (1 + t.whole) * at.state_bytes) for t in sends]
        landing = [(t.source.rank, (1 + t.whole) * at.state_bytes) for t in receives]
        yield from machine.exchange(rank, outgoing, landing)
        if number:  # the first is the hand-over
            yield at.fold([range(1) for _ in receives])
            yield at.fold([range(1) for t in receives if t.whole])
    yield at.fold_inside(own_links(plan, rank))


FIXUPS: dict[str, Callable[[Rank], Process]] = {
    "local": local,
    "chain": chain,
    "all_gather": all_gather,
    "head_sharded": head_sharded,
    "tree": tree,
}
