"""The cost of fixups (a message takes α + bytes / β), and of whole plans.  Everything in seconds and bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from gdncp.plan.columns import Segments
from gdncp.plan.layout import num_spans
from gdncp.plan.overlap import prefill_beside
from gdncp.plan.profiles import CostProfile
from gdncp.plan.stage_model import StageModel

if TYPE_CHECKING:
    from gdncp.plan.prefill_plan import PrefillPlan

STAGES = ("precompute_t", "precompute_mn", "state_fixup", "cp_prefill")


# ---- stage 3


class FixupLoad(NamedTuple):
    """What a fixup has to do, over the sequences that cross ranks."""

    world_size: int
    num_hops: int  # rank to rank, along the sequence that has most of them; 0: nothing crosses
    num_maps: int  # that a later rank needs, over all of these sequences
    depth: int  # most maps along one sequence, which are folded one after the other
    maps_per_rank: int  # of those, on the rank that has most
    states_per_rank: int  # sequences that go on elsewhere, on the rank that has most
    num_heads: int
    head_dim: int
    fold_span: int = 1  # where it is more, maps and depth above are of spans
    cp_chunks_per_rank: int = 0  # and so many of these are in the spans of the rank that has most
    by_mail: bool = True  # a chain may hand states on inside its folds, where the machine lets it, see `mail_seconds`

    @property
    def state_bytes(self) -> int:
        return self.num_heads * self.head_dim * self.head_dim * 4

    @property
    def map_bytes(self) -> int:
        return 2 * self.state_bytes  # (M, N) with K = V


def load_of(plan: PrefillPlan) -> FixupLoad:
    """By mail as `gdncp.collectives.peer_memory` lets plans."""
    load = fixup_load(plan.pieces, plan.world_size, plan.num_state_heads, plan.head_dim, plan.fold_span)
    return load._replace(by_mail=plan.finish == "entry_first" and len(plan.head_groups) == 1)


def fixup_load(pieces: Segments, world_size: int, num_heads: int, head_dim: int, fold_span: int = 1) -> FixupLoad:
    goes_on = ~pieces.is_last
    hops = np.bincount(pieces.sequence[goes_on]) if goes_on.any() else np.zeros(1, dtype=np.int64)
    num_spans = pieces.num_spans(fold_span)
    items = np.bincount(pieces.sequence, weights=num_spans)
    crossing = np.flatnonzero(hops)
    ranks, handed_on = pieces.rank[goes_on], num_spans[goes_on]
    maps_of = np.bincount(ranks, weights=handed_on, minlength=world_size)
    takes_part = goes_on | ~pieces.is_first
    cp_chunks_of = np.bincount(pieces.rank[takes_part], weights=pieces.num_items[takes_part], minlength=world_size)
    return FixupLoad(
        world_size,
        num_hops=int(hops.max()),
        num_maps=int(handed_on.sum()),
        depth=int(items[crossing].max(initial=1)) - 1,
        maps_per_rank=int(maps_of.max()),
        states_per_rank=int(np.bincount(ranks, minlength=world_size).max()),
        num_heads=num_heads,
        head_dim=head_dim,
        fold_span=fold_span,
        cp_chunks_per_rank=int(cp_chunks_of.max()),
    )


def fold_seconds(
    profile: CostProfile, depth: int, num_maps: float, num_heads: float, head_dim: int, alone: bool = False
) -> float:
    """Folding `num_maps` maps, `depth` of them one after the other.

    alone: each step is a launch of its own, also where a launch takes whole runs.
    """
    step = profile.launch_s if alone and profile.folds_runs else profile.fold_launch_s
    return depth * step + num_maps * num_heads * profile.fold_head_s * (head_dim / 128) ** 3


def copy_seconds(profile: CostProfile, num_maps: float, num_heads: float, head_dim: int, launches: int = 1) -> float:
    """Copying maps, of which a transition is a half.

    A fold of whole runs takes what it moves, and copying a map moves as much, give or take a quarter (75 ns a head at
    an H200's 3.5 TB/s); another fold takes much longer than a copy, of which only the launch counts then.
    """
    moved = num_maps * num_heads * profile.fold_head_s * (head_dim / 128) ** 2 if profile.folds_runs else 0.0
    return launches * profile.fold_launch_s + moved


def span_launches(profile: CostProfile) -> int:
    """What a step inside spans takes: many are folded at a time, by three copies more where no launch takes runs."""
    return 1 if profile.folds_runs else 4


def local_seconds(
    profile: CostProfile, depth: int, num_maps: float, num_heads: float, head_dim: int, fold_span: int
) -> float:
    """`fold_seconds` of what a rank folds by itself, with composed maps of so many CP chunks; 1: without."""
    if fold_span == 1 or depth < fold_span:
        return fold_seconds(profile, depth, num_maps, num_heads, head_dim)
    along = fold_seconds(profile, depth // fold_span, num_maps / fold_span, num_heads, head_dim)
    return along + spans_seconds(profile, fold_span, num_maps, num_heads, head_dim)


def span_start(profile: CostProfile, num_runs: float, num_heads: float, head_dim: int) -> float:
    """What a launch of the two takes beside its folds; a program takes 32 rows of V.

    On an H200 calls with 16 and 33 maps at 8 and 4 heads take 15 to 34 us more with spans of 2 to 6 CP chunks
    (`bench/fold_spans.py`), and 9 to 21 by this.
    """
    waves = math.ceil(num_runs * num_heads * head_dim / 32 / profile.workers)
    return profile.launch_s / 2 + waves * profile.fold_launch_s


def spans_seconds(profile: CostProfile, fold_span: int, num_maps: float, num_heads: float, head_dim: int) -> float:
    """Composing maps, which costs two folds each, and in the end folding inside spans; of all spans side by side.

    Two launches, where one takes whole runs, in more than one wave of programs that each start anew; else local states
    and transitions are composed one after the other, and entry states are copied in the end.
    """
    depth = fold_span - 1
    folded = num_maps * depth / fold_span  # of each span all but the first

    def fold(steps: int, times: int) -> float:
        return fold_seconds(profile, span_launches(profile) * steps, times * folded, num_heads, head_dim)

    if profile.folds_runs:
        starts = sum(span_start(profile, n * num_maps / fold_span, num_heads, head_dim) for n in (2, 1))
        return starts + fold(depth, 2) + fold(depth, 1)
    copied = copy_seconds(profile, num_maps / fold_span, num_heads, head_dim, launches=2)
    return fold(2 * depth, 2) + fold(depth, 1) + copied


MOST_MAIL_BYTES, _PLACES_BYTES = 1 << 28, 16 + 2 * 4096  # as `gdncp.collectives.peer_memory` has them, a channel


def mail_seconds(profile: CostProfile, load: FixupLoad) -> float | None:
    """What a hop takes by mail, one state at a time; None: states go by messages."""
    if not (profile.mail_s and profile.folds_runs and load.by_mail and load.world_size <= profile.ranks_per_node):
        return None
    channels = max(load.states_per_rank * load.num_heads * (load.head_dim // 8), 1)
    if load.world_size * (1 << (channels - 1).bit_length()) * _PLACES_BYTES > MOST_MAIL_BYTES:
        return None
    return profile.mail_s + load.state_bytes / profile.bytes_per_s


def fixup_seconds(profile: CostProfile, load: FixupLoad) -> dict[str, float]:
    """Strategy -> seconds from when all ranks have their maps until the last one has its entry states.

    The same rounds as the program's, with the slowest rank's work in each: `gdncp.simulate` has them rank by rank.
    """
    strategies = {"chain": _chain, "all_gather": _all_gather, "head_sharded": _head_sharded, "tree": _tree}
    inside = 0.0
    if load.fold_span > 1:
        span = min(load.fold_span, load.cp_chunks_per_rank)
        inside = spans_seconds(profile, span, load.cp_chunks_per_rank, load.num_heads, load.head_dim)
    return {name: seconds(profile, load) + inside for name, seconds in strategies.items()}


def _fold(
    profile: CostProfile,
    load: FixupLoad,
    depth: int,
    num_maps: float,
    num_heads: float | None = None,
    alone: bool = False,
) -> float:
    return fold_seconds(profile, depth, num_maps, num_heads or load.num_heads, load.head_dim, alone)


def _copy(
    profile: CostProfile, load: FixupLoad, num_maps: float, num_heads: float | None = None, launches: int = 1
) -> float:
    return copy_seconds(profile, num_maps, num_heads or load.num_heads, load.head_dim, launches)


def _message(profile: CostProfile, size: float, *, far: bool) -> float:
    if far:
        return profile.node_message_s + size / profile.node_bytes_per_s
    return profile.message_s + size / profile.bytes_per_s


def _chain(profile: CostProfile, load: FixupLoad) -> float:
    """The first block of rows goes all the way, the others follow a round behind; a first CP chunk is not folded.

    By mail all launches are there before their states arrive, and nothing starts a collective.
    """
    blocks = 1
    if not profile.folds_runs:
        rows = 16 * max(1, math.ceil(load.head_dim * (1 << 20) / (16 * load.state_bytes)))  # a block of a MiB at least
        blocks = math.ceil(load.head_dim / rows)
    # of several states that a rank hands on, those of one sequence follow each other
    together = min(load.states_per_rank, max(round(load.states_per_rank * load.world_size / load.num_hops), 1))
    block, heads = load.state_bytes / blocks * together, load.num_heads / blocks
    if (mail := mail_seconds(profile, load)) is not None:
        hop = mail + (block - load.state_bytes) / profile.bytes_per_s
        maps = max(load.depth - 1, load.maps_per_rank) if load.depth > 1 else 0
        folds = _fold(profile, load, load.depth - 1, maps)
        return profile.launch_s + load.num_hops * hop + folds
    far_hops = load.num_hops // profile.ranks_per_node if load.world_size > profile.ranks_per_node else 0
    near, far = (_message(profile, block, far=is_far) for is_far in (False, True))
    hops = (load.num_hops - far_hops) * near + far_hops * far
    folds = _fold(profile, load, load.depth - 1, max(load.depth - 1, load.maps_per_rank), heads)
    slowest_round = (far if far_hops else near) + _fold(profile, load, load.maps_per_rank, load.maps_per_rank, heads)
    return profile.collective_s + hops + folds + (blocks - 1) * slowest_round


def _all_gather(profile: CostProfile, load: FixupLoad) -> float:
    """A ring whose rails between nodes run side by side, at half their peak."""
    rate = profile.bytes_per_s
    if load.world_size > profile.ranks_per_node:
        rate = min(rate, profile.node_bytes_per_s * max(profile.ranks_per_node / 2, 1))
    # every rank is padded to the most; a first CP chunk has no transition
    volume = (load.world_size - 1) * (2 * load.maps_per_rank - (load.num_hops == 1)) * load.state_bytes
    folds = _fold(profile, load, load.depth - 1, load.num_maps - 1)
    copies = _copy(profile, load, load.maps_per_rank) + _copy(profile, load, load.num_maps)  # packed, unpacked
    return profile.collective_s + profile.message_s + volume / rate + folds + copies


def _head_sharded(profile: CostProfile, load: FixupLoad) -> float:
    """Maps there, entry states back; with more ranks than heads a few ranks take, and send, everything."""
    world, node = load.world_size, min(load.world_size, profile.ranks_per_node)
    own_heads = math.ceil(load.num_heads / world)
    share = own_heads / load.num_heads  # of the heads, on a rank that folds some
    states = min(load.states_per_rank * world, load.num_maps)  # handed on, in all
    most, everything = load.maps_per_rank * load.map_bytes, load.num_maps * load.map_bytes
    seconds = _fold(profile, load, load.depth - 1, load.num_maps - 1, own_heads)
    # maps are packed and unpacked, and so are entry states, half a map each
    seconds += _copy(profile, load, load.maps_per_rank) + _copy(profile, load, load.num_maps, own_heads)
    seconds += _copy(profile, load, states / 2, own_heads) + _copy(profile, load, load.states_per_rank / 2)
    apart = (world - node) / world  # of the others, in other nodes
    peers = max(min(world, load.num_heads), math.ceil(load.num_maps / load.maps_per_rank)) * apart
    for size in (max(most, everything * share), load.state_bytes * max(load.states_per_rank, states * share)):
        near = size * (node - 1) / world / profile.bytes_per_s
        far = size * apart / profile.node_bytes_per_s + peers * profile.node_peer_s / 2
        latency = max(profile.message_s, profile.node_message_s if world > node else 0.0)
        seconds += profile.collective_s + latency + max(near, far)
    return seconds


def _tree(profile: CostProfile, load: FixupLoad) -> float:
    """A hand-over of maps, then strides of 1, 2, 4 ...: composing is two products of a fold's size, and the last stride
    is of states.  Between nodes some rank's partner is in another one at every stride, and the others wait for it."""
    far = load.world_size > profile.ranks_per_node
    strides = [1 << i for i in range(math.ceil(math.log2(load.num_hops)))] if load.num_hops > 1 else []
    number = load.states_per_rank

    def message(stride: int, size: int) -> float:
        # the parts that a rank has of one sequence send in opposite directions: one of two leaves the node on short
        # ways
        leaving = number if stride >= profile.ranks_per_node or not far else math.ceil(number / 2)
        return _message(profile, leaving * size, far=far)

    packing = _copy(profile, load, number, launches=number)  # of maps; states are sent from where they are
    seconds = profile.collective_s + message(1, load.map_bytes if strides else load.state_bytes)
    seconds += packing * bool(strides) + _copy(profile, load, number / 2, launches=number)  # in the end, entry states
    for stride in strides[:-1]:
        seconds += packing + message(stride, load.map_bytes) + _fold(profile, load, 2, 2 * number, alone=True)
    if strides:
        seconds += message(strides[-1], load.state_bytes) + _fold(profile, load, 1, number, alone=True)
    # within a rank: composing, then folding through
    within = _fold(profile, load, 2, 2, alone=True) + _fold(profile, load, 1, 1)
    return seconds + (load.maps_per_rank - 1) * within


# ---- the whole plan


def flat_seconds(plan: PrefillPlan) -> float:
    """What stage 3 would take on the plan's grid if no maps were composed."""
    if plan.crosses_ranks:
        load = fixup_load(plan.pieces, plan.world_size, plan.num_state_heads, plan.head_dim)
        return fixup_seconds(plan.profile, load._replace(by_mail=load_of(plan).by_mail))[plan.fixup]
    return max(
        fold_seconds(plan.profile, max(w.local, default=0), sum(w.local), plan.num_state_heads, plan.head_dim)
        for w in plan.rank_work
    )


def fixup_bytes(plan: PrefillPlan) -> tuple[int, ...]:
    """Bytes that each rank sends in the fixup, or in those of its groups of heads: what `gdncp.collectives` puts on the
    wire."""
    return tuple(map(sum, zip(*(_group_bytes(plan, stop - start) for start, stop in plan.head_groups), strict=True)))


def _group_bytes(plan: PrefillPlan, heads: int) -> tuple[int, ...]:
    world = plan.world_size
    state = FixupLoad(world, 0, 0, 0, 0, 0, heads, plan.head_dim).state_bytes
    handed_on, arrivals, shipped = ([0] * world for _ in range(3))
    for segment in plan.segments:
        arrivals[segment.rank] += segment.previous is not None
        if segment.next is not None:
            handed_on[segment.rank] += 1
            # a transition and a local state per CP chunk or span; of a sequence's first, the local state alone
            shipped[segment.rank] += 2 * num_spans(segment, plan.fold_span) - (segment.previous is None)
    if plan.fixup == "chain":
        return tuple(n * state for n in handed_on)
    if plan.fixup == "all_gather":
        return (max(shipped) * state * (world - 1),) * world
    if plan.fixup == "head_sharded":
        own = [(r + 1) * heads // world - r * heads // world for r in range(world)]
        head = state // heads
        return tuple(
            shipped[r] * (heads - own[r]) * head + own[r] * (sum(arrivals) - arrivals[r]) * head for r in range(world)
        )
    if plan.fixup == "tree":
        return _tree_bytes(plan, state)
    return (0,) * world


def _tree_bytes(plan: PrefillPlan, state_bytes: int) -> tuple[int, ...]:
    """Per round of stride s, segment d sends to d + s; a state alone where what it holds begins at the start."""
    sent = [0] * plan.world_size
    for first in plan.segments:
        if first.previous is not None or first.next is None:
            continue
        ranks = [first.rank]
        while (following := plan.segments[first.index + len(ranks) - 1].next) is not None:
            ranks.append(plan.segments[following].rank)
        for d in range(len(ranks) - 1):
            sent[ranks[d]] += state_bytes * (1 + (d > 0))
        stride = 1
        while stride < len(ranks) - 1:
            for d in range(1, len(ranks) - stride):
                sent[ranks[d]] += state_bytes * (1 + (d > stride)) * (ranks[d] != ranks[d + stride])
            stride *= 2
    return tuple(sent)


def total_seconds(plan: PrefillPlan, head_half_lives: Sequence[float] | None) -> float:
    """Until the slowest rank is done, with such gates."""
    half_lives = None if head_half_lives is None else tuple(head_half_lives)
    known = plan.total_seconds
    if half_lives not in known:
        model = plan.stage_model
        if half_lives != plan.head_half_lives:
            model = replace(plan, head_half_lives=half_lives).stage_model
        known[half_lives] = max(map(sum, zip(*predict(plan, model).values(), strict=True)))
    return known[half_lives]


def predict(plan: PrefillPlan, model: StageModel) -> dict[str, tuple[float, ...]]:
    """Stage -> seconds per rank.  A fixup that crosses ranks begins and ends with the slowest rank that takes part.

    An exchange that runs beside stage 4 is part of "cp_prefill".
    """
    profile, heads, works = plan.profile, plan.num_state_heads, plan.rank_work
    crossing = plan.fixup_seconds[plan.fixup] if plan.crosses_ranks else 0.0
    beside = plan.finish == "entry_late"
    span = 1 if plan.crosses_ranks else plan.fold_span  # an exchange composes maps already
    ranks = [
        (
            model.seconds(work.kinds),
            local_seconds(profile, max(work.local, default=0), sum(work.local), heads, plan.head_dim, span),
        )
        for work in works
    ]
    starts_at = [t + mn + fold * (not beside) for (t, mn, _), fold in ranks]
    slowest = max((at for at, work in zip(starts_at, works, strict=True) if work.takes_part), default=0.0)
    columns = []
    for work, ((t, mn, prefill), fold) in zip(works, ranks, strict=True):
        exchange = max(slowest + crossing - (t + mn + fold), 0.0) if work.takes_part else 0.0
        if beside and t:
            prefill, exchange = prefill_beside(model, work.runs, plan.cp_chunk_len, exchange), 0.0
        columns.append((t, mn, fold + exchange, prefill))
    return dict(zip(STAGES, zip(*columns, strict=True), strict=True))
