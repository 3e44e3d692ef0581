"""The fit finds the costs that made the times; no cost of a machine is lost on the way to a file and back."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from gdncp.calibrate.exchanges import costs_to_fit, exchange_measurements, with_nodes
from gdncp.calibrate.fit import Measurement, fit, median_error
from gdncp.calibrate.stages import COSTS, WHOLE, Effort, measurement, stage_plans, whole_plans
from gdncp.plan import PROFILES, CostProfile

H200 = PROFILES["h200"]
EFFORT = Effort(heads=((16, 32), (4, 8), (16, 64)), head_dim=128, num_tokens=32768, repeats=1)
TRUE = replace(
    H200, launch_s=3e-6, unit_s=6e-6, tile_t_s=6e-7, key_tile_t_s=4e-7, tile_n_s=1.6e-6, tile_m_s=0.9e-6,
    tile_prefill_s=1.7e-6, fold_launch_s=2.2e-6, fold_head_s=6e-8,
)  # fmt: skip


def measured(noise: float, opens: bool) -> list[Measurement]:
    generator = random.Random(0)
    base = replace(H200, opens=opens)
    return [
        measurement(stage, plan, replace(plan, profile=replace(TRUE, opens=opens)).predicted[stage][0])
        if not noise
        else measurement(stage, plan, replace(plan, profile=TRUE).predicted[stage][0] * generator.gauss(1, noise))
        for stage, plan in stage_plans(base, EFFORT)
    ]


@pytest.mark.parametrize("opens", [True, False])
def test_costs_that_made_the_times_are_found(opens: bool) -> None:
    found = fit(replace(H200, opens=opens), COSTS, measured(0.0, opens))
    for name in COSTS:
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=0.01), name


def test_noise_moves_predictions_no_more_than_itself() -> None:
    times = measured(0.03, True)
    found = fit(H200, COSTS, times)
    assert median_error(found, times) < 0.03
    for plan in whole_plans(TRUE, EFFORT):
        total = sum(stage[0] for stage in plan.predicted.values())
        assert measurement(WHOLE, plan, total).off(found) == pytest.approx(0, abs=0.05)


def test_no_cost_is_negative_and_what_nothing_tells_stays() -> None:
    def send(size: float, seconds: float) -> Measurement:
        def predict(profile: CostProfile) -> float:
            return profile.message_s + size / profile.bytes_per_s

        return Measurement("send", str(size), seconds, predict)

    times = [send(1e6, 1e-5), send(4e6, 6e-5)]  # a line that would start below zero
    found = fit(H200, ("message_s", "bytes_per_s", "collective_s"), times)
    assert found.message_s == 0 and found.collective_s == pytest.approx(H200.collective_s)
    assert 1e6 / 1.5e-5 < found.bytes_per_s < 1e6 / 1e-5


@pytest.mark.parametrize("world_size, local_world_size", [(8, 8), (16, 4)])
def test_costs_of_exchanges_are_found(world_size: int, local_world_size: int) -> None:
    true = replace(
        H200, collective_s=7e-6, message_s=4e-6, bytes_per_s=300e9, ranks_per_node=local_world_size,
        node_message_s=14e-6, node_bytes_per_s=40e9, node_peer_s=2e-6,
    )  # fmt: skip
    rows = [{"bytes": 4096 * 4**i, "seconds": 1.0} for i in range(8)]
    found = {"world_size": world_size, "exchanges": {}}
    for name in ("all_gather", "all_to_all", "send_recv"):
        found["exchanges"][name] = {"eager": {"rows": []}, "captured": {"rows": rows}}
    times = [replace(m, seconds=m.predict(true)) for m in exchange_measurements(found)]
    names = costs_to_fit(world_size, local_world_size)
    fitted = fit(with_nodes(H200, world_size, local_world_size), names, times)
    assert fitted.ranks_per_node == (8 if world_size == local_world_size else local_world_size)
    # between nodes nothing stays within one: only the sum of a collective's start and a message's tells
    assert median_error(fitted, times) < 0.01 and max(abs(m.off(fitted)) for m in times) < 0.03
    if world_size == local_world_size:
        for name in names:
            assert getattr(fitted, name) == pytest.approx(getattr(true, name), rel=0.01), name
