"""Every refusal names the argument, what was given and what is allowed."""

from __future__ import annotations

from typing import Any

import pytest

from gdncp.plan import plan_prefill
from tests.plan.strategies import HEADS

BASE: dict[str, Any] = {"seq_lens": [100, 50], "world_size": 2, "cp_chunk_len": 64, **HEADS}


class NotABool:
    """As numpy's: an index, and yet a bool by name."""

    def __index__(self) -> int:
        return 1


NotABool.__name__ = "bool_"


@pytest.mark.parametrize(
    "change, words",
    [
        ({"seq_lens": []}, ["seq_lens", "at least one"]),
        ({"seq_lens": 5}, ["seq_lens", "sequence of non-negative ints", "5"]),
        ({"seq_lens": "12"}, ["seq_lens", "'12'"]),
        ({"seq_lens": [3, -1]}, ["seq_lens[1]", "non-negative", "-1"]),
        ({"seq_lens": [3, 2.0]}, ["seq_lens[1]", "non-negative int", "2.0"]),
        ({"seq_lens": [True]}, ["seq_lens[0]", "True"]),
        ({"seq_lens": [NotABool()]}, ["seq_lens[0]"]),
        ({"world_size": 0}, ["world_size", "positive int", "0"]),
        ({"world_size": True}, ["world_size", "positive int", "True"]),
        ({"num_q_heads": 0}, ["num_q_heads", "positive int", "0"]),
        ({"num_q_heads": 3}, ["num_q_heads=3", "num_k_heads=2", "num_v_heads=4", "GQA", "GVA"]),
        ({"num_v_heads": 3}, ["num_v_heads=3", "GVA"]),
        ({"num_q_heads": 4, "num_k_heads": 1, "num_v_heads": 2}, ["num_k_heads=1", "GQA"]),
        ({"head_dim": 0}, ["head_dim", "positive int", "0"]),
        ({"cp_chunk_len": 0}, ["cp_chunk_len", "positive multiple of the chunk size (64)", "0"]),
        ({"cp_chunk_len": 100}, ["cp_chunk_len", "multiple of the chunk size (64)", "100"]),
        ({"cp_chunk_len": 64.0}, ["cp_chunk_len", "64.0"]),
        ({"first_cp_chunk_len": 100}, ["first_cp_chunk_len", "multiple of the chunk size (64)", "100"]),
        ({"cp_chunk_len": None, "first_cp_chunk_len": 64}, ["first_cp_chunk_len must be None", "cp_chunk_len", "64"]),
        ({"lanes_per_rank": 0}, ["lanes_per_rank", "positive int", "0"]),
        ({"checkpoint_every_n_tokens": -64}, ["checkpoint_every_n_tokens", "non-negative", "-64"]),
        ({"checkpoint_every_n_tokens": 16}, ["checkpoint_every_n_tokens", "multiple of the chunk size", "16"]),
        ({"checkpoint_positions": [[1]]}, ["checkpoint_positions", "one entry per sequence (2)", "1"]),
        ({"checkpoint_positions": [[1], 7]}, ["checkpoint_positions", "per sequence"]),
        ({"checkpoint_positions": [[0], []]}, ["checkpoint_positions[0][0]", "strictly ascending", "0"]),
        ({"checkpoint_positions": [[101], []]}, ["checkpoint_positions[0]", "101"]),
        ({"checkpoint_positions": [[], [5, 5]]}, ["checkpoint_positions[1]", "strictly ascending", "[5, 5]"]),
        (
            {"checkpoint_positions": [[], []], "checkpoint_every_n_tokens": 64},
            ["checkpoint_positions", "must be None", "checkpoint_every_n_tokens=64"],
        ),
        ({"fixup": "ring"}, ["fixup", "'auto', 'chain', 'all_gather', 'head_sharded', 'tree'", "'ring'"]),
        ({"fixup": "all-gather"}, ["fixup", "did you mean 'all_gather'?"]),
        ({"fixup": None}, ["fixup", "None"]),
        ({"fixup": "tree", "require_reproducible": True}, ["fixup must not be 'tree'", "require_reproducible"]),
        ({"seq_lens": [1 << 60, 50]}, ["seq_lens", "at most 1152921504606846976 tokens", "1152921504606847026"]),
        ({"profile": "h20"}, ["profile", "did you mean 'h200'?"]),
        (
            {"ownership": "zig-zag"},
            ["ownership", "'contiguous', 'zigzag' or [[(start, stop)", "did you mean 'zigzag'?"],
        ),
        ({"ownership": 3}, ["ownership", "[[(start, stop), ...] per rank]", "3"]),
        ({"ownership": [[(0, 150)]]}, ["ownership", "one list of ranges per rank (2)", "got 1"]),
        ({"ownership": [[0, 150], []]}, ["ownership", "[[(start, stop)"]),
        ({"ownership": [[(0, 100, 150)], []]}, ["ownership[0][0]", "(start, stop)", "3 values"]),
        ({"ownership": [[(0, 151)], []]}, ["ownership[0][0]", "within [0, 150)", "(0, 151)"]),
        ({"ownership": [[(100, 0)], []]}, ["ownership[0][0]", "(100, 0)"]),
        ({"ownership": [[(-1, 150)], []]}, ["ownership[0][0] start", "non-negative", "-1"]),
        ({"ownership": [[(0, 1.5)], []]}, ["ownership[0][0] stop", "1.5"]),
        (
            {"ownership": [[(0, 100)], [(90, 150)]]},
            ["ownership", "partition of [0, 150)", "(90, 150) of rank 1 overlaps (0, 100) of rank 0"],
        ),
        ({"ownership": [[(0, 100)], [(110, 150)]]}, ["ownership", "no rank holds [100, 110)"]),
        ({"ownership": [[(0, 100)], []]}, ["ownership", "no rank holds [100, 150)"]),
        ({"ownership": [[(10, 150)], []]}, ["ownership", "no rank holds [0, 10)"]),
        (
            {"head_half_lives": [1.0]},
            ["head_half_lives", "one positive number of tokens per state head (4)", "1 numbers"],
        ),
        ({"head_half_lives": [1.0, 2.0, 0.0, 1.0]}, ["head_half_lives[2]", "positive", "0.0"]),
        ({"head_half_lives": [1.0, 2.0, 3.0, float("nan")]}, ["head_half_lives[3]", "nan"]),
        ({"head_half_lives": 5}, ["head_half_lives", "5"]),
        ({"forget_below": 1}, ["forget_below", "[0, 1)", "1"]),
        ({"forget_below": -0.1}, ["forget_below", "-0.1"]),
        ({"forget_below": "small"}, ["forget_below", "'small'"]),
    ],
    ids=lambda value: str(value)[:60] if isinstance(value, dict) else "",
)
def test_refused(change: dict[str, Any], words: list[str]) -> None:
    plan_prefill(**BASE)
    with pytest.raises(ValueError) as refusal:
        plan_prefill(**{**BASE, **change})
    assert all(word in str(refusal.value) for word in words), refusal.value


def test_ints_of_other_kinds_are_ints() -> None:
    class Int64:
        def __init__(self, value: int):
            self.value = value

        def __index__(self) -> int:
            return self.value

    plan = plan_prefill(**{**BASE, "seq_lens": [Int64(100), 50], "world_size": Int64(2)})
    assert plan == plan_prefill(**BASE) and type(plan.seq_lens[0]) is int


def test_empty_ranges_and_any_order_are_allowed() -> None:
    plan = plan_prefill(**{**BASE, "ownership": [[(100, 150), (7, 7), (0, 50)], ((50, 100),)]})
    assert plan.token_ranges(0) == ((0, 50), (100, 150))
