"""Plans and peers on simulated machines: what is sent is what the plan says, and times behave."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from gdncp.plan import PROFILES, plan_prefill
from gdncp.simulate import tables
from gdncp.simulate.collectives import fold_launches
from gdncp.simulate.gates import GATES, half_lives
from gdncp.simulate.peers import PEERS, find, simulate_peer
from gdncp.simulate.schemes import Outcome, simulate_plan
from gdncp.simulate.work import GroupWork

LAYER: dict[str, Any] = {"num_q_heads": 16, "num_k_heads": 16, "num_v_heads": 32, "profile": "h200"}
FIXUPS = ("chain", "all_gather", "head_sharded", "tree")
BATCHES = {
    "one": [1 << 17],
    "ragged": [5000, 0, 64, 40000, 100, 7, 30000],
    "nothing crosses": [1024] * 4,
}


def simulate(seq_lens: list[int], **arguments: Any) -> Outcome:
    return simulate_plan(plan_prefill(seq_lens, **{**LAYER, **arguments}))


@pytest.mark.parametrize("fixup", FIXUPS)
@pytest.mark.parametrize("ownership", ["contiguous", "zigzag"])
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("world_size", [2, 5, 40])
def test_bytes_are_the_plan_s(fixup: str, ownership: str, batch: str, world_size: int) -> None:
    plan = plan_prefill(
        BATCHES[batch], world_size=world_size, ownership=ownership, fixup=fixup, cp_chunk_len=1024, **LAYER
    )
    result = simulate_plan(plan)
    assert result.bytes_sent == plan.fixup_bytes
    assert sum(result.bytes_received) == sum(result.bytes_sent)
    assert (sum(result.messages_sent) > 0) == (sum(result.bytes_sent) > 0)
    assert 0 < result.busy_share <= 1
    # a rank is done when its stages are, one after the other; the last rank's end is the whole's
    assert result.seconds == pytest.approx(max(map(sum, zip(*result.stages.values(), strict=True))))


WAYS: dict[str, dict[str, Any]] = {
    "first": {"finish": "entry_first"},
    "late": {"finish": "entry_late"},
    "spans": {"fold_span": 4, "finish": "entry_first"},
    "lanes": {"lanes_per_rank": 2, "finish": "entry_first"},
    "heads": {"lanes_per_rank": 2, "lanes_by": "heads", "finish": "entry_first"},
    "heads late in spans": {"lanes_per_rank": 3, "lanes_by": "heads", "finish": "entry_late", "fold_span": 2},
}
TCP = {"message_s": 50e-6, "bytes_per_s": 10e9}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("fixup", FIXUPS)
def test_ways_to_hide_and_shorten_an_exchange(fixup: str, way: str) -> None:
    """All bytes are the plan's, no rank is done before its stages, and no way makes less work."""
    layer = {"world_size": 4, "fixup": fixup, "cp_chunk_len": 1024, **LAYER}
    for seq_lens in BATCHES.values():
        plan = plan_prefill(seq_lens, **layer, **WAYS[way])
        result = simulate_plan(plan)
        assert result.bytes_sent == plan.fixup_bytes
        assert result.seconds == pytest.approx(max(map(sum, zip(*result.stages.values(), strict=True))))
        assert all(seconds >= 0 for of_ranks in result.stages.values() for seconds in of_ranks)
        # of this least, with all workers busy all the time
        models, kinds = [plan.stage_model_of(*heads) for heads in plan.head_groups], GroupWork(plan, 0).kinds(0)
        work = sum(sum(model.work(kind)) * count for model in models for kind, count in kinds.items())
        assert result.seconds >= work / plan.profile.workers


def test_entry_late_hides_an_exchange_where_heads_forget() -> None:
    def seconds(gates: str, finish: str, **link: float) -> float:
        profile = replace(PROFILES["h200"], **{"mail_s": 0.0, **link})
        given = {"world_size": 2, "cp_chunk_len": 16384, "opens": False, "head_half_lives": half_lives(gates, 32)}
        return simulate([1 << 18], **given, profile=profile, finish=finish).seconds

    first, late = (seconds("fresh", finish, **TCP) for finish in ("entry_first", "entry_late"))
    assert late < first - 0.2e-3  # the state takes 0.2 ms, and the latency
    assert late < 1.05 * seconds("fresh", "entry_first", message_s=0.0, bytes_per_s=1e15, collective_s=0.0)
    # where nothing forgets, the second rank waits as long as ever
    first, late = (seconds("one", finish, **TCP) for finish in ("entry_first", "entry_late"))
    assert late == pytest.approx(first, rel=0.01)


def test_lanes_of_heads_hide_an_exchange_that_takes_long_and_cost_where_it_does_not() -> None:
    def seconds(tokens: int, lanes: int, chunks: int, **link: float) -> float:
        """`chunks`: CP chunks of 32 heads a rank: four are a wave, and of one group of two they are half of one."""
        given = {"world_size": 2, "cp_chunk_len": tokens // 2 // chunks, "fixup": "chain", "finish": "entry_first"}
        by_heads = {"lanes_per_rank": lanes, "lanes_by": "heads", "profile": replace(PROFILES["h200"], **link)}
        return simulate([tokens], **given, **by_heads).seconds

    long = 1 << 19
    alone = min(seconds(long, 1, chunks, **TCP) for chunks in (4, 8))
    assert seconds(long, 2, 8, **TCP) < alone - 0.7 * 330e-6  # folds, a message of 1 MiB and its latency
    assert seconds(long, 2, 4, **TCP) > 0.97 * alone  # groups side by side end together: there is little to hide behind
    assert seconds(1 << 14, 2, 4) > seconds(1 << 14, 1, 4)


def test_spans_shorten_many_maps() -> None:
    layer = {"world_size": 8, "cp_chunk_len": 1024, "fixup": "chain", "finish": "entry_first"}
    flat, composed = (simulate([1 << 18], **layer, fold_span=span) for span in (1, 32))
    assert max(composed.exchange) < 0.7 * max(flat.exchange)
    assert sum(composed.bytes_sent) == sum(flat.bytes_sent)  # a chain sends states


def test_what_was_measured_of_ours() -> None:
    rows = tables.measured_rows()
    assert len(rows) == 15 and all(abs(row.error) < 0.1 for row in rows), rows


@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("seq_lens", [[8192], [1 << 17], [2048] * 16, [100, 0, 70000]])
def test_one_gpu_takes_what_the_plan_predicts(seq_lens: list[int], gates: str) -> None:
    plan = plan_prefill(seq_lens, head_half_lives=half_lives(gates, 32), **LAYER)
    predicted = sum(seconds for (seconds,) in plan.predicted.values())
    assert simulate_plan(plan).seconds == pytest.approx(predicted, rel=0.03)


@pytest.mark.parametrize("fixup", FIXUPS)
def test_a_slower_machine_is_slower_and_more_tokens_take_longer(fixup: str) -> None:
    from gdncp.simulate.machine import Link, with_topology

    links = [None, Link(20e-6, 100e9), Link(50e-6, 10e9)]
    profiles = [with_topology(PROFILES["h200"], link=link) for link in links]
    layer = {"world_size": 8, "fixup": fixup, "cp_chunk_len": 4096}
    times = [simulate([1 << 18], **layer, profile=profile).seconds for profile in profiles]
    assert all(a < b for a, b in pairwise(times))
    nodes = [with_topology(PROFILES["h200"], gpus_per_node=n, node_link=links[2]) for n in (8, 4, 1)]
    times = [simulate([1 << 18], **layer, profile=profile).seconds for profile in nodes]
    assert all(a <= b for a, b in pairwise(times)) and times[0] < times[-1]
    times = [simulate([n << 15], **layer).seconds for n in (1, 2, 4, 8)]
    assert all(a < b for a, b in pairwise(times))


def test_a_chain_s_hops_follow_one_another() -> None:
    """With 4 ranks of one map each, the last one waits for three hops of two blocks, which overlap by one."""
    profile = replace(PROFILES["h200"], folds_runs=False)
    plan = plan_prefill([4 * 4096], world_size=4, fixup="chain", cp_chunk_len=4096, **{**LAYER, "profile": profile})
    result = simulate_plan(plan)
    block = 16 * profile.fold_head_s + profile.fold_launch_s  # half the rows of 32 heads
    message = profile.message_s + (1 << 20) / profile.bytes_per_s
    # rank 0 folds nothing: its local state is its exit state. Then hops 1 and 2 fold, and block 2 is a round behind.
    expected = profile.collective_s + message + 2 * (block + message) + (block + message)
    waits = result.stages["state_fixup"]
    ends = [sum(times[rank] for times in list(result.stages.values())[:3]) for rank in range(4)]
    starts = [end - wait for end, wait in zip(ends, waits, strict=True)]
    assert ends[3] - starts[0] == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("folds_runs", [True, False])
@pytest.mark.parametrize("heads, maps, ownership", [(32, 1, "contiguous"), (32, 4, "contiguous"), (8, 1, "zigzag")])
@pytest.mark.parametrize("world_size", [2, 8, 16, 64])
def test_the_planner_s_costs_of_fixups_are_the_events(
    world_size: int, heads: int, maps: int, ownership: str, folds_runs: bool
) -> None:
    """From when the last rank has its maps; some have theirs earlier, which a tree can use."""
    plans = [
        plan_prefill(
            [2048 * maps * world_size * (1 + (ownership == "zigzag"))],
            world_size=world_size,
            ownership=ownership if ownership == "zigzag" else equal_shares(world_size, 2048 * maps),
            cp_chunk_len=2048,
            fixup=fixup,
            finish="entry_first",
            num_q_heads=heads,
            num_k_heads=heads,
            num_v_heads=heads,
            profile=replace(PROFILES["h200"], folds_runs=folds_runs),
        )
        for fixup in FIXUPS
    ]
    for plan in plans:
        t, mn, fixup, _ = simulate_plan(plan).stages.values()
        ready = [a + b for a, b in zip(t, mn, strict=True)]
        seconds = max(a + b for a, b in zip(ready, fixup, strict=True)) - max(ready)
        low, high = (0.98, 1.5) if plan.fixup == "tree" else (0.9, 1.15)
        assert low * seconds <= plan.fixup_seconds[plan.fixup] <= high * seconds, plan.fixup


@pytest.mark.parametrize("folds_runs", [True, False])
@pytest.mark.parametrize("world_size", [1, 2, 8, 16])
def test_so_they_are_with_composed_maps(world_size: int, folds_runs: bool) -> None:
    given = {"num_q_heads": 16, "num_k_heads": 16, "num_v_heads": 16, "cp_chunk_len": 2048, "finish": "entry_first"}
    given["profile"] = replace(PROFILES["h200"], folds_runs=folds_runs)
    for fixup in FIXUPS if world_size > 1 else ("auto",):
        maps = 8 if world_size > 1 else 64
        ownership = equal_shares(world_size, 2048 * maps)
        words = {"world_size": world_size, "ownership": ownership, "fixup": fixup, "fold_span": 4, **given}
        plan = plan_prefill([2048 * maps * world_size], **words)
        t, mn, waits, _ = simulate_plan(plan).stages.values()
        ready = [a + b for a, b in zip(t, mn, strict=True)]
        seconds = max(a + b for a, b in zip(ready, waits, strict=True)) - max(ready)
        predicted = plan.fixup_seconds[plan.fixup] if plan.crosses_ranks else plan.predicted["state_fixup"][0]
        assert 0.9 * seconds <= predicted <= 1.35 * seconds, plan.fixup


def equal_shares(world_size: int, tokens: int) -> list[list[tuple[int, int]]]:
    return [[(rank * tokens, (rank + 1) * tokens)] for rank in range(world_size)]


def test_late_ranks_hold_up_those_that_wait_for_them_alone() -> None:
    """Rank 0 has most of the work: a chain makes all wait for it; two sequences that end before it do not."""
    ownership = [[(0, 65536)], [(65536, 69632)], [(69632, 73728)], [(73728, 77824)]]
    plan = plan_prefill([69632, 8192], world_size=4, ownership=ownership, fixup="chain", cp_chunk_len=4096, **LAYER)
    result = simulate_plan(plan)
    ends = [sum(times[rank] for times in result.stages.values()) for rank in range(4)]
    assert ends[3] < ends[1] / 2


def test_launches_of_a_fold() -> None:
    assert fold_launches([]) == 0
    assert fold_launches([range(5)]) == 5
    assert fold_launches([range(3), range(1, 5)]) == 5
    assert fold_launches([range(2)] * 17 + [range(3)]) == 2 * 2 + 1
    assert fold_launches([range(1), range(2, 3)]) == 2


def test_gates() -> None:
    for gates in GATES:
        lives = half_lives(gates, 32)
        assert len(lives) == 32 and min(lives) > 0
    fresh = sorted(half_lives("fresh", 64))
    assert 0.4 < fresh[0] < 1 < 5 < fresh[32] < 20 < 100 < fresh[-1] < 700
    with pytest.raises(ValueError, match="gates must be one of"):
        half_lives("two", 4)


def test_more_gpus_than_tokens_and_4096_of_them() -> None:
    assert simulate([300], world_size=8, cp_chunk_len=64).seconds > 0
    result = simulate([1 << 22], world_size=4096, fixup="tree", cp_chunk_len=1024)
    assert len(result.bytes_sent) == len(result.memory_bytes) == 4096


def test_peers_tables_within_15_percent() -> None:
    rows = tables.peer_rows()
    assert len(rows) == 33
    assert all(abs(row.error) < 0.15 for row in rows), [row for row in rows if abs(row.error) >= 0.15]


@pytest.mark.parametrize("name", PEERS)
def test_peers(name: str) -> None:
    profile = plan_prefill([1], **LAYER).profile
    times = [simulate_peer(PEERS[name], profile, 4, tokens << 10, 32) for tokens in (16, 64, 256)]
    assert all(a.seconds < b.seconds for a, b in pairwise(times))
    assert sum(times[0].bytes_sent) == sum(times[0].bytes_received) > 0
    assert not sum(simulate_peer(PEERS[name], profile, 1, 4096, 32).bytes_sent)


def test_a_peer_s_name() -> None:
    assert find("fla-cp").name == "fla-cp:0.6.0"
    for name in ("fla", "fla-cp:9"):
        with pytest.raises(ValueError, match="--scheme must be ours or one of"):
            find(name)
