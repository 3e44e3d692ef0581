"""`finish="entry_late"`: the bits of `entry_first`, and nothing waits for the exchange that does not depend on it."""

from __future__ import annotations

import weakref
from dataclasses import replace
from itertools import product
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import gdncp
from gdncp import collectives, layout
from gdncp.backends import torch_backend
from gdncp.backends.base import AffineMaps, Part
from gdncp.plan import PROFILES
from tests.conftest import SAME_BITS_TARGETS
from tests.distributed.ranks import run_ranks
from tests.distributed.test_same_bits import (
    BATCHES,
    HEADS,
    SHORT,
    batch,
    dim_of,
    gather,
    plan_for,
    run_share,
    same,
    uneven,
)
from tests.numeric import Target

FORGET_BELOW = (
    2.0**-10
)  # within a CP chunk of 64 tokens the first head forgets, or both at a reset; the second does not
OWNERSHIPS, FIXUPS = ("contiguous", "zigzag", "uneven"), ("chain", "all_gather", "head_sharded", "tree")


def late_plan(name: str, world_size: int, ownership: str, dim: int, **choices: Any) -> gdncp.PrefillPlan:
    seq_lens = BATCHES.get(name, SHORT)
    ranges = uneven(seq_lens, world_size) if ownership == "uneven" else ownership
    return plan_for(seq_lens, world_size, dim, ownership=ranges, **{"finish": "entry_late", **choices})


def _shares(rank: int, plans: list[Any], target: Target) -> list[dict[str, torch.Tensor]]:
    arguments = {"forget_below": FORGET_BELOW}
    return [run_share(rank, plan, name, gates, target.dtype, target, arguments) for plan, name, gates in plans]


def run_all(plans: list[Any], world_size: int, target: Target) -> list[dict[str, torch.Tensor]]:
    """The whole batch's results for each (plan, batch, gates)."""
    shares = run_ranks(_shares, world_size, plans, target)
    return [gather(plan, of_ranks) for (plan, *_), of_ranks in zip(plans, zip(*shares, strict=True), strict=True)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4], ids="ranks{}".format)
@pytest.mark.parametrize("target", SAME_BITS_TARGETS)
def test_entry_late_has_the_bits_of_one_rank(world_size, target):
    dim, lanes = dim_of(target), 1 + world_size % 2
    for name, gates in product(BATCHES, ("mixed", "resets")):
        one = plan_for(BATCHES[name], 1, dim)
        expected = gather(one, _shares(0, [(one, name, gates)], target))
        cases = [
            (late_plan(name, world_size, ownership, dim, fixup=fixup, lanes_per_rank=lanes), name, gates)
            for ownership, fixup in product(OWNERSHIPS, FIXUPS)
        ]
        first = [
            (late_plan(name, world_size, o, dim, fixup="tree", finish="entry_first"), name, gates) for o in OWNERSHIPS
        ]
        assert all(plan.finish == "entry_late" for plan, *_ in cases if plan.crosses_ranks)
        results = run_all(cases + first, world_size, target)
        trees = [result for (plan, *_), result in zip(cases, results, strict=False) if plan.fixup_requested == "tree"]
        for (plan, *_), result in zip(cases, results, strict=False):
            if plan.reproducible:
                same(result, expected)
        for late, of_first in zip(trees, results[len(cases) :], strict=True):  # of what bits a tree has, the same
            same(late, of_first)


def _captured(rank: int, plans: list[Any], target: Target) -> list[dict[str, torch.Tensor]]:
    """As `_shares`, by replay of a CUDA graph, during whose capture the host does not wait for the device."""
    shares = []
    for plan, name, gates in plans:
        _, tokens, initial = batch(name, gates, target.dtype, plan.head_dim)
        own = {n: torch.cat([x[a:b] for a, b in plan.token_ranges(rank)]).cuda() for n, x in tokens.items()}
        given = {"initial_state": initial.cuda(), "backend": target.backend, "forget_below": FORGET_BELOW}
        gdncp.prefill(plan, **own, **given)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            with torch.cuda.graph(graph):
                result = gdncp.prefill(plan, **own, **given)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for _ in range(3):
            result.output.fill_(torch.nan)
            graph.replay()
        share = {"output": result.output, "final_state": result.final_state, "checkpoints": result.checkpoints}
        shares.append({what: x.cpu() for what, x in share.items()})
    return shares


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("target", [target for target in SAME_BITS_TARGETS if target.id != "cpu-torch"])
def test_nccl_ranks_eager_and_captured(target):
    world_size, dim = torch.cuda.device_count(), dim_of(target)
    for name, ownership in product(BATCHES, ("contiguous", "zigzag")):
        one = plan_for(BATCHES[name], 1, dim)
        expected = gather(one, _shares(0, [(one, name, "mixed")], target))
        plans = [
            (late_plan(name, world_size, ownership, dim, fixup=fixup, finish=finish), name, "mixed")
            for fixup, finish in product(FIXUPS[:3], ("entry_late", "entry_first"))
        ]
        for run in (_shares, _captured):
            shares = run_ranks(run, world_size, plans, target, backend="nccl")
            for (plan, *_), of_ranks in zip(plans, zip(*shares, strict=True), strict=True):
                same(gather(plan, of_ranks), expected)


# ---- what waits, and what does not


def _without_exchange(rank: int, name: str, gates: str, backend: str, looks: bool, span: int = 1) -> tuple[int, int]:
    """Runs with an exchange that brings NaN; how many (CP chunk, head) pairs did not depend on it, and how many did."""
    plan = late_plan(name, 3, "contiguous", 32, fixup="all_gather", fold_span=span)
    _, tokens, initial = batch(name, gates, torch.float32, plan.head_dim)
    own = {n: torch.cat([x[a:b] for a, b in plan.token_ranges(rank)]) for n, x in tokens.items()}
    heads, dim, rows = max(HEADS), plan.head_dim, len(plan.checkpoint_rows(rank))
    given = {"initial_state": initial, "backend": backend, "forget_below": FORGET_BELOW, "keep_entry": True}
    expected = gdncp.prefill(plan, **own, **given)
    after_first: list[torch.Tensor] = []  # of two launches of stage 4: what the first has written
    checkpoints, output = torch.full((rows, heads, dim, dim), 7.0), torch.full_like(expected.output, 7.0)

    def brings_nan(plan, rank, maps, entry_states, fold, group, composed):
        for item, chunk in enumerate(plan.rank_plan(rank).items):
            if not chunk.is_first:
                entry_states[item] = torch.nan
        return collectives.FixupStats("nothing")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "state_fixup", brings_nan)
        if not looks:
            patch.setattr(torch_backend.TorchBackend, "_looks", lambda *_: False)
        summary = gdncp.summarise(plan, **own, **given, output=output, state_checkpoints=checkpoints)
        real = summary.call.backend.cp_prefill
        layout = summary.call.layout

        def records(*args):
            real(*args)
            after_first.append(output.clone())

        patch.setattr(type(summary.call.backend), "cp_prefill", lambda _, *args: records(*args))
        result = gdncp.finish(gdncp.fixup(summary))

    assert len(after_first) == layout.has_early + layout.has_late
    counts = [0, 0]
    known = Part(True, expected.entry.maps).pairs(layout.tables[0])
    for position, item in enumerate(layout.tables[0].item_row.tolist()):
        chunk = plan.rank_plan(rank).items[item]
        tokens_of = slice(chunk.offset, chunk.offset + chunk.num_tokens)
        for head in range(heads):
            is_known = bool(known[position, head])
            counts[is_known] += 1
            got, want = result.output[tokens_of, head], expected.output[tokens_of, head]
            assert torch.equal(got, want) if is_known else bool(got.isnan().all())
            written = bool((after_first[0][tokens_of, head] != 7).all())
            assert not chunk.num_tokens or written == (is_known or not layout.has_early)
            of_item = [c.row for c in plan.rank_plan(rank).checkpoints if c.item == item]
            for row in of_item:
                got, want = result.checkpoints[row, head], expected.checkpoints[row, head]
                assert torch.equal(got, want) if is_known else bool(got.isnan().all())
            if chunk.is_last:
                got, want = result.final_state[chunk.sequence, head], expected.final_state[chunk.sequence, head]
                assert torch.equal(got, want) if is_known else bool(got.isnan().all())
    return counts[1], counts[0]


@pytest.mark.parametrize(
    ("backend", "looks"), [("torch", True), ("torch", False), pytest.param("triton", True, marks=pytest.mark.slow)]
)
def test_only_pairs_that_depend_on_the_exchange_wait_for_it(backend, looks):
    name = "one long" if backend == "torch" else "short"
    one, two, three = run_ranks(_without_exchange, 3, name, "mixed", backend, looks)
    assert one[1] == 0, "the rank on which the sequence starts waits for nothing"
    for known, waits in (two, three):
        # the head that forgets waits in the first CP chunk alone, the other one in all
        assert waits == known + 2


@pytest.mark.parametrize("span", [1, 4])
@pytest.mark.parametrize("name", BATCHES)
def test_where_every_head_forgets_only_first_cp_chunks_wait(name, span):
    plan = late_plan(name, 3, "contiguous", 32, fixup="all_gather", fold_span=span)
    for rank, (known, waits) in enumerate(run_ranks(_without_exchange, 3, name, "strong", "torch", True, span)):
        arrivals = sum(segment.previous is not None for segment in plan.rank_plan(rank).segments)
        assert waits == arrivals * max(HEADS)
        assert known == (len(plan.rank_plan(rank).items) - arrivals) * max(HEADS)


def _from_infinity(rank: int, plans: list[gdncp.PrefillPlan]) -> list[torch.Tensor]:
    """The rank's outputs from an initial state that is infinite in part, and from a finite one."""
    _, tokens, initial = batch("one long", "mixed", torch.float32, plans[0].head_dim)
    infinite = initial.clone()
    infinite[:, :, 0, 0] = torch.inf
    outputs = []
    for plan, state in product(plans, (infinite, initial)):
        own = {n: torch.cat([x[a:b] for a, b in plan.token_ranges(rank)]) for n, x in tokens.items()}
        outputs.append(gdncp.prefill(plan, **own, initial_state=state, forget_below=FORGET_BELOW).output)
    return outputs


def test_behind_what_forgot_a_state_that_is_not_finite_leaves_no_trace():
    """As `plan_prefill` says of `finish`: the one place where bits differ from those of `entry_first`."""
    plans = [late_plan("one long", 3, "contiguous", 32, fixup="chain", finish=f) for f in ("entry_first", "entry_late")]
    for rank, (first, _, late, finite) in enumerate(run_ranks(_from_infinity, 3, plans)):
        for item, chunk in enumerate(plans[1].rank_plan(rank).items):
            tokens = slice(chunk.offset, chunk.offset + chunk.num_tokens)
            assert bool(first[tokens].isnan().any(2).any(0).all()), "0 · ∞ is NaN"
            for head in range(max(HEADS)):  # of which the first forgets within every CP chunk
                expected = finite if head == 0 and rank and item else first
                torch.testing.assert_close(late[tokens, head], expected[tokens, head], rtol=0, atol=0, equal_nan=True)


# ---- the plan


def _composed_lives(rank: int) -> bool:
    plan = late_plan("one long", 3, "contiguous", 32, fixup="all_gather", fold_span=2)
    _, tokens, _ = batch("one long", "mixed", torch.float32, plan.head_dim)
    own = {n: torch.cat([x[a:b] for a, b in plan.token_ranges(rank)]) for n, x in tokens.items()}
    made, compose = [], collectives.compose

    def watched(*arguments):
        made.append(compose(*arguments))
        return made[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "compose", watched)
        entry = gdncp.fixup(gdncp.summarise(plan, **own))
    alive = weakref.ref(made.pop())
    lives = alive() is not None
    gdncp.finish(entry)
    return lives


def test_composed_maps_live_while_the_exchange_may_read_them():
    """Freed when `fixup` returns, their memory would go to what the other stream allocates next."""
    assert all(run_ranks(_composed_lives, 3))


def _summary(device: str) -> gdncp.Summary:
    """Of one rank, with maps."""
    plan = plan_for(BATCHES["one long"], 1, 32)
    _, tokens, _ = batch("one long", "mixed", torch.float32, plan.head_dim)
    return gdncp.summarise(plan, **{name: x.to(device) for name, x in tokens.items()}, backend="torch")


@pytest.mark.parametrize(
    "joins", [(), ("home",), ("other",), ("other", "home")], ids=lambda joins: "-".join(joins) or "none"
)
def test_dropped_entry_states_keep_their_memory_until_the_exchange_has_passed(joins, monkeypatch):
    """With streams that are made up: memory that the home stream may give away at once is not that of the exchange."""
    streams = {name: Mock(device=torch.device("cpu")) for name in ("home", "other", "exchange")}
    current, recorded = ["home"], set()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: streams[current[0]])
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda x, s: recorded.add((x.data_ptr(), s)), raising=False)
    summary = _summary("cpu")
    composed = AffineMaps.empty(1, max(HEADS), 32, 32, torch.device("cpu"))
    entry = gdncp.EntryStates(summary, collectives.LOCAL, summary.maps, streams["exchange"], composed)
    for name in joins:
        current[0] = name
        entry.wait()
        assert streams[name].wait_stream.call_args.args == (streams["exchange"],)
    assert not recorded, "a copy on two streams comes back late"
    del entry
    used = (summary.entry_states.data_ptr(), summary.maps.scratch.address, composed.scratch.address)
    assert recorded == (set() if "home" in joins else {(address, streams["exchange"]) for address in used})


@pytest.mark.gpu
def test_dropped_entry_states_memory_is_not_given_away():
    """The exchange is a stream that sleeps, and nobody waits for it."""
    summary = _summary("cuda")
    exchange = torch.cuda.Stream()
    torch.cuda.synchronize()
    size, start = summary.entry_states.nbytes, summary.entry_states.data_ptr()
    with torch.cuda.stream(exchange):
        torch.cuda._sleep(2_000_000_000)  # a second
    torch.cuda.set_sync_debug_mode("error")
    try:
        entry = gdncp.EntryStates(summary, collectives.LOCAL, summary.maps, exchange)
        del summary, entry
        given = [torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(8)]
        under_way = not exchange.query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
    assert under_way and all(x.data_ptr() + size <= start or x.data_ptr() >= start + size for x in given)


def test_tables_of_early_parts_are_there_before_a_second_stream_or_a_capture_asks(monkeypatch):
    plan = late_plan("one long", 3, "contiguous", 32)
    found = layout._build(plan, 1, torch.device("cpu"), 32)
    monkeypatch.setattr(torch, "where", None)
    assert all(table.before_exchange.early is not None for table in found.tables_from_zeros)


def test_the_plan_says_how_it_finishes():
    first, late = (plan_for([4000], 2, finish=finish) for finish in ("entry_first", "entry_late"))
    assert (first.finish, late.finish) == ("entry_first", "entry_late")
    assert first.digest != late.digest
    assert "entry_late" in late.explain() and "as asked" in late.explain()
    alone = plan_for([4000], 1, finish="entry_late")  # nothing to wait for
    assert alone.finish == "entry_first" and "entry_late was asked for" in " ".join(alone.explain().split())
    assert plan_for([4000], 2).finish == "entry_first"  # on one worker nothing runs beside an exchange
    with pytest.raises(ValueError, match=r"finish must be .*, got 'zero_first'"):
        plan_for([4000], 2, finish="zero_first")


def test_auto_takes_it_where_the_exchange_hides():
    layer = {"num_q_heads": 16, "num_k_heads": 16, "num_v_heads": 32, "world_size": 8}
    few = {"num_q_heads": 4, "num_k_heads": 4, "num_v_heads": 8, "world_size": 2, "head_half_lives": [2.0] * 8}
    h200 = PROFILES["h200"]

    def total(plan: gdncp.PrefillPlan) -> float:
        return max(map(sum, zip(*plan.predicted.values(), strict=True)))

    # 16 CP chunks a rank; their 128 programs of stage 4 on all workers would keep the exchange waiting; through peer
    # memory there is less to hide
    for workers, mail_s, expected in ((132, 0.0, "entry_late"), (128, 0.0, "entry_first"), (132, 2e-6, "entry_first")):
        choices = {"profile": replace(h200, workers=workers, mail_s=mail_s), **few}
        plan = gdncp.plan_prefill([50_000, 20_000], **choices)
        assert plan.finish == expected
        assert total(plan) <= total(gdncp.plan_prefill([50_000, 20_000], finish="entry_first", **choices))
    assert gdncp.plan_prefill([1 << 17], profile="h200", **layer).finish == "entry_first"
    assert gdncp.plan_prefill([1000] * 99, profile="h200", **layer).finish == "entry_first"
