"""What the stages that compute launch on a rank's GPU, for a group of heads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from gdncp.plan import PrefillPlan
from gdncp.plan.checks import CHUNK
from gdncp.plan.list_schedule import Units
from gdncp.plan.model import CpChunk
from gdncp.plan.stage_model import Kind

Launch = Sequence[Units]
Kinds = frozenset[tuple[Kind, int]]


class Launches(NamedTuple):
    """Of each stage, one a lane that has tokens."""

    precompute_t: tuple[Launch, ...]
    precompute_mn: tuple[Launch, ...]
    cp_prefill: tuple[Launch, ...]


class GroupWork:
    """One group's on any rank; ranks and lanes with equal work share it."""

    def __init__(self, plan: PrefillPlan, group: int) -> None:
        self._plan = plan
        self.model = plan.stage_model_of(*plan.head_groups[group])
        self._known: dict[Kinds, Launches] = {}

    def launches(self, rank: int) -> Launches:
        share = self._plan.rank_plan(rank)
        lanes = [self._of_kinds(_kinds(share.items[i] for i in lane)) for lane in share.lanes]
        t, mn, prefill = (tuple(launch for lane in lanes for launch in lane[stage]) for stage in range(3))
        return Launches(t, mn, prefill)

    def kinds(self, rank: int) -> Counter[Kind]:
        """The rank's CP chunks."""
        return _kinds(self._plan.rank_plan(rank).items)

    def prefills(self, rank: int) -> tuple[Launch | None, Launch | None]:
        """Stage 4 of the pairs of CP chunk and head that are known before the exchange, and of the others behind it.

        None: that part is not launched.  Known are all of a segment that starts its sequence; of another one those
        behind a CP chunk of it that the head forgets within.
        """
        share, early, late = self._plan.rank_plan(rank), Counter[Kind](), Counter[Kind]()
        for item, known in zip(share.items, self.known_heads(rank), strict=True):
            early[_kind(item)] += known
            late[_kind(item)] += self.model.num_heads - known
        if not share.num_tokens:
            return None, None
        has_early = any(segment.previous is None or segment.num_items > 1 for segment in share.segments)
        has_late = any(segment.previous is not None for segment in share.segments)
        return self._part(early, has_early), self._part(late, has_late)

    def known_heads(self, rank: int) -> list[int]:
        """Of each of the rank's CP chunks."""
        share, heads = self._plan.rank_plan(rank), []
        for segment in share.segments:
            longest = 0  # chunks of the CP chunks of the segment before
            for item in share.items[segment.first_item : segment.stop_item]:
                heads.append(
                    self.model.num_heads if segment.previous is None else self.model.forgetting_heads(longest * CHUNK)
                )
                longest = max(longest, _kind(item).num_chunks)
        return heads

    def _part(self, pairs: Mapping[Kind, float], launched: bool) -> Launch | None:
        return self.model.prefills(pairs) if launched else None

    def _of_kinds(self, kinds: Mapping[Kind, int]) -> Launches:
        key = frozenset(kinds.items())
        if key not in self._known:
            self._known[key] = self._schedule(kinds)
        return self._known[key]

    def _schedule(self, kinds: Mapping[Kind, int]) -> Launches:
        model, workers = self.model, self._plan.profile.workers
        t, maps, prefills = model.launches(kinds)
        if not t:
            return Launches((), (), ())
        if self._plan.lanes_per_rank == 1:  # nothing runs beside: the schedule is known
            _, mn, prefill = model.seconds(kinds)
            maps = [(workers, mn - model.profile.launch_s)] if maps else []
            prefills = [(workers, prefill - model.profile.launch_s)]
        tiles = [(workers, t - model.profile.launch_s)]
        return Launches((tiles,), (maps,) if maps else (), (prefills,))


def _kind(item: CpChunk) -> Kind:
    return Kind(-(-item.num_tokens // CHUNK), item.is_first, item.is_last)


def _kinds(items: Iterable[CpChunk]) -> Counter[Kind]:
    return Counter(_kind(item) for item in items if item.num_tokens)
