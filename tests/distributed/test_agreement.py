"""Agreement: what is wrong on one rank is raised on every rank, in the same words."""

from __future__ import annotations

import gc
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from gdncp.collectives import agree, agree_or_raise, agreement, compare_digest_once
from tests.distributed.affine import make_plan
from tests.distributed.ranks import run_ranks

FACTS = {"scale": 0.125, "gate_space": "linear", "dtype": "bfloat16"}


def _agree_or_say(rank: int, errors: dict[int, str], digests: dict[int, str], facts: dict[int, dict[str, Any]]) -> str:
    try:
        agree_or_raise(None, errors.get(rank), digests.get(rank, "abc"), facts.get(rank, FACTS))
    except ValueError as error:
        return str(error)
    return "agreed"


@pytest.mark.parametrize(
    ("errors", "digests", "facts", "expected"),
    [
        ({}, {}, {}, "agreed"),
        ({2: "g has a NaN"}, {}, {}, "rank 2: g has a NaN"),
        ({2: "late", 1: "early"}, {0: "xyz"}, {}, "rank 1: early"),
        ({}, {1: "xyz"}, {}, "ranks differ in plan (by its digest): 'abc' on rank 0, 2; 'xyz' on rank 1"),
        ({}, {}, {0: {**FACTS, "scale": 1.0}}, "ranks differ in scale: 1.0 on rank 0; 0.125 on rank 1, 2"),
        ({}, {}, {2: {"scale": 0.125}}, "ranks differ in gate_space: 'linear' on rank 0, 1; 'not given' on rank 2"),
        ({}, {}, {2: {**FACTS, "fold_span": 2}}, "ranks differ in fold_span: 'not given' on rank 0, 1; 2 on rank 2"),
    ],
)
def test_every_rank_says_the_same(errors, digests, facts, expected):
    said = run_ranks(_agree_or_say, 3, errors, digests, facts)
    assert len(set(said)) == 1
    assert said[0].startswith(expected)


def test_one_process_agrees_with_itself():
    assert agree(None, 7) == [7]
    agree_or_raise(None, None, "abc", FACTS)
    with pytest.raises(ValueError, match=r"^g has a NaN$"):
        agree_or_raise(None, "g has a NaN", "abc", FACTS)
    compare_digest_once(make_plan([100], 1))


def _compare_tables(rank: int, paths: list[str | None], length: int) -> str:
    agreement._launch_table.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("GDNCP_LAUNCH_TABLE", raising=False)
        if paths[rank] is not None:
            patch.setenv("GDNCP_LAUNCH_TABLE", paths[rank])
        try:
            compare_digest_once(make_plan([length], 3))
        except ValueError as error:
            return str(error)
        finally:
            agreement._launch_table.cache_clear()
    return "agreed"


def test_ranks_launch_kernels_by_one_table(tmp_path):
    same, copy, other = (str(tmp_path / name) for name in "abc")
    for path, text in ((same, "{}"), (copy, "{}"), (other, "{ }")):
        Path(path).write_text(text)
    assert run_ranks(_compare_tables, 3, [same, copy, same], 1000) == ["agreed"] * 3
    for i, paths in enumerate([[None, same, None], [same, other, same], [same, same, str(tmp_path / "d")]]):
        said = run_ranks(_compare_tables, 3, paths, 1001 + i)  # a plan that they have not agreed on
        assert len(set(said)) == 1
        assert said[0].startswith("ranks differ in the launch table that GDNCP_LAUNCH_TABLE names (by its digest): ")


def _compare_often(rank: int) -> int:
    """How often ranks were asked."""
    asked = []
    real = agreement.agree
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agreement, "agree", lambda *args: asked.append(args) or real(*args))
        plan, other = make_plan([1000], 2), make_plan([1001], 2)
        for _ in range(3):
            compare_digest_once(plan)
            compare_digest_once(other)
        compare_digest_once(make_plan([1000], 2))  # another object, the same plan
        assert len(asked) == 2
        for _ in range(2):  # a new group starts afresh, also one of the same ranks
            group = dist.new_group([0, 1])
            compare_digest_once(plan, group)
            compare_digest_once(plan, group)
            dist.destroy_process_group(group)
            del group
            gc.collect()
        patch.setattr(agreement, "is_capturing", lambda: True)
        compare_digest_once(make_plan([1002], 2))
    return len(asked)


def test_a_plan_is_compared_once_per_group():
    assert run_ranks(_compare_often, 2) == [4, 4]


def _keep_few(rank: int) -> tuple[list[tuple[Any, ...]], int]:
    """What a group keeps of three agreements, and how often ranks were asked."""
    asked = []
    real = agreement.agree
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agreement, "_MOST_AGREED", 2)
        patch.setattr(agreement, "agree", lambda *args: asked.append(args) or real(*args))
        group = dist.new_group([0, 1])
        first, second, third = (make_plan([length], 2) for length in (1004, 1005, 1006))
        for plan in (first, second):
            compare_digest_once(plan, group)
        if rank == 0:
            compare_digest_once(first, group)  # which takes no peer, as it is known
        compare_digest_once(third, group)
        kept = [*agreement._agreed[group]]
        assert real(group, kept) == [kept, kept]  # or the ranks would wait for each other from here on
        for plan in (second, third):
            compare_digest_once(plan, group)
        assert len(asked) == 3
        compare_digest_once(first, group)  # asked again, on both
        kept = [*agreement._agreed[group]]
        dist.destroy_process_group(group)
    return kept, len(asked)


def test_ranks_forget_the_oldest_agreement_alike():
    said = run_ranks(_keep_few, 2)
    assert said[0] == said[1]
    kept, asked = said[0]
    assert [digest for digest, *_ in kept] == [make_plan([length], 2).digest for length in (1006, 1004)]
    assert asked == 4


def _compare_different(rank: int, lengths: list[int], world_size: int) -> list[str]:
    said = []
    for _ in range(2):  # what was refused is not remembered as agreed
        try:
            compare_digest_once(make_plan([lengths[rank]], world_size))
        except ValueError as error:
            said.append(str(error))
    return said


def test_ranks_with_different_plans_are_refused():
    said = run_ranks(_compare_different, 2, [2000, 2001], 2)
    assert said[0] == said[1] and len(said[0]) == 2
    assert "ranks differ in plan (by its digest)" in said[0][0]


def test_a_plan_for_another_number_of_ranks_is_refused():
    said = run_ranks(_compare_different, 2, [2000, 2000], 4)
    assert said == [["rank 0: group has 2 ranks; the plan was made for world_size=4"] * 2] * 2


def _agree_on_the_side(rank: int) -> int:
    """As under NCCL, which has no CPU backend: in a sub-group, whose members alone take part."""
    group = dist.new_group([1, 3], timeout=timedelta(seconds=20))
    made = []
    real = dist.new_group
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agreement, "backend_of", lambda group, device_type: "nccl")
        patch.setattr(dist, "new_group", lambda *args, **kwargs: made.append(args) or real(*args, **kwargs))
        if rank in (1, 3):
            assert agree(group, rank) == [1, 3]
            assert agree(group, -rank) == [-1, -3]
    return len(made)


def test_a_side_group_is_made_once_where_the_group_speaks_no_gloo():
    assert run_ranks(_agree_on_the_side, 4) == [0, 1, 0, 1]


def _call_kernel_sets(rank: int) -> str:
    plan = make_plan([1003], 2)
    compare_digest_once(plan)
    compare_digest_once(plan, backend="torch", final_state="all")
    with pytest.raises(ValueError) as error:
        compare_digest_once(plan, backend="hopper" if rank else "triton", final_state="all")
    return str(error.value)


def test_so_is_what_decides_what_is_exchanged():
    """Kernel sets differ in what a chain sends: ranks that chose different ones would wait for each other."""
    for said in run_ranks(_call_kernel_sets, 2):
        assert said.startswith("ranks differ in backend: 'triton' on rank 0; 'hopper' on rank 1")
