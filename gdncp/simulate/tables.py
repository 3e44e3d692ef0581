"""Times on H200s to hold predictions against: peers' own, measured and published, and the aims for gdncp."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from gdncp.plan import PrefillPlan, plan_prefill
from gdncp.plan.profiles import PROFILES
from gdncp.simulate.gates import half_lives
from gdncp.simulate.peers import find, simulate_peer
from gdncp.simulate.schemes import simulate_plan

K = 1024


class Row(NamedTuple):
    scheme: str
    gpus: int
    tokens: int
    heads: tuple[int, int]  # of q and k, and of v
    given_ms: float
    predicted_ms: float

    @property
    def error(self) -> float:
        return self.predicted_ms / self.given_ms - 1


# Measured on two GPUs of one host, heads 16/32, eager: FLA 0.6.0, FlashQLA 0.1.3 between cards, and within them too.
# FLA's first was between 3.92 and 4.13.
MEASURED = {32 * K: (4.02, 2.19, 2.19), 128 * K: (14.6, 7.39, 2.79), 512 * K: (57.2, 28.5, 9.86)}
# Published by FlashQLA for eight GPUs, eager, against FLA 0.5.1.
PUBLISHED = {
    (16, 32): {
        32 * K: (1.311, 1.036, 0.857),
        128 * K: (2.639, 2.016, 1.268),
        256 * K: (4.829, 3.511, 1.688),
        1024 * K: (17.75, 11.94, 4.955),
    },
    (16, 16): {
        32 * K: (1.187, 0.926, 0.787),
        128 * K: (2.225, 1.939, 1.013),
        256 * K: (4.008, 3.414, 1.260),
        1024 * K: (14.52, 11.67, 2.845),
    },
}
# Ours, measured on two GPUs of one host, heads 16/32, CUDA graphs, by chains: `entry_first` through peer memory, commit
# 5f1e95f (bench/results); `entry_late` by NCCL, commit 28e7e1e.
OURS_MEASURED = {
    ("entry_first", 32 * K): (0.287, 0.346, 0.398),
    ("entry_first", 128 * K): (0.832, 1.096, 1.396),
    ("entry_first", 512 * K): (3.138, 4.230, 5.666),
    ("entry_late", 32 * K): (0.345, 0.375, 0.423),
    ("entry_late", 128 * K): (0.867, 1.109, 1.392),
}
# Aims for gdncp, heads 16/32, CUDA graphs: gates as initialised, half-lives 4 to 16384, alpha = 1.
AIMS = {
    (2, 128 * K): (0.78, 1.05, 1.45),
    (2, 512 * K): (3.1, 3.9, 5.7),
    (8, 32 * K): (0.18, 0.20, 0.21),
    (8, 128 * K): (0.29, 0.39, 0.44),
    (8, 1024 * K): (1.55, 2.2, 3.0),
}
AIM_GATES = ("fresh", "forget", "one")
WEAK_TOKENS = 64 * K
WEAK_AIMS = {"fresh": 0.95, "forget": 0.88, "one": 0.70}  # of one GPU's pace, at 8 GPUs


def peer_rows() -> list[Row]:
    rows = []
    names = ("fla-cp", "flashqla-inter", "flashqla-inter-intra")
    cases = [(2, (16, 32), MEASURED, ("0.6.0", "0.1.3", "0.1.3"))]
    cases += [(8, heads, table, ("0.5.1", "published", "published")) for heads, table in PUBLISHED.items()]
    for gpus, heads, table, versions in cases:
        for tokens, times in table.items():
            for name, version, given in zip(names, versions, times, strict=True):
                scheme = f"{name}:{version}"
                seconds = simulate_peer(find(scheme), PROFILES["h200"], gpus, tokens, max(heads)).seconds
                rows.append(Row(scheme, gpus, tokens, heads, given, seconds * 1e3))
    return rows


def measured_rows() -> list[Row]:
    """Ours as it was measured: planned without half-lives."""
    return [
        Row(f"ours, {finish}, {gates}", 2, tokens, (16, 32), given, untold_seconds(2, tokens, gates, finish) * 1e3)
        for (finish, tokens), times in OURS_MEASURED.items()
        for gates, given in zip(AIM_GATES, times, strict=True)
    ]


def aim_rows() -> list[Row]:
    """Ours with the shipped profile and the planner's choices."""
    return [
        Row(f"ours, {gates}", gpus, tokens, (16, 32), given, ours_seconds(gpus, tokens, gates) * 1e3)
        for (gpus, tokens), times in AIMS.items()
        for gates, given in zip(AIM_GATES, times, strict=True)
    ]


def weak_rows() -> list[tuple[str, float, float]]:
    """(gates, aim, predicted) efficiency of eight GPUs."""
    return [
        (gates, aim, ours_seconds(1, WEAK_TOKENS, gates) / ours_seconds(8, 8 * WEAK_TOKENS, gates))
        for gates, aim in WEAK_AIMS.items()
    ]


def ours_seconds(gpus: int, tokens: int, gates: str) -> float:
    return simulate_plan(_ours(gpus, tokens, head_half_lives=half_lives(gates, 32))).seconds


def untold_seconds(gpus: int, tokens: int, gates: str, finish: str) -> float:
    """With such gates, of which the plan knows nothing."""
    plan = _ours(gpus, tokens, finish=finish)
    return simulate_plan(replace(plan, head_half_lives=tuple(half_lives(gates, 32)))).seconds


def _ours(gpus: int, tokens: int, **given: Any) -> PrefillPlan:
    given |= {"num_q_heads": 16, "num_k_heads": 16, "num_v_heads": 32}
    return plan_prefill([tokens], world_size=gpus, profile="h200", **given)
