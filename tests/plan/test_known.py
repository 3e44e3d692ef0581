"""Plans that are known are given again, and never for other arguments."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from numpy import int64

from gdncp.plan import PROFILES, PrefillPlan, plan_prefill
from gdncp.plan.known import known

LAYER = {"num_q_heads": 2, "num_k_heads": 2, "num_v_heads": 4}


def test_the_same_arguments_give_the_plan_that_was_made() -> None:
    lengths = [1000, 0, 70]
    for batch in (lengths, tuple(lengths)):
        plan = plan_prefill(batch, world_size=2, head_half_lives=[5.0] * 4, **LAYER)
        assert plan_prefill(batch, world_size=2, head_half_lives=[5.0] * 4, **LAYER) is plan
    lengths[1] = 1  # of what was given, not of what the list has become
    assert plan_prefill(lengths, world_size=2, head_half_lives=[5.0] * 4, **LAYER).seq_lens == (1000, 1, 70)
    assert plan_prefill([1000, 0, 70], world_size=2, head_half_lives=[6.0] * 4, **LAYER).head_half_lives == (6.0,) * 4


def test_a_list_that_equals_a_known_one_may_change_too() -> None:
    """... and both are known again where they are what they were."""
    first = [1000, 300, 70, 2000, 20, 100]  # the ends and the middle are part of the key
    plan = plan_prefill(first, **LAYER)
    second = [int(str(n)) for n in first]
    for lengths in (second, second, first, second):
        assert plan_prefill(lengths, **LAYER) is plan
    second[1] = 301
    assert plan_prefill(second, **LAYER).seq_lens == (1000, 301, 70, 2000, 20, 100)
    assert plan_prefill(first, **LAYER) is plan
    second[1], first[1] = 300, 301
    assert plan_prefill(second, **LAYER) is plan and plan_prefill(first, **LAYER).seq_lens[1] == 301


def test_lengths_that_change_while_they_are_planned_are_those_of_the_call() -> None:
    def plan(lengths: list[int]) -> list[int]:
        batch[1] += 1  # by another thread
        return [*lengths]

    batch = [5, 6, 7]
    remembered = known(plan)
    assert remembered(batch) == [5, 6, 7] and remembered([5, 6, 7]) == [5, 6, 7]
    assert batch == [5, 7, 7]
    assert remembered(batch) == [5, 7, 7]


@pytest.mark.parametrize("bad", [{"world_size": True}, {"world_size": 1.0}, {"cp_chunk_len": 64.0}])
def test_what_is_equal_but_no_int_is_still_refused(bad: dict[str, object]) -> None:
    plan_prefill([1, 1, 1], world_size=1, cp_chunk_len=64, **LAYER)
    with pytest.raises(ValueError, match=next(iter(bad))):
        plan_prefill([1, 1, 1], **{"world_size": 1, "cp_chunk_len": 64, **bad}, **LAYER)
    for lengths in ([True, 1, 1], [1, 1.0, 1], (1, 1, True)):
        with pytest.raises(ValueError, match="seq_lens"):
            plan_prefill(lengths, world_size=1, cp_chunk_len=64, **LAYER)


@pytest.mark.parametrize("of", [list, tuple])
@pytest.mark.parametrize(
    "good, bad", [([9, 1, 0, 9, 9, 9], True), ([9, 0, 9, 9, 9, 9], False), ([9, 7, 9, 9, 9, 9], 7.0)]
)
def test_one_length_among_many_that_is_equal_but_no_int_is_refused(
    of: Callable[[list[int]], list[int]], good: list[int], bad: Any
) -> None:
    """... where a plan of ints is known; ints of other types give their own, once."""
    plan = plan_prefill(of(good), **LAYER)
    assert plan_prefill(of(good), **LAYER) is plan
    with pytest.raises(ValueError, match=r"seq_lens\[1\] must be a non-negative int, got"):
        plan_prefill(of([good[0], bad, *good[2:]]), **LAYER)
    others = [int64(n) if i == 4 else n for i, n in enumerate(good)]
    other = plan_prefill(of(others), **LAYER)
    assert other == plan and plan_prefill(of(others), **LAYER) is other
    assert plan_prefill(of(good), **LAYER) is plan


def test_what_cannot_be_a_key_or_is_in_a_file_is_planned_anew(tmp_path: Path) -> None:
    explicit = {"ownership": [[(0, 64)], [(64, 100)]], "world_size": 2}
    assert plan_prefill([100], **explicit, **LAYER) == plan_prefill([100], **explicit, **LAYER)
    file = tmp_path / "own.json"
    for seconds in (1e-3, 2e-3):
        costs = PROFILES["cpu"].costs() | {"launch_s": seconds}
        file.write_text(f'{{"name": "own", "costs": {costs}}}'.replace("'", '"').replace("False", "false"))
        assert plan_prefill([100], profile=str(file), **LAYER).profile.launch_s == seconds


def test_the_oldest_are_forgotten() -> None:
    made = []

    def plan(lengths: list[int]) -> list[int]:
        made.append(lengths)
        return [*lengths]

    remembered = known(plan, most=3)
    for n in (1, 2, 3, 1, 4, 1, 2):
        assert remembered([n]) == [n]
    assert made == [[1], [2], [3], [4], [1], [2]]
    for middle in range(9):  # of batches that differ inside alone, too
        remembered([7, middle, 8, 9])
    count = len(made)
    assert remembered([7, 8, 8, 9]) == [7, 8, 8, 9] and len(made) == count
    assert remembered([7, 0, 8, 9]) == [7, 0, 8, 9] and len(made) == count + 1


def test_a_plan_is_one_and_the_same_type() -> None:
    assert isinstance(plan_prefill((5,), **LAYER), PrefillPlan)
    assert plan_prefill.__doc__ and plan_prefill.__name__ == "plan_prefill"
