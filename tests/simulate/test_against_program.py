"""The simulated fixups do what the real ones do: messages, bytes, calls of the fold and folded maps per rank.

And in the order of the program: exchanges one after the other, and what of stage 4 need not wait for them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

import gdncp
from gdncp.backends.base import AffineMaps, Part
from gdncp.collectives import compose, fold_here, state_fixup
from gdncp.collectives.wire import Wire
from gdncp.layout import layout_of_plan
from gdncp.plan import PrefillPlan, plan_prefill
from gdncp.simulate import collectives, schemes
from gdncp.simulate.engine import Event
from gdncp.simulate.machine import Machine
from gdncp.simulate.work import GroupWork
from gdncp.work import num_stand_ins
from tests.distributed.affine import BlockFold
from tests.distributed.ranks import run_ranks
from tests.numeric import random_tokens

WORLD = 3
SEQ_LENS = [709, 0, 100, 384]
SMALL: dict[str, Any] = {"num_q_heads": 2, "num_k_heads": 2, "num_v_heads": 4, "head_dim": 16, "profile": "cpu"}
WAYS: dict[str, dict[str, Any]] = {
    "as it is": {"finish": "entry_first"},
    "late": {"finish": "entry_late"},
    "spans": {"fold_span": 3, "finish": "entry_first"},
    "late spans": {"fold_span": 2, "finish": "entry_late"},
    "heads": {"lanes_per_rank": 2, "lanes_by": "heads", "finish": "entry_first"},
    "heads late in spans": {"lanes_per_rank": 2, "lanes_by": "heads", "finish": "entry_late", "fold_span": 2},
}
FIXUPS = ("chain", "all_gather", "head_sharded", "tree")
OWNERSHIPS: tuple[Any, ...] = (
    "contiguous",
    "zigzag",
    [[(0, 100), (300, 400)], [(100, 300), (450, 1193)], [(400, 450)]],
)


class Work(NamedTuple):
    messages_sent: int
    bytes_sent: int
    bytes_received: int
    launches: int
    elements: int  # of the states that were folded


class CountingFold(BlockFold):
    def __init__(self) -> None:
        self.launches = self.elements = 0

    def __call__(self, state: torch.Tensor, transition: torch.Tensor, local_state: torch.Tensor) -> torch.Tensor:
        self.launches += 1
        self.elements += state.numel()
        return super().__call__(state, transition, local_state)


def real(rank: int, plans: list[PrefillPlan]) -> list[Work]:
    """Stage 3 as `gdncp.stages` runs it, for each group of heads."""
    result = []
    for plan in plans:
        share, dim, fold = plan.rank_plan(rank), plan.head_dim, CountingFold()
        sent = [0, 0, 0]
        for start, stop in plan.head_groups:
            maps = AffineMaps.empty(share.num_maps, stop - start, dim, dim, torch.device("cpu"))
            maps.transition.zero_()
            maps.local_state.zero_()
            states = torch.zeros(len(share.items) + num_stand_ins(share), stop - start, dim, dim)
            composed = compose(plan, rank, maps, fold) if plan.fold_span > 1 else None
            stats = state_fixup(plan, rank, maps, states, fold, None, composed)
            if plan.finish == "entry_late":
                fold_here(plan, rank, maps, states, fold, composed)
            for i, count in enumerate((stats.messages_sent, stats.bytes_sent, stats.bytes_received)):
                sent[i] += count
        result.append(Work(*sent, fold.launches, fold.elements))
    return result


def simulated(plan: PrefillPlan, monkeypatch: pytest.MonkeyPatch) -> list[Work]:
    launches, elements = [0] * WORLD, [0.0] * WORLD

    class CountingRank(collectives.Rank):
        def fold(self, runs: Any, heads: float | None = None, **words: Any) -> Event:
            runs = [run for run in runs if run]
            launches[self.rank] += collectives.fold_launches(runs)
            elements[self.rank] += sum(map(len, runs)) * (self.num_heads if heads is None else heads) * plan.head_dim**2
            return super().fold(runs, heads, **words)

    monkeypatch.setattr(schemes, "Rank", CountingRank)
    result = schemes.simulate_plan(plan)
    columns = result.messages_sent, result.bytes_sent, result.bytes_received, launches, map(round, elements)
    return [Work(*row) for row in zip(*columns, strict=True)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("fixup", FIXUPS)
def test_work_of_each_rank(fixup: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plans = [
        plan_prefill(SEQ_LENS, world_size=WORLD, ownership=own, fixup=fixup, cp_chunk_len=64, **SMALL, **WAYS[way])
        for own in OWNERSHIPS
    ]
    wide = {**SMALL, "num_q_heads": 32, "num_k_heads": 32, "num_v_heads": 32, "head_dim": 128}  # a chain of two blocks
    plans.append(plan_prefill([512], world_size=WORLD, fixup=fixup, cp_chunk_len=64, **wide, **WAYS[way]))
    for plan, expected in zip(plans, zip(*run_ranks(real, WORLD, plans), strict=True), strict=True):
        assert plan.crosses_ranks and plan.finish == WAYS[way]["finish"]
        assert simulated(plan, monkeypatch) == list(expected), plan
        assert tuple(work.bytes_sent for work in expected) == plan.fixup_bytes


def exchanges_of_program(rank: int, plans: list[PrefillPlan]) -> list[list[int]]:
    """Per plan: what each exchange of a prefill sent, in bytes, in the order in which they are enqueued."""
    result = []
    for plan in plans:
        sent: list[int] = []

        def records(name: str, sent: list[int] = sent) -> Any:
            run = getattr(Wire, name)

            def recorded(wire: Wire, *args: Any) -> Any:
                before = wire.bytes_sent
                pending = run(wire, *args)
                sent.append(wire.bytes_sent - before)
                return pending

            return recorded

        heads = (plan.num_q_heads, plan.num_k_heads, plan.num_v_heads)
        tokens = random_tokens(plan.num_tokens_total, heads, plan.head_dim, dtype=torch.float32)
        own = {name: torch.cat([x[a:b] for a, b in plan.token_ranges(rank)]) for name, x in tokens.items()}
        with pytest.MonkeyPatch.context() as patch:
            for name in ("all_gather", "all_to_all", "exchange"):
                patch.setattr(Wire, name, records(name))
            total = gdncp.prefill(plan, **own, backend="torch").fixup.bytes_sent
        assert total == sum(sent)
        result.append(sent)
    return result


class Recording(Machine):
    """Keeps what each exchange of a rank sends, in the order in which they begin."""

    collective = False  # its exchanges are collectives

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.sent: list[list[int]] = [[] for _ in range(self.world_size)]
        made.append(self)

    def exchange(self, rank: int, sends: Any, receives: Any) -> list[Event]:
        self.sent[rank].append(sum(size for peer, size in sends if peer != rank))
        return super().exchange(rank, sends, receives)

    def count(self, rank: int, messages: int, sent: int, received: int) -> None:
        super().count(rank, messages, sent, received)
        if self.collective:
            self.sent[rank].append(sent)


made: list[Recording] = []


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("fixup", FIXUPS)
def test_exchanges_come_in_the_order_of_the_program(fixup: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schemes, "Machine", Recording)
    monkeypatch.setattr(Recording, "collective", fixup in ("all_gather", "head_sharded"))
    plans = [
        plan_prefill(SEQ_LENS, world_size=WORLD, ownership=own, fixup=fixup, cp_chunk_len=64, **SMALL, **WAYS[way])
        for own in OWNERSHIPS
    ]
    for plan, expected in zip(plans, zip(*run_ranks(exchanges_of_program, WORLD, plans), strict=True), strict=True):
        schemes.simulate_plan(plan)
        # a round in which a rank only hands a state to itself is none
        assert [list(filter(None, sent)) for sent in made.pop().sent] == [list(filter(None, sent)) for sent in expected]


@pytest.mark.parametrize("ownership", OWNERSHIPS, ids=["contiguous", "zigzag", "explicit"])
@pytest.mark.parametrize("groups", [1, 2])
def test_what_need_not_wait_is_what_the_program_finds(ownership: Any, groups: int) -> None:
    """With heads that forget within 32, 64, 100 tokens and never, in CP chunks of 64, tails and cuts off the grid."""
    lanes = {"lanes_per_rank": groups, "lanes_by": "heads"}
    forgets_after = (31.0, 63.0, 100.0, 1e9)  # tokens
    plan = plan_prefill(
        SEQ_LENS,
        world_size=WORLD,
        ownership=ownership,
        cp_chunk_len=64,
        finish="entry_late",
        head_half_lives=[tokens / 24 for tokens in forgets_after],
        forget_below=2.0**-24,
        **SMALL,
        **lanes,
    )
    assert plan.finish == "entry_late"
    for rank in range(WORLD):
        share = plan.rank_plan(rank)
        (table,) = layout_of_plan(plan, rank, torch.device("cpu")).tables
        counts = torch.zeros(len(share.items), dtype=torch.int64)
        for group, (start, stop) in enumerate(plan.head_groups):
            maps = AffineMaps.empty(share.num_maps, stop - start, 16, 16, torch.device("cpu"))
            for item, row in zip(share.items, share.map_rows, strict=True):
                if row < 0:
                    continue
                tokens = -(-item.num_tokens // 64) * 64  # the model counts whole chunks
                maps.forgot[row] = torch.tensor([after < tokens for after in forgets_after[start:stop]])
            known = Part(True, maps).pairs(table).sum(1)
            counts.zero_()[table.item_row] = known
            assert counts.tolist() == GroupWork(plan, group).known_heads(rank)
