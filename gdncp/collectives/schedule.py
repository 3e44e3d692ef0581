"""Who sends what to whom, and in which order: pure functions of the plan, the same on every rank, cached per plan.

A sequence's segments are the links of its route: link d hands a state to link d + 1, on another rank.  Nothing here
knows of tensors or process groups.
"""

from __future__ import annotations

from collections import defaultdict
from functools import lru_cache
from typing import NamedTuple

from gdncp.plan import PrefillPlan
from gdncp.plan.layout import num_spans

_CACHE_SIZE = 256  # plans are compared by their digest, so an entry cannot go stale


class Link(NamedTuple):
    """A segment as its route sees it.  With `plan.fold_span` > 1 rows and maps are of spans, else of CP chunks."""

    sequence: int
    depth: int  # its place among the segments of its sequence
    rank: int
    item: int  # first entry-state row on its rank; the segment's rows follow each other
    row: int  # first map row on its rank; likewise
    num_maps: int  # one per span or CP chunk that passes a state on
    previous_rank: int | None  # who hands it its entry state; None: it starts the sequence
    next_rank: int | None  # whom it hands its exit state; None: it ends the sequence

    @property
    def starts(self) -> bool:
        return self.previous_rank is None


Route = tuple[Link, ...]


@lru_cache(_CACHE_SIZE)
def all_routes(plan: PrefillPlan) -> tuple[Route, ...]:
    """Every sequence's links, sequences in order."""
    routes: list[list[Link]] = [[] for _ in plan.seq_lens]
    next_item, next_row = [0] * plan.world_size, [0] * plan.world_size
    for segment in plan.segments:
        num_items = num_spans(segment, plan.fold_span)
        num_maps = num_items - (segment.next is None)
        routes[segment.sequence].append(
            Link(
                sequence=segment.sequence,
                depth=len(routes[segment.sequence]),
                rank=segment.rank,
                item=next_item[segment.rank],
                row=next_row[segment.rank],
                num_maps=num_maps,
                previous_rank=None if segment.previous is None else plan.segments[segment.previous].rank,
                next_rank=None if segment.next is None else plan.segments[segment.next].rank,
            )
        )
        next_item[segment.rank] += num_items
        next_row[segment.rank] += num_maps
    return tuple(map(tuple, routes))


@lru_cache(_CACHE_SIZE)
def crossing_routes(plan: PrefillPlan) -> tuple[Route, ...]:
    """The routes that leave a rank: all that a collective has to do with."""
    return tuple(route for route in all_routes(plan) if len(route) > 1)


def own_links(plan: PrefillPlan, rank: int) -> tuple[Link, ...]:
    """The rank's links, those of sequences that cross no rank included, in the order of their items."""
    return _links_of_ranks(plan)[rank]


@lru_cache(_CACHE_SIZE)
def _links_of_ranks(plan: PrefillPlan) -> tuple[tuple[Link, ...], ...]:
    links: list[list[Link]] = [[] for _ in range(plan.world_size)]
    for route in all_routes(plan):
        for link in route:
            links[link.rank].append(link)
    return tuple(map(tuple, links))


def links_to_fill(plan: PrefillPlan, rank: int) -> tuple[Link, ...]:
    """The rank's links whose entry states an exchange fills, see `state_fixup`."""
    return arrivals(plan)[rank] if plan.finish == "entry_late" else own_links(plan, rank)


# ---- chain


class ChainRound(NamedTuple):
    """What one rank does in one round: fold, then send what was folded and receive, all at once."""

    folds: tuple[tuple[Link, int], ...]  # (link, block of V rows): fold through it and send to `link.next_rank`
    receives: tuple[tuple[Link, int], ...]  # (link, block): its entry state from `link.previous_rank`


@lru_cache(_CACHE_SIZE)
def chain_rounds(plan: PrefillPlan, rank: int, num_blocks: int) -> tuple[ChainRound, ...]:
    """The rank's rounds of a chain; rounds in which it has nothing to do are left out.

    Link d folds block b in round d + b and its successor receives it in that round, so blocks follow each other through
    the ranks and sequences do not wait for one another.  Both ends list a round's messages in one order (sequence,
    depth), and a rank enters a round once all that it needs was received in earlier ones: no ownership can deadlock,
    also where a transport makes a pair of ranks exchange in order.
    """
    folds: dict[int, list[tuple[Link, int]]] = defaultdict(list)
    receives: dict[int, list[tuple[Link, int]]] = defaultdict(list)
    for link in own_links(plan, rank):  # those of a sequence that crosses no rank hand nothing on and get nothing
        for block in range(num_blocks):
            if link.next_rank is not None:
                folds[link.depth + block].append((link, block))
            if link.previous_rank is not None:
                receives[link.depth - 1 + block].append((link, block))
    rounds = sorted(folds.keys() | receives.keys())
    return tuple(ChainRound(tuple(folds[t]), tuple(receives[t])) for t in rounds)


@lru_cache(_CACHE_SIZE)
def message_numbers(plan: PrefillPlan) -> dict[Link, int]:
    """Of each link that hands a state on: how many others before it, in the order of (sequence, depth), do so between
    the same two ranks, in the same direction."""
    counts: dict[tuple[int, int], int] = defaultdict(int)
    numbers = {}
    for route in crossing_routes(plan):
        for link in route[:-1]:
            assert link.next_rank is not None
            numbers[link] = counts[link.rank, link.next_rank]
            counts[link.rank, link.next_rank] += 1
    return numbers


def most_messages(plan: PrefillPlan) -> int:
    """From one rank to another in one call."""
    return 1 + max(message_numbers(plan).values(), default=-1)


# ---- all_gather and head_sharded


class Parcel(NamedTuple):
    """Where a link's maps lie in what its rank ships: transitions and local states are counted apart."""

    link: Link
    transition: int  # its first transition; a first CP chunk ships none, its local state is its exit state
    local_state: int


class Manifest(NamedTuple):
    """What one rank ships: the maps of its links that another link of their sequence follows."""

    parcels: tuple[Parcel, ...]
    num_transitions: int
    num_local_states: int


@lru_cache(_CACHE_SIZE)
def manifests(plan: PrefillPlan) -> tuple[Manifest, ...]:
    """Per rank."""
    parcels: list[list[Parcel]] = [[] for _ in range(plan.world_size)]
    transitions = [0] * plan.world_size
    local_states = [0] * plan.world_size
    for route in crossing_routes(plan):
        for link in route[:-1]:
            parcels[link.rank].append(Parcel(link, transitions[link.rank], local_states[link.rank]))
            transitions[link.rank] += link.num_maps - link.starts
            local_states[link.rank] += link.num_maps
    return tuple(map(Manifest, map(tuple, parcels), transitions, local_states))


@lru_cache(_CACHE_SIZE)
def parcel_routes(plan: PrefillPlan) -> tuple[tuple[Parcel, ...], ...]:
    """Per crossing route: the parcels of its links, all but the last link's, which ships nothing."""
    of_link = {parcel.link: parcel for manifest in manifests(plan) for parcel in manifest.parcels}
    return tuple(tuple(of_link[link] for link in route[:-1]) for route in crossing_routes(plan))


@lru_cache(_CACHE_SIZE)
def arrivals(plan: PrefillPlan) -> tuple[tuple[Link, ...], ...]:
    """Per rank: its links whose entry state comes from another rank."""
    return tuple(
        tuple(link for link in own_links(plan, rank) if link.previous_rank is not None)
        for rank in range(plan.world_size)
    )


def head_range(rank: int, world_size: int, num_heads: int) -> tuple[int, int]:
    """The heads [start, stop) that a rank folds for all; empty for some where there are more ranks than heads."""
    return rank * num_heads // world_size, (rank + 1) * num_heads // world_size


# ---- tree


class Transfer(NamedTuple):
    source: Link
    target: Link
    whole: bool  # the transition too; not where what is sent begins at the sequence's start, hence is a state


class TreeRound(NamedTuple):
    sends: tuple[Transfer, ...]
    receives: tuple[Transfer, ...]


def tree_rounds(plan: PrefillPlan, rank: int) -> tuple[TreeRound, ...]:
    """The rank's rounds of a tree; both ends list a round's messages in one order (sequence, depth).

    First every link hands its own composed map to its successor.  Then, with a stride of 1, 2, 4, ..., link d sends
    what it holds to link d + stride, which composes: after a stride of s, link d holds the maps of links
    max(0, d − 2s) ... d − 1.
    """
    return _tree_rounds_of_ranks(plan)[rank]


@lru_cache(_CACHE_SIZE)
def _tree_rounds_of_ranks(plan: PrefillPlan) -> tuple[tuple[TreeRound, ...], ...]:
    """All ranks' at once: each alone would look at all transfers to keep its own."""
    longest = max((len(route) for route in crossing_routes(plan)), default=0)
    strides = [0]  # the hand-over; then strides between links that hold something
    while (stride := 1 << (len(strides) - 1)) < longest - 1:
        strides.append(stride)
    of_rounds = []
    for stride in strides:
        sends: list[list[Transfer]] = [[] for _ in range(plan.world_size)]
        receives: list[list[Transfer]] = [[] for _ in range(plan.world_size)]
        for route in crossing_routes(plan):
            for d in range(min(stride, 1), len(route) - max(stride, 1)):
                transfer = Transfer(route[d], route[d + max(stride, 1)], whole=d > stride)
                sends[transfer.source.rank].append(transfer)
                receives[transfer.target.rank].append(transfer)
        of_rounds.append([TreeRound(tuple(a), tuple(b)) for a, b in zip(sends, receives, strict=True)])
    return tuple(zip(*of_rounds, strict=True))
