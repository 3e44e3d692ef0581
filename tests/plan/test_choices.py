"""What the planner chooses where it may, and the costs by which it does."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from gdncp.collectives import peer_memory
from gdncp.plan import PROFILES, PrefillPlan, cost, plan_prefill
from gdncp.plan.choose import choose_fixup, typical_half_lives
from gdncp.plan.cost import FixupLoad, fixup_seconds, total_seconds

LAYER = {"num_q_heads": 16, "num_k_heads": 16, "num_v_heads": 32}
H200 = PROFILES["h200"]

# µs, 32 heads, one map a rank; tests/simulate holds the same costs against events
TABLE = {
    2: {"chain": 37, "all_gather": 41, "head_sharded": 75, "tree": 36},
    8: {"chain": 140, "all_gather": 146, "head_sharded": 88, "tree": 138},
    64: {"chain": 1391, "all_gather": 1734, "head_sharded": 539, "tree": 731},
    1024: {"chain": 22841, "all_gather": 27699, "head_sharded": 8642, "tree": 1174},
}


def one_map_a_rank(world_size: int) -> FixupLoad:
    between = world_size - 1
    return FixupLoad(world_size, between, between, between, 1, 1, num_heads=32, head_dim=128)


@pytest.mark.parametrize("world_size", TABLE)
def test_fixup_times_are_those_of_the_docs(world_size: int) -> None:
    seconds = fixup_seconds(H200, one_map_a_rank(world_size)._replace(by_mail=False))
    for strategy, microseconds in TABLE[world_size].items():
        assert seconds[strategy] == pytest.approx(microseconds * 1e-6, rel=0.03), strategy


@pytest.mark.parametrize("world_size, microseconds", [(2, 11), (8, 75)])
def test_a_chain_by_mail_is_hops_and_folds(world_size: int, microseconds: float) -> None:
    load = one_map_a_rank(world_size)
    assert fixup_seconds(H200, load)["chain"] == pytest.approx(microseconds * 1e-6, rel=0.03)
    by_messages = fixup_seconds(H200, load._replace(by_mail=False))["chain"]
    assert cost.mail_seconds(H200, load._replace(by_mail=False)) is None
    for profile in ({"mail_s": 0.0}, {"folds_runs": False}, {"ranks_per_node": 1}):
        assert cost.mail_seconds(replace(H200, **profile), load) is None
    assert fixup_seconds(replace(H200, mail_s=0.0), load)["chain"] == by_messages


def test_states_go_by_mail_where_the_program_lets_them() -> None:
    assert cost.MOST_MAIL_BYTES == peer_memory.MOST_BYTES
    for sequences, world_size, heads in ((1, 8, 32), (7, 8, 32), (8, 8, 32), (3, 2, 64), (40, 2, 64)):
        layer = {"num_q_heads": heads, "num_k_heads": heads, "num_v_heads": heads, "cp_chunk_len": 64}
        owners = [[] for _ in range(world_size)]  # every sequence goes on on every rank
        for start in range(0, 64 * world_size * sequences, 64):
            owners[start // 64 % world_size].append((start, start + 64))
        lengths = [64 * world_size] * sequences
        plan = plan_prefill(lengths, world_size=world_size, ownership=owners, fixup="chain", **layer)
        capacity = 1 << (peer_memory.channels_of(plan, heads, 128) - 1).bit_length()
        fits = peer_memory.memory_bytes(world_size, capacity) <= peer_memory.MOST_BYTES
        assert (cost.mail_seconds(H200, cost.load_of(plan)) is not None) == fits, (sequences, world_size, heads)
    for more in ({"finish": "entry_late"}, {"lanes_per_rank": 2, "lanes_by": "heads"}):
        late = plan_prefill([1 << 15], world_size=2, cp_chunk_len=2048, fixup="chain", **LAYER, **more)
        assert cost.mail_seconds(H200, cost.load_of(late)) is None
        assert not peer_memory.channels_of(late, 32, 128)


@pytest.mark.parametrize(
    "world_size, expected", [(2, "chain"), (8, "head_sharded"), (64, "head_sharded"), (1024, "tree")]
)
def test_auto_takes_the_cheapest(world_size: int, expected: str) -> None:
    layer = {"profile": replace(H200, mail_s=0.0), **LAYER}
    plan = plan_prefill([2048 * world_size], world_size=world_size, cp_chunk_len=2048, **layer)
    assert plan.fixup == expected
    # a tree, whose bits depend on the ranks, is taken by a clear margin only
    rivals = [seconds for name, seconds in plan.fixup_seconds.items() if name != "tree" or expected == "tree"]
    assert plan.fixup_seconds[expected] <= 1.01 * min(rivals)
    assert plan.reproducible == (expected != "tree")


@pytest.mark.parametrize("tree, expected", [(0.8, "tree"), (0.95, "chain"), (1.2, "chain")])
def test_auto_takes_a_tree_only_by_a_clear_margin(tree: float, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"chain": 1.0, "all_gather": 1.1, "head_sharded": 1.3}
    monkeypatch.setattr(cost, "fixup_seconds", lambda profile, load: {**seconds, "tree": tree})
    assert choose_fixup(one_map_a_rank(4), H200, False) == expected
    assert choose_fixup(one_map_a_rank(4), H200, True) == "chain"


def test_lanes_do_not_move_a_grid_that_must_be_reproducible() -> None:
    def grid(lanes: int, **options: bool) -> int:
        return plan_prefill([8192], lanes_per_rank=lanes, profile="h200", **LAYER, **options).cp_chunk_len

    assert grid(1) != grid(2)  # else this shows nothing
    assert len({grid(lanes, require_reproducible=True) for lanes in (1, 2, 3)}) == 1


def test_auto_leaves_the_tree_out_where_bits_must_be_the_same() -> None:
    plan = plan_prefill(
        [2048 * 256], world_size=256, cp_chunk_len=2048, profile="h200", require_reproducible=True, **LAYER
    )
    assert plan.fixup == "head_sharded" and plan.reproducible
    assert min(plan.fixup_seconds, key=plan.fixup_seconds.__getitem__) == "tree"


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("world_size", [1, 2, 8])
def test_a_short_sequence_is_not_split(profile: str, world_size: int) -> None:
    for length in (1, 64, 100, 256):
        plan = plan_prefill([length], world_size=world_size, profile=profile, **LAYER)
        assert plan.num_cp_chunks == 1 and plan.fixup == "local"


def test_one_worker_is_not_helped_by_splitting() -> None:
    assert plan_prefill([30000, 5000], profile="cpu", **LAYER).num_cp_chunks == 2


def test_few_heads_fill_a_gpu_with_cp_chunks() -> None:
    few = plan_prefill([1 << 17], num_q_heads=2, num_k_heads=2, num_v_heads=4, profile="h200")
    assert few.num_cp_chunks >= 0.8 * H200.workers / 4
    unsplit = plan_prefill([1 << 17], num_q_heads=2, num_k_heads=2, num_v_heads=4, profile="h200", cp_chunk_len=1 << 17)
    assert sum(map(sum, few.predicted.values())) < 0.25 * sum(map(sum, unsplit.predicted.values()))
    # many heads fill it by themselves
    assert plan_prefill([1 << 17], num_q_heads=128, num_k_heads=128, num_v_heads=256, profile="h200").num_cp_chunks == 1


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("ownership", ["contiguous", "zigzag"])
@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_ranks_are_balanced(profile: str, ownership: str, world_size: int) -> None:
    for seq_lens in ([1 << 18], [100_000, 30_000, 100_000], [(7919 * i) % 4000 + 1000 for i in range(200)]):
        plan = plan_prefill(seq_lens, world_size=world_size, ownership=ownership, profile=profile, **LAYER)
        tokens = [plan.num_tokens(rank) for rank in range(world_size)]
        totals = [sum(stages) for stages in zip(*plan.predicted.values(), strict=True)]
        unsplit = plan_prefill(seq_lens, world_size=1, cp_chunk_len=1 << 20, profile=profile, **LAYER)
        # more ranks are never slower; of zigzag one rank opens all sequences, which the choice of a grid leaves out
        assert max(totals) < (1.05 if ownership == "zigzag" else 1.0) * sum(map(sum, unsplit.predicted.values()))
        if len(seq_lens) == 1:
            assert max(tokens) <= 1.1 * sum(tokens) / world_size


@pytest.mark.parametrize(
    "seq_lens, world_size, ownership",
    [
        ([1 << 17], 1, "contiguous"),
        ([1 << 17], 8, "contiguous"),
        ([1 << 17], 8, "zigzag"),
        ([1 << 17, 500, 40_000], 4, "contiguous"),
        ([3000] * 50, 4, "contiguous"),
    ],
)
def test_the_choice_is_near_the_best_of_a_sweep(seq_lens: list[int], world_size: int, ownership: str) -> None:
    def seconds(cp_chunk_len: int | None) -> float:
        plan = plan_prefill(
            seq_lens, world_size=world_size, ownership=ownership, cp_chunk_len=cp_chunk_len, profile="h200", **LAYER
        )
        return max(sum(stages) for stages in zip(*plan.predicted.values(), strict=True))

    sweep = [64 * math.ceil(1.3**k) for k in range(3, 30)]
    # 20 %: the choice is made from sums and shares, the sweep from whole plans
    assert seconds(None) <= 1.2 * min(map(seconds, sweep))


def heads(num_k_heads: int, num_v_heads: int) -> dict[str, int]:
    return {"num_q_heads": num_k_heads, "num_k_heads": num_k_heads, "num_v_heads": num_v_heads}


def total(plan: PrefillPlan) -> float:
    return sum(map(max, plan.predicted.values()))


# tokens, sequences, q and k heads, v heads: those of which times on an H200 are compared with peers'
SHAPES = [
    (8192, 1, 16, 32),
    (32768, 1, 16, 32),
    (131072, 1, 16, 32),
    (32768, 1, 4, 8),
    (131072, 1, 4, 8),
    (262144, 1, 2, 4),
    (2048, 16, 16, 32),
    (512, 1, 16, 32),
    (32768, 1, 16, 64),
    (32768, 1, 2, 8),
    (8192, 4, 16, 64),
]


@pytest.mark.parametrize("tokens, sequences, k, v", SHAPES)
def test_on_one_gpu_the_choice_is_near_the_best_of_a_sweep(tokens: int, sequences: int, k: int, v: int) -> None:
    def plan(half_lives: list[float] | None, length: int | None = None, first: int | None = None) -> PrefillPlan:
        grid = {"cp_chunk_len": length, "first_cp_chunk_len": first, "head_half_lives": half_lives}
        return plan_prefill([tokens] * sequences, profile="h200", **grid, **heads(k, v))

    unknowing = plan(None)
    pieces = [n for n in range(1, 2 * H200.workers // v + 3) if tokens // n >= 256]
    sweep = {64 * math.ceil(tokens / 64 / (n + shift / 8)) for n in pieces for shift in range(-2, 4)}
    for half_lives in (None, typical_half_lives(v)):
        best = min(
            total(plan(half_lives, length, first))
            for length in sweep
            for first in {length, tokens - tokens // length * length or length}
            if first % 64 == 0
        )
        # a split has to gain 3 %
        if half_lives is not None:
            assert total(plan(half_lives)) <= 1.03 * best
        # one plan for both kinds of gates is at most so far from the best for each
        assert total(plan(half_lives, *unknowing.grid[::-1])) <= 1.08 * best


def test_first_cp_chunks_even_out_stage_2() -> None:
    # three middle CP chunks of 64 heads' worth of N and M on 100 SMs, a round of each; 32 openings on the others
    plan = plan_prefill([32768], head_half_lives=[math.inf] * 32, profile="h200", **LAYER)
    first, middle = plan.cp_chunks[0].num_tokens, plan.cp_chunks[1].num_tokens
    assert first * H200.tile_prefill_s == pytest.approx(middle * (H200.tile_n_s + H200.tile_m_s), rel=0.05)
    # heads that forget leave nothing beside the openings: now these must not be long
    forgets = plan_prefill([32768], head_half_lives=[4.0] * 32, opens=True, profile="h200", **LAYER)
    assert forgets.first_cp_chunk_len < 0.8 * forgets.cp_chunk_len
    for other in (plan, forgets):
        assert other.cp_chunks[-1].num_tokens == other.cp_chunk_len  # nothing is left for the last to be short of
    # better still: none, and all outputs in one wave
    best = plan_prefill([32768], head_half_lives=[4.0] * 32, profile="h200", **LAYER)
    assert not best.opens and best.cp_chunk_len == 8192


def test_a_reproducible_plan_has_equal_cp_chunks() -> None:
    for world_size in (1, 2, 8):
        plan = plan_prefill([1 << 17], world_size=world_size, require_reproducible=True, profile="h200", **LAYER)
        assert plan.first_cp_chunk_len == plan.cp_chunk_len


@pytest.mark.parametrize("tokens", [32768, 131072])
def test_a_rank_that_opens_a_sequence_does_not_keep_the_others_waiting(tokens: int) -> None:
    """Where gates forget, others have next to no stage 2; where they do not, nothing is lost."""
    shape = {"world_size": 2, **LAYER, "profile": "h200", "finish": "entry_first"}
    chosen, opening = plan_prefill([tokens], **shape), plan_prefill([tokens], opens=True, **shape)
    assert not chosen.opens and opening.opens
    for half_lives in (None, typical_half_lives(32), [8.0] * 32):
        assert total_seconds(chosen, half_lives) < 1.03 * total_seconds(opening, half_lives)
    assert total_seconds(chosen, [8.0] * 32) < 0.9 * total_seconds(opening, [8.0] * 32)


def test_sequences_are_opened_where_that_gains_or_bits_depend_on_it() -> None:
    shape = {**LAYER, "profile": "h200"}
    assert plan_prefill([32768], **shape).opens  # alone, with gates of any strength
    assert plan_prefill([1024] * 64, world_size=2, **shape).opens  # every rank opens some
    assert plan_prefill([32768], world_size=2, cp_chunk_len=4096, **shape).opens
    assert plan_prefill([32768], world_size=2, require_reproducible=True, **shape).opens
    assert plan_prefill([32768], world_size=2, profile="cpu", **LAYER).opens  # of no account there


def test_partial_waves_count() -> None:
    # 132 SMs: five CP chunks of 32 heads leave stage 4 one wave of 128 units, six one of 132 and one of 28
    five, six = (
        plan_prefill([32768], cp_chunk_len=64 * math.ceil(512 / k), profile="h200", **LAYER).predicted["cp_prefill"][0]
        for k in (5, 6)
    )
    assert six > 1.5 * five
    assert plan_prefill([32768], profile="h200", **LAYER).num_cp_chunks == 5


@pytest.mark.parametrize("tokens, sequences, k, v", [(2048, 16, 16, 32), (512, 1, 16, 32), (8192, 4, 16, 64)])
def test_what_fills_a_gpu_or_is_short_stays_whole(tokens: int, sequences: int, k: int, v: int) -> None:
    for half_lives in (None, typical_half_lives(v)):
        plan = plan_prefill([tokens] * sequences, head_half_lives=half_lives, profile="h200", **heads(k, v))
        assert plan.num_cp_chunks == sequences


def test_a_long_sequence_among_short_ones_is_split() -> None:
    plan = plan_prefill([65536, *[500] * 20], profile="h200", **LAYER)
    assert plan.cp_chunk_len < 65536 and plan.num_cp_chunks > 23


def test_half_lives_change_the_choice() -> None:
    # where every head forgets within a few chunks, stage 2 costs nearly nothing
    def seconds(half_lives: list[float] | None, cp_chunk_len: int | None = None) -> float:
        return total(
            plan_prefill([65536], cp_chunk_len=cp_chunk_len, head_half_lives=half_lives, profile="h200", **LAYER)
        )

    forgets = [4.0] * 32
    assert seconds(forgets) < 0.9 * seconds(None)
    assert seconds(forgets) <= 1.01 * min(seconds(forgets, 64 * math.ceil(1024 / k)) for k in range(2, 60))


@pytest.mark.parametrize("ownership", ["contiguous", "zigzag"])
@pytest.mark.parametrize("seq_lens", [[1 << 17], [40_000, 9_000, 30_000], [700] * 30])
def test_a_reproducible_choice_does_not_know_the_world_size(seq_lens: list[int], ownership: str) -> None:
    plans = [
        plan_prefill(
            seq_lens,
            world_size=world,
            ownership=ownership,
            require_reproducible=True,
            fixup=fixup,
            profile="h200",
            **LAYER,
        )
        for world, fixup in ((1, "auto"), (3, "auto"), (64, "auto"))
    ]
    assert all(plan.reproducible for plan in plans)
    if plans[0].num_tokens_total >= 4 * 8192:
        assert plans[0].num_cp_chunks > len(seq_lens)  # something for other ranks to do
    assert len({plan.grid for plan in plans}) == 1


def test_half_lives_make_stage_2_cheap() -> None:
    options = {"world_size": 4, "cp_chunk_len": 4096, "profile": "h200", "finish": "entry_first", **LAYER}
    remembers = plan_prefill([1 << 16], **options)
    forgets = plan_prefill([1 << 16], head_half_lives=[16.0] * 32, **options)  # 16 half-lives are 256 tokens
    never = plan_prefill([1 << 16], head_half_lives=[16.0] * 32, forget_below=0, **options)
    assert forgets.predicted["precompute_mn"][1] < 0.1 * remembers.predicted["precompute_mn"][1]
    assert never.predicted == remembers.predicted
    assert forgets.predicted["cp_prefill"] == remembers.predicted["cp_prefill"]


def test_lanes_are_given_cp_chunks_to_run() -> None:
    plan = plan_prefill([1 << 16], world_size=2, lanes_per_rank=4, profile="h200", **LAYER)
    assert all(len(lane) for rank in range(2) for lane in plan.rank_plan(rank).lanes)


@pytest.mark.parametrize("lengths, world_size", [([26109] * 7, 2), ([2580] * 3, 2), ([2393] * 3, 2), ([1352] * 2, 4)])
def test_a_split_gains_3_percent_on_several_ranks_too(lengths: list[int], world_size: int) -> None:
    """Sequences that lie whole on the ranks, and whose splits gain less in whole plans."""
    given = {"world_size": world_size, "opens": True, "fold_span": 1, "finish": "entry_first", "profile": "h200"}
    plan = plan_prefill(lengths, **given, **LAYER)
    assert plan.cp_chunk_len >= lengths[0] and not plan.crosses_ranks


def test_untold_choices_are_within_5_percent_of_the_best_and_as_near_both_kinds_of_gates_as_any_grid() -> None:
    """On the shapes of the sweep on an H200; a grid is as far behind as with the gates with which it is farther."""
    times: dict[str, dict[tuple[int, int], dict[str, float]]] = {}
    for line in (Path(__file__).parents[2] / "bench/results/sweep_h200.jsonl").read_text().splitlines():
        row = json.loads(line)
        if row["ms"]:
            grids = times.setdefault(row["shape"], {})
            grids.setdefault((row["first"], row["cp_chunk_len"]), {})[row["gates"]] = row["ms"]
    assert len(times) == 11
    for shape, grids in times.items():
        tokens, sequences, k, v = map(int, re.split("[x:/]", shape))
        best = {gates: min(of[gates] for of in grids.values() if gates in of) for gates in ("forget", "one")}
        behind = {grid: max(of[g] / best[g] - 1 for g in best) for grid, of in grids.items() if len(of) == 2}
        chosen = plan_prefill([tokens] * sequences, profile="h200", **heads(k, v)).grid
        assert behind[chosen] <= min(0.05, min(behind.values()) + 0.002), shape
