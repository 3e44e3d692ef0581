"""The schedule of units on workers, and what the stages cost by it."""

from __future__ import annotations

import heapq
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gdncp.plan import PROFILES, plan_prefill
from gdncp.plan.list_schedule import Launch, Workers, finish
from gdncp.plan.stage_model import Kind, StageModel

H200 = PROFILES["h200"]
LAYER = {"num_q_heads": 16, "num_k_heads": 16, "num_v_heads": 32}

# one second a tile, and nothing else costs anything
UNIT = replace(
    H200,
    workers=4,
    launch_s=0.0,
    unit_s=0.0,
    tile_t_s=1.0,
    key_tile_t_s=0.0,
    tile_n_s=1.0,
    tile_m_s=1.0,
    tile_prefill_s=1.0,
)
FIRST, MIDDLE, LAST, WHOLE = ((True, False), (False, False), (False, True), (True, True))


def one_by_one(num_workers: int, batches: list[tuple[int, float]]) -> list[float]:
    free = [0.0] * num_workers
    for units, seconds in batches:
        for _ in range(units):
            heapq.heapreplace(free, free[0] + seconds)
    return sorted(free)


# eighths are exact in binary, so that equal sums are equal
batches = st.lists(st.tuples(st.integers(1, 90), st.integers(1, 400).map(lambda n: n / 8)), min_size=1, max_size=8)


@settings(deadline=None, max_examples=300)
@given(st.integers(1, 12), batches)
def test_equal_units_at_a_time_are_units_one_by_one(num_workers: int, units: list[tuple[int, float]]) -> None:
    workers = Workers(num_workers)
    workers.run(units)
    free = sorted(time for time, count in workers._free for _ in range(count))
    assert free == pytest.approx(one_by_one(num_workers, units))
    assert workers.finish == free[-1]


def test_a_million_units_are_a_few_steps() -> None:
    workers = Workers(132)
    workers.run([(1, 5.0), (10**9, 1e-6)])
    assert len(workers._free) <= 132 and workers.finish == pytest.approx((5 + 1000) / 132, rel=1e-6)


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 12), st.lists(st.tuples(batches.map(tuple), st.integers(1, 4)), max_size=3).map(tuple))
def test_what_is_launched_several_times_is_in_order(num_workers: int, launch: Launch) -> None:
    workers = Workers(num_workers)
    for units, times in launch:
        for _ in range(times):
            workers.run(units)
    assert finish(num_workers, launch) == workers.finish


def seconds(model: StageModel, kinds: dict[tuple[int, tuple[bool, bool]], int]) -> tuple[float, ...]:
    return model.seconds({Kind(chunks, *ends): count for (chunks, ends), count in kinds.items()})


def test_scans_cost_what_they_read() -> None:
    profile = replace(UNIT, workers=1, opens=False, tile_m_s=10.0, forget_bits=24)
    model = StageModel(profile, 2, 2, 128, [64 / 24, math.inf])
    # one head forgets within a chunk; the other reads all 10 chunks, and M where the CP chunk is not the first
    assert seconds(model, {(10, FIRST): 1})[1] == pytest.approx(1 + 10)
    assert seconds(model, {(10, MIDDLE): 1})[1] == pytest.approx(1 + 110)
    assert seconds(model, {(10, LAST): 1})[1] == 0
    assert seconds(model, {(10, MIDDLE): 3})[1] == pytest.approx(3 * 111)
    exact = StageModel(profile, 2, 2, 128, [64 / 24, math.inf], forget_below=0)
    assert seconds(exact, {(10, MIDDLE): 1})[1] == pytest.approx(2 * 110)


def test_an_opening_is_one_unit_of_stage_2s_launch() -> None:
    model = StageModel(replace(UNIT, tile_prefill_s=2.0), 2, 2, 128)
    # 2 heads on 4 workers: openings (20 s) beside the first N and M (10 s each)
    assert seconds(model, {(10, FIRST): 1, (10, MIDDLE): 1, (10, LAST): 1}) == (60 / 4, 20, 20)
    # ... of which there are two rounds on the other two workers
    assert seconds(model, {(10, FIRST): 1, (10, MIDDLE): 2, (10, LAST): 1})[1] == 30
    # nothing comes before a sequence that is one CP chunk, so stage 4 runs it
    assert seconds(model, {(10, WHOLE): 1})[1:] == (0, 20)
    apart = StageModel(replace(UNIT, tile_prefill_s=2.0, opens=False), 2, 2, 128)
    assert seconds(apart, {(10, FIRST): 1, (10, LAST): 1})[1:] == (10, 20)


def test_a_partial_wave_costs_a_whole_one() -> None:
    model = StageModel(UNIT, 4, 4, 128)
    times = [seconds(model, {(5, WHOLE): count})[2] for count in (1, 2, 3)]
    assert times == [5, 10, 15]
    five_heads = StageModel(UNIT, 5, 5, 128)
    assert seconds(five_heads, {(5, WHOLE): 1})[2] == 10


@settings(deadline=None, max_examples=60)
@given(
    st.dictionaries(
        st.builds(Kind, st.integers(1, 300), st.booleans(), st.booleans()), st.integers(1, 40), min_size=1, max_size=6
    ),
    st.sampled_from([None, [5.0, 100.0, 4000.0, math.inf]]),
    st.booleans(),
)
def test_the_bound_is_one(kinds: dict[Kind, float], half_lives: list[float] | None, opens: bool) -> None:
    model = StageModel(replace(H200, opens=opens), 4, 4, 128, half_lives)
    least, found = model.least_seconds(kinds), sum(model.seconds(kinds))
    assert least <= found * (1 + 1e-9)
    # Graham: a list schedule takes less than twice what is least
    assert found <= 2 * least


def test_more_of_anything_is_not_faster() -> None:
    def total(tokens: int, heads: int, sequences: int, half_life: float) -> float:
        layer = {"num_q_heads": heads, "num_k_heads": heads, "num_v_heads": heads}
        plan = plan_prefill(
            [tokens] * sequences, cp_chunk_len=2048, profile="h200", head_half_lives=[half_life] * heads, **layer
        )
        return sum(sum(stage) for stage in plan.predicted.values())

    base = (20_000, 8, 3, 50.0)
    for more in ((25_000, 8, 3, 50.0), (20_000, 16, 3, 50.0), (20_000, 8, 6, 50.0), (20_000, 8, 3, 5000.0)):
        assert total(*more) > total(*base)


# ms on an H200 (bench/results/h200.json), alpha = 1, as the planner cuts
@pytest.mark.parametrize(
    "tokens, sequences, k, v, first, cp_chunk_len, measured",
    [
        (8192, 1, 16, 32, 1792, 1600, 0.1761),
        (32768, 1, 16, 32, 5376, 6848, 0.5834),
        (131072, 1, 16, 32, 20480, 27648, 2.2204),
        (32768, 1, 4, 8, 2048, 1920, 0.2007),
        (131072, 1, 4, 8, 5120, 7872, 0.6527),
        (262144, 1, 2, 4, 4480, 7808, 0.6725),
        (2048, 16, 16, 32, 2048, 2048, 0.3772),
        (32768, 1, 16, 64, 10112, 11328, 0.9054),
        (32768, 1, 2, 8, 2048, 1920, 0.1903),
        (8192, 4, 16, 64, 8192, 8192, 0.6780),
        (512, 1, 16, 32, 512, 512, 0.0291),
    ],
)
def test_the_h200_takes_what_was_measured(
    tokens: int, sequences: int, k: int, v: int, first: int, cp_chunk_len: int, measured: float
) -> None:
    layer = {"num_q_heads": k, "num_k_heads": k, "num_v_heads": v}
    plan = plan_prefill(
        [tokens] * sequences, cp_chunk_len=cp_chunk_len, first_cp_chunk_len=first, profile="h200", **layer
    )
    # 8 %: worst where a stage's own start is most of it
    assert 1e3 * sum(stage[0] for stage in plan.predicted.values()) == pytest.approx(measured, rel=0.08)
