"""What the stages that compute take, by the schedule of their units on a profile's workers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from gdncp.plan.checks import CHUNK
from gdncp.plan.layout import Grid
from gdncp.plan.list_schedule import Launch, Units, Workers, finish, in_order
from gdncp.plan.profiles import CostProfile

_MOST_KNOWN = 1 << 13  # schedules that a model keeps
_INTERLEAVED = 4  # parts in which equal CP chunks are scheduled, so that heads that read more and less alternate


class Kind(NamedTuple):
    """CP chunks that cost the same."""

    num_chunks: int  # 64-token chunks
    is_first: bool
    is_last: bool


_kind = lru_cache(1 << 13)(Kind)  # most are like others


@lru_cache(1 << 13)  # gates, openings and lanes are compared on one grid
def kinds_of_run(grid: Grid, start: int, stop: int, seq_len: int) -> tuple[tuple[Kind, int], ...]:
    """The CP chunks of the run [start, stop) of a sequence of so many tokens, in order; the first by itself."""
    if start == stop:
        return ()
    first, last = grid.cell(start) if start else 0, grid.cell(stop - 1)
    ends = stop == seq_len
    if first == last:
        return ((_kind(_chunks(stop - start), start == 0, ends), 1),)
    one = (_kind(_chunks(grid.start(first + 1) - start), start == 0, False), 1)
    other = (_kind(_chunks(stop - grid.start(last)), False, ends), 1)
    if last - first == 1:
        return one, other
    return one, (_kind(_chunks(grid.length), False, False), last - first - 1), other


def _chunks(tokens: int) -> int:
    return -(-tokens // CHUNK)


class StageSeconds(NamedTuple):
    precompute_t: float
    precompute_mn: float
    cp_prefill: float


class _KindCosts(NamedTuple):
    """What a CP chunk of some kind costs, in units."""

    opened: bool  # stage 2's launch does its stage 4
    prefill: float  # seconds of a unit of stage 4, of which every head has one
    scans: tuple[Units, ...]  # heads, and seconds of a unit of theirs: of N by what it reads, then of M
    most_parts: int  # in which the scans of many are scheduled


class StageModel:
    """Costs of stages 1, 2 and 4 for one layer shape."""

    def __init__(
        self,
        profile: CostProfile,
        num_heads: int,
        num_k_heads: int,
        head_dim: int,
        head_half_lives: Sequence[float] | None = None,
        forget_below: float | None = None,
    ) -> None:
        self.profile = profile
        self.num_heads = num_heads
        self.num_k_heads = num_k_heads
        self.head_dim = head_dim
        self.scale = (head_dim / 128) ** 2
        self._seconds: dict[frozenset[tuple[Kind, float]], StageSeconds] = {}
        self._beside: dict[tuple[object, ...], float] = {}
        self._costs: dict[Kind, _KindCosts] = {}
        bits = profile.forget_bits
        if forget_below is not None:
            bits = -math.log2(forget_below) if forget_below else math.inf
        self.memories = _memories([half_life * bits for half_life in head_half_lives or [math.inf] * num_heads])

    def seconds(self, kinds: Mapping[Kind, float]) -> StageSeconds:
        """Of a rank that has so many CP chunks of each kind; counts need not be whole."""
        key = frozenset(kinds.items())
        seconds = self._seconds.get(key)
        if seconds is None:  # many ranks are alike
            t, maps, prefills = self._launches(kinds)
            # stage 4 is launched even where stage 2 has left it nothing to do
            seconds = StageSeconds(t, self._schedule(maps) if maps else 0.0, self._schedule(prefills) if t else 0.0)
            if len(self._seconds) == _MOST_KNOWN:
                self._seconds.clear()
            self._seconds[key] = seconds
        return seconds

    def prefill_beside(self, early: Mapping[Kind, float], late: Mapping[Kind, float], exchange: float) -> float:
        """Stage 4 of so many pairs of CP chunk and head, the late ones behind an exchange that starts when it does.

        Where the early ones fill all workers, the exchange is held up until the first of them are done.
        """
        key = (frozenset(early.items()), frozenset(late.items()), exchange)
        if key not in self._beside:
            if len(self._beside) == _MOST_KNOWN:
                self._beside.clear()
            self._beside[key] = self._prefill_beside(self.prefills(early), self.prefills(late), exchange)
        return self._beside[key]

    def _prefill_beside(self, first: Sequence[Units], second: Sequence[Units], exchange: float) -> float:
        workers = Workers(self.profile.workers)
        if sum(number for number, _ in first) >= self.profile.workers:
            exchange += max(seconds for _, seconds in first)
        workers.run(first)
        if second:
            workers.wait_until(exchange)
            workers.run(second)
        return self.profile.launch_s + max(workers.finish, exchange)

    def prefills(self, pairs: Mapping[Kind, float]) -> list[Units]:
        """Units of stage 4 of so many pairs of CP chunk and head."""
        return [
            (round(count) or 1, self._costs_of(kind).prefill)
            for kind, count in sorted(pairs.items(), reverse=True)
            if count and kind.num_chunks and not self._costs_of(kind).opened
        ]

    def forgetting_heads(self, tokens: int) -> int:
        """Heads that forget within so many tokens."""
        return sum(heads for memory, heads in self.memories if memory < tokens)

    def work(self, kind: Kind) -> tuple[float, float]:
        """Seconds of one worker for one CP chunk in stages 1 and 2, and in stage 4."""
        costs = self._costs_of(kind)
        tiles = (self._precompute_t(kind.num_chunks) - self.profile.launch_s) * self.profile.workers
        outputs = self.num_heads * costs.prefill
        if costs.opened:
            return tiles + outputs, 0.0
        return tiles + sum([heads * seconds for heads, seconds in costs.scans]), outputs

    def least_seconds(self, kinds: Mapping[Kind, float]) -> float:
        """A lower bound on the sum of `seconds`, without a schedule."""
        seconds, *launches = self._launches(kinds)
        for launch in filter(None, launches):
            work: list[float] = []
            for units, times in launch:
                work += [number * each for number, each in units] * times
            longest = max([each for units, _ in launch for _, each in units])
            seconds += self.profile.launch_s + max(sum(work) / self.profile.workers, longest)
        return seconds

    def launches(self, kinds: Mapping[Kind, float]) -> tuple[float, list[Units], list[Units]]:
        """Seconds of stage 1, units of stage 2's launch and units of stage 4's, in the order in which they start."""
        t, maps, prefills = self._launches(kinds)
        return t, in_order(maps), in_order(prefills)

    def _launches(self, kinds: Mapping[Kind, float]) -> tuple[float, Launch, Launch]:
        openings: list[Units] = []
        prefills: list[Units] = []
        scans: Launch = ()
        chunks = 0.0
        for kind, count in sorted(kinds.items(), reverse=True):  # longest first
            chunks += kind.num_chunks * count
            costs = self._costs_of(kind)
            whole = (round(count * self.num_heads) or 1, costs.prefill)
            if costs.opened:
                openings.append(whole)
            else:
                prefills.append(whole)
                if costs.scans:
                    parts = min(max(math.floor(count), 1), costs.most_parts)
                    each = count / parts
                    units = tuple([(round(each * heads) or 1, seconds) for heads, seconds in costs.scans])
                    scans += ((units, parts),)
        if not chunks:
            return 0.0, (), ()
        opened: Launch = ((tuple(reversed(openings)), 1),) if openings else ()
        return self._precompute_t(chunks), opened + scans, ((tuple(prefills), 1),) if prefills else ()

    def _precompute_t(self, chunks: float) -> float:
        profile = self.profile
        tiles = chunks * (self.num_heads * profile.tile_t_s + self.num_k_heads * profile.key_tile_t_s)
        return profile.launch_s + self.scale * tiles / profile.workers

    def _costs_of(self, kind: Kind) -> _KindCosts:
        costs = self._costs.get(kind)
        if costs is None:
            if len(self._costs) == _MOST_KNOWN:
                self._costs.clear()
            self._costs[kind] = costs = self._find_costs(kind)
        return costs

    def _find_costs(self, kind: Kind) -> _KindCosts:
        profile = self.profile
        opened = profile.opens and kind.is_first and not kind.is_last
        prefill = self._unit(kind.num_chunks * profile.tile_prefill_s)
        if opened or kind.is_last:
            return _KindCosts(opened, prefill, (), 1)
        per_read = self._heads_by_reads(kind)
        n = [(heads, self._unit(read * profile.tile_n_s)) for (read, _), heads in per_read.items()]
        whole = self._unit(kind.num_chunks * profile.tile_m_s)
        m = [(heads, whole) for (_, with_m), heads in per_read.items() if with_m]
        return _KindCosts(opened, prefill, (*n, *m), _INTERLEAVED if len(per_read) > 1 else 1)

    def _heads_by_reads(self, kind: Kind) -> dict[tuple[int, bool], int]:
        """(chunks that N reads, whether M is needed) -> heads."""
        per_read: dict[tuple[int, bool], int] = {}
        for memory, heads in self.memories:
            forgets = memory < kind.num_chunks * CHUNK
            key = (math.ceil(memory / CHUNK) if forgets else kind.num_chunks, not (kind.is_first or forgets))
            per_read[key] = per_read.get(key, 0) + heads
        return per_read

    def _unit(self, tile_seconds: float) -> float:
        return self.profile.unit_s + self.scale * tile_seconds

    def _schedule(self, launch: Launch) -> float:
        return self.profile.launch_s + finish(self.profile.workers, launch)


@lru_cache(16)
def model_of(
    profile: CostProfile,
    opens: bool,
    num_heads: int,
    num_k_heads: int,
    head_dim: int,
    head_half_lives: tuple[float, ...] | None,
    forget_below: float | None,
) -> StageModel:
    """The model of a plan that opens sequences or does not; one for all plans that are compared."""
    costs = replace(profile, opens=profile.opens and opens)
    return StageModel(costs, num_heads, num_k_heads, head_dim, head_half_lives, forget_below)


def _memories(tokens: Sequence[float]) -> list[tuple[float, int]]:
    """(tokens after which a head has forgotten, how many heads), longest first; heads within an octave as one."""
    octaves: dict[int, list[float]] = {}
    for memory in tokens:
        octaves.setdefault(math.frexp(memory)[1] if memory < math.inf else 1 << 20, []).append(memory)
    return [(sum(own) / len(own), len(own)) for _, own in sorted(octaves.items(), reverse=True)]
