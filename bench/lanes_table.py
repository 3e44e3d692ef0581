"""What lanes of heads are simulated to gain, and what the planner makes of it: the table of docs/planner.md.

    python bench/lanes_table.py

One sequence, heads 16/32, half-lives untold; the link is the only one: a GPU a node, or all GPUs in one. Needs no GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from gdncp.plan import LINKS, PROFILES, CostProfile, PrefillPlan, plan_prefill
from gdncp.plan.choose import typical_half_lives
from gdncp.simulate.machine import with_topology
from gdncp.simulate.schemes import simulate_plan

WORLDS, TOKENS_PER_GPU = (2, 8, 64), (1 << 14, 1 << 16, 1 << 18)
NETWORKS = {"NVLink": "nvlink4", "InfiniBand": "ib400", "TCP": "tcp100"}
LAYER: dict[str, Any] = {"num_q_heads": 16, "num_k_heads": 16, "num_v_heads": 32}
HEAD = "| link | GPUs | tokens a GPU | one lane, ms | two of heads, ms | the planner takes |"


def profile(network: str, world_size: int) -> CostProfile:
    link, h200 = LINKS[NETWORKS[network]], PROFILES["h200"]
    return with_topology(h200, world_size, link) if network == "NVLink" else with_topology(h200, 1, None, link)


def rows() -> Iterator[str]:
    yield HEAD
    yield "| --- | ---: | ---: | ---: | ---: | --- |"
    for network in NETWORKS:
        for world_size in WORLDS:
            for tokens in TOKENS_PER_GPU:
                yield row(network, world_size, tokens)


def row(network: str, world_size: int, tokens: int) -> str:
    """Times for gates that never forget / half-lives of 4 to 16384 tokens; both with the planner's grid for them."""
    given = {"world_size": world_size, "profile": profile(network, world_size), **LAYER}
    plan, one = (plan_prefill([tokens * world_size], lanes_per_rank=lanes, **given) for lanes in (None, 1))
    two = plan if plan.lanes_per_rank > 1 else replace(one, lanes_per_rank=2, lanes_by="heads")
    taken = "one" if plan.lanes_per_rank == 1 else f"two, CP chunks of {plan.cp_chunk_len}"
    if not one.crosses_ranks:
        taken += ": nothing crosses"
    cells = (network, world_size, f"{tokens >> 10}K", milliseconds(one), milliseconds(two), taken)
    return f"| {' | '.join(map(str, cells))} |"


def milliseconds(plan: PrefillPlan) -> str:
    gates = (None, tuple(typical_half_lives(plan.num_state_heads)))
    return " / ".join(f"{simulate_plan(replace(plan, head_half_lives=of)).seconds * 1e3:.2f}" for of in gates)


if __name__ == "__main__":
    print("\n".join(rows()))
