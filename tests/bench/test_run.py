"""What gets a time and what does not, on fake engines and a fake clock."""

import json
import time
from dataclasses import asdict, fields

import pytest
import torch

from gdncp.bench.cases import Case, Shape
from gdncp.bench.run import DeviceLost, Options, Row, chosen, document, run_case
from gdncp.bench.timing import Sample, interleave
from tests.bench.fakes import FakeClock, FakeEngine

CASE = Case(Shape(96, 1, 1, 2, 32), "one", torch.bfloat16, torch.device("cpu"))
CEILINGS = {"flops": 1e12, "bytes": 1e12}


def run(*engines, clock, **options):
    return run_case(CASE, engines, clock, Options(rounds=2, **options), ceilings=CEILINGS)


def test_a_figure_is_the_median_of_the_rounds_medians():
    assert Sample([[1, 2, 90], [3, 3, 3], [50, 60, 70]]).median == 3
    assert Sample([[], [4.0]]).median == 4 and Sample().median is None


def test_rounds_alternate_so_that_drift_hits_all_alike():
    clock = [0.0]

    def tick():
        clock[0] += 1
        return [clock[0]]

    found = interleave({"a": tick, "b": tick}, num_rounds=4)
    assert found["a"].rounds == [[1], [4], [5], [8]] and found["b"].rounds == [[2], [3], [6], [7]]
    assert found["a"].median == found["b"].median


def test_times_memory_and_floor_of_what_is_right():
    clock = FakeClock()
    (fast, slow), left_out = run(FakeEngine("a", clock, ms=2.0, ours=True), FakeEngine("b", clock, ms=3.0), clock=clock)
    assert not left_out and fast.status == slow.status == "ok"
    assert (fast.events_ms, fast.graph_ms, fast.gpu_ms) == (2.0, 2.0, 2.0) and slow.gpu_ms == 3.0
    assert fast.output_error < 3e-3 and fast.output_error_worst < 3e-3  # one rounding to bf16
    results = 96 * 2 * 32 * 2 + 2 * 32 * 32 * 4
    assert fast.peak_bytes == 8000 and fast.scratch_per_token_head == (8000 - results) / (96 * 2)
    by_bytes = 1e3 * CASE.shape.hbm_bytes(2) / 1e12
    by_flops = 1e3 * CASE.shape.tensor_flops() / 1e12
    assert fast.floor_ms == max(by_bytes, by_flops) and fast.floor_share == fast.floor_ms / 2.0


def test_one_percent_off_gets_no_time_and_its_error_is_shown():
    clock = FakeClock()
    wrong = FakeEngine("wrong", clock, off=1.01)
    (row, right), _ = run(wrong, FakeEngine("right", clock), clock=clock)
    assert row.status == "wrong" and right.status == "ok"
    assert row.gpu_ms is row.events_ms is row.graph_ms is row.floor_share is None
    assert 0.009 < row.output_error < 0.012 and "error of 0.01" in row.reason
    num_sets = 3
    assert wrong.num_calls == num_sets + 2  # on each set, for memory, and the one that was checked


def test_a_graph_that_computes_something_else_gets_no_time():
    clock = FakeClock()
    engine = FakeEngine("graph", clock)
    capture = clock.capture

    def other_results(calls):
        engine.off = 1.05
        return capture(calls)

    clock.capture = other_results
    (row,), _ = run(engine, clock=clock)
    assert row.status == "wrong" and row.reason.startswith("in a graph") and row.gpu_ms is None


def test_without_graphs_events_count():
    clock = FakeClock(graphs=False)
    (row,), _ = run(FakeEngine("a", clock, ms=5.0), clock=clock)
    assert row.graph_ms is None and row.gpu_ms == row.events_ms == 5.0 and "no graphs" in row.graph_reason


@pytest.mark.parametrize("when", [1, 9])  # in the first call, and while it is timed
def test_a_failure_is_the_rows_and_the_others_go_on(when):
    clock = FakeClock()

    def fail(engine):
        if engine.num_calls >= when:
            raise ValueError("no such shape")

    (bad, good), _ = run(FakeEngine("bad", clock, at_call=fail), FakeEngine("good", clock), clock=clock)
    assert (bad.status, bad.reason) == ("failed", "ValueError: no such shape") and bad.gpu_ms is None
    assert good.status == "ok" and good.gpu_ms == 1.0


def test_a_lost_device_ends_the_run_with_what_there_was():
    clock = FakeClock()

    def lose(engine):
        clock.lost = True
        raise RuntimeError("illegal memory access")

    with pytest.raises(DeviceLost, match="illegal memory access") as raised:
        run(FakeEngine("good", clock), FakeEngine("bad", clock, at_call=lose), clock=clock)
    assert [row.status for row in raised.value.rows] == ["ok", "failed"]


def test_rejections_and_the_deadline():
    clock = FakeClock()
    (row,), left_out = run(FakeEngine("a", clock, rejects="too small."), clock=clock)
    assert (row.status, row.reason, left_out) == ("rejected", "too small.", [])
    assert run(FakeEngine("a", clock), clock=clock, deadline=time.monotonic() - 1) == ([], ["a"])


def test_first_calls_only_time_nothing():
    clock = FakeClock()
    engine = FakeEngine("a", clock)
    (row,), _ = run(engine, clock=clock, only_first_calls=True)
    assert row.first_call_s is not None and row.gpu_ms is None and engine.num_calls == 2


def test_rows_are_strict_json_with_every_field():
    clock = FakeClock()
    rows, _ = run(FakeEngine("a", clock), FakeEngine("b", clock, off=2.0), clock=clock)
    found = json.loads(json.dumps(document({}, rows, {"c": "not here"}, ["d"]), allow_nan=False))
    assert set(found) == {"schema", "environment", "absent", "left_out", "rows"}
    assert found["rows"] == [asdict(row) for row in rows]
    assert set(found["rows"][0]) == {field.name for field in fields(Row)}


def test_engines_are_chosen_by_name_or_library():
    engines = [FakeEngine(name, None) for name in ("fla", "flashinfer:auto", "flashinfer:cp")]
    assert [e.name for e in chosen(engines, ["flashinfer"])] == ["flashinfer:auto", "flashinfer:cp"]
    assert [e.name for e in chosen(engines, ["flashinfer:cp", "fla"])] == ["fla", "flashinfer:cp"]
    with pytest.raises(ValueError, match="fla, flashinfer:auto, flashinfer:cp, got 'flash'"):
        chosen(engines, ["flash"])
