"""Batches, ownerships and plans to draw from."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from hypothesis import strategies as st

from gdncp.plan import PrefillPlan, plan_prefill

HEADS: dict[str, Any] = {"num_q_heads": 2, "num_k_heads": 2, "num_v_heads": 4, "profile": "cpu"}

lengths = st.one_of(st.just(0), st.integers(1, 3), st.sampled_from([63, 64, 65, 128, 192]), st.integers(0, 900))
batches = st.lists(lengths, min_size=1, max_size=7)


@st.composite
def explicit_ownerships(draw: st.DrawFn, num_tokens: int, world_size: int) -> list[list[tuple[int, int]]]:
    """Any partition: cut anywhere, dealt to any rank, listed in any order."""
    inner = draw(st.lists(st.integers(0, num_tokens), max_size=8))
    ranges: list[list[tuple[int, int]]] = [[] for _ in range(world_size)]
    for start, stop in pairwise(sorted({0, *inner, num_tokens})):
        ranges[draw(st.integers(0, world_size - 1))].append((start, stop))
    return [draw(st.permutations(own)) for own in ranges]


@st.composite
def plan_arguments(draw: st.DrawFn) -> dict[str, Any]:
    seq_lens = draw(batches)
    world_size = draw(st.integers(1, 9))
    ownership = draw(
        st.one_of(st.sampled_from(["contiguous", "zigzag"]), explicit_ownerships(sum(seq_lens), world_size))
    )
    positions = None
    every = draw(st.sampled_from([0, 64, 128, 320]))
    if not every and draw(st.booleans()):
        positions = [sorted(draw(st.sets(st.integers(1, n), max_size=5))) if n else [] for n in seq_lens]
    length = draw(st.sampled_from([None, 64, 128, 192, 1024]))
    return {
        "seq_lens": seq_lens,
        "world_size": world_size,
        "ownership": ownership,
        "cp_chunk_len": length,
        "first_cp_chunk_len": draw(st.sampled_from([None, 64, 192, 320])) if length else None,
        "checkpoint_every_n_tokens": every,
        "checkpoint_positions": positions,
        "fixup": draw(st.sampled_from(["auto", "chain", "all_gather", "head_sharded", "tree"])),
        "lanes_per_rank": draw(st.integers(1, 4)),
        "profile": draw(st.sampled_from(["cpu", "h200"])),
        **HEADS,
    }


plans: st.SearchStrategy[PrefillPlan] = plan_arguments().map(lambda arguments: plan_prefill(**arguments))
