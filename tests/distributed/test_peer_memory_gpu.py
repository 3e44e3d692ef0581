"""States by mail between GPUs: the bits of messages and of one GPU, eager and in CUDA graphs; a peer that stays away.

Over NCCL where there are GPUs enough; over gloo ranks that share one, where torch lets them map each other's memory.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import gdncp
from gdncp.collectives.peer_memory import VARIABLE
from tests.conftest import hopper_only
from tests.distributed.ranks import RankPool, run_ranks
from tests.numeric import random_state, random_tokens

pytestmark = [pytest.mark.gpu, hopper_only]

GPUS = torch.cuda.device_count()
SHARED = [(2, "gloo"), (3, "gloo")]  # ranks of one GPU
GROUPS = [*((size, "nccl") for size in (2, 4, 8) if size <= GPUS), *SHARED]
on_groups = pytest.mark.parametrize("size, backend", GROUPS, ids=[f"{size}-{backend}" for size, backend in GROUPS])
CHUNK = 128
REPLAYS = 50
BEFORE = os.environ.get(VARIABLE)


@contextmanager
def _wishing(wish: str) -> Iterator[None]:
    patch = pytest.MonkeyPatch()
    patch.setenv(VARIABLE, wish)
    patch.setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    patch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    try:
        yield
    finally:
        patch.undo()


def _cases(size: int) -> dict[str, dict[str, Any]]:
    """Arguments of `plan_prefill` by name; every state head more or less has runs and programs of other numbers."""
    long, many = CHUNK * 6 * size, [CHUNK * 4 * size + 5, 0, 700, CHUNK * 3 * size, 64]
    one_at_the_end = [[(CHUNK * r, CHUNK * (r + 1))] for r in range(size)]
    empty_in_the_middle = [[] for _ in range(size)]
    empty_in_the_middle[0], empty_in_the_middle[-1] = [(0, CHUNK * 5)], [(CHUNK * 5, long)]
    there_and_back = [[(a, min(a + CHUNK, long)) for a in range(r * CHUNK, long, size * CHUNK)] for r in range(size)]
    return {
        "one sequence": {"seq_lens": [long]},
        "zigzag": {"seq_lens": [long], "ownership": "zigzag"},
        "several, zigzag": {"seq_lens": many, "ownership": "zigzag"},
        "several": {"seq_lens": many},
        "nothing to fold": {"seq_lens": [CHUNK * size], "ownership": one_at_the_end},
        "ranks without tokens": {"seq_lens": [long], "ownership": empty_in_the_middle},
        "there and back": {"seq_lens": [long], "ownership": there_and_back},
        "spans": {"seq_lens": [long], "fold_span": 3},
        "several, zigzag, in spans": {"seq_lens": many, "ownership": "zigzag", "fold_span": 2},
        "a span a rank": {"seq_lens": [CHUNK * 4 * size], "fold_span": 4},
    }


class _Bound:
    """A plan's calls on this rank over a group, beside those of one GPU."""

    def __init__(self, rank: int, size: int, group: Any, case: dict[str, Any], heads: int, dim: int):
        given = {"num_q_heads": heads, "num_k_heads": heads, "num_v_heads": 2 * heads, "head_dim": dim}
        words = {"cp_chunk_len": CHUNK, "fixup": "chain", "finish": "entry_first", **given}
        words["fold_span"] = case.get("fold_span", 1)
        self.plan = gdncp.plan_prefill(world_size=size, **{**case, **words})
        self.alone = gdncp.plan_prefill(case["seq_lens"], **words)
        self.rank, self.group, self.heads, self.dim = rank, group, heads, dim
        self.ranges = self.plan.token_ranges(rank)
        self.draw(0)

    def draw(self, seed: int) -> None:
        """Other tokens, in place from the second time on; and what one GPU makes of them."""
        torch.manual_seed(seed)
        count, total = len(self.plan.seq_lens), sum(self.plan.seq_lens)
        tokens = random_tokens(total, heads=(self.heads, self.heads, 2 * self.heads), dim=self.dim, seed=seed)
        tokens = {n: x.to("cuda", torch.bfloat16 if n in "qkv" else torch.float32) for n, x in tokens.items()}
        state = random_state(count, 2 * self.heads, self.dim, seed=seed).cuda()
        one = gdncp.prefill(self.alone, **tokens, initial_state=state, backend="hopper")
        own = {n: torch.cat([x[a:b] for a, b in self.ranges] or [x[:0]]) for n, x in tokens.items()}
        own["initial_state"] = state
        if seed:
            for name, x in own.items():
                self.tokens[name].copy_(x)
        else:
            self.tokens = own
        self.expected = torch.cat([one.output[a:b] for a, b in self.ranges] or [one.output[:0]])
        self.final = one.final_state

    def call(self) -> gdncp.PrefillResult:
        return gdncp.prefill(self.plan, **self.tokens, group=self.group, backend="hopper")

    def check(self, result: gdncp.PrefillResult) -> None:
        assert torch.equal(result.output.view(torch.int16), self.expected.view(torch.int16))
        for sequence in range(len(self.plan.seq_lens)):
            if self.plan.final_state_owner(sequence) == self.rank:
                ours, theirs = result.final_state[sequence], self.final[sequence]
                assert torch.equal(ours.view(torch.int32), theirs.view(torch.int32))


@pytest.fixture(autouse=True, scope="module")
def _compiled() -> None:
    """Most kernels, ahead: ranks have a deadline."""
    for dim in (128, 64):
        _Bound(0, 1, None, {"seq_lens": [CHUNK * 4]}, 1, dim)


def _shared_or_skip(error: RuntimeError) -> str:
    """Why ranks that share a GPU cannot be had; anything else is raised."""
    if "overlapping" not in str(error):
        raise error
    return str(error)


def _same_bits(rank: int, size: int, dim: int) -> str | None:
    nccl = dist.get_backend() == "nccl"
    group, by_messages = dist.new_group(list(range(size))), dist.new_group(list(range(size)))
    for heads in (1, 8):
        for name, case in _cases(size).items():
            bound = _Bound(rank, size, group, case, heads, dim)
            try:
                with _wishing("auto" if nccl else "1"):
                    result = bound.call()
                    for _ in range(3):  # both places, and again
                        bound.check(bound.call())
            except RuntimeError as error:
                return _shared_or_skip(error)
            bound.check(result)
            assert result.fixup.transport == ("peer memory" if bound.plan.crosses_ranks else "none"), name
            bound.group = by_messages
            with _wishing("0"):
                result = bound.call()
            bound.check(result)
            assert result.fixup.transport == (dist.get_backend() if bound.plan.crosses_ranks else "none"), name
    return None


def _run(body: Any, size: int, backend: str, *arguments: Any) -> None:
    reasons = run_ranks(body, size, size, *arguments, backend=backend)
    if reasons[0] is not None:
        pytest.skip(reasons[0][:200])


@on_groups
@pytest.mark.parametrize("dim", [128, 64])
def test_states_by_mail_have_the_bits_of_messages_and_of_one_gpu(size, backend, dim):
    _run(_same_bits, size, backend, dim)


def _replayed(rank: int, size: int, first: str, second: str) -> str | None:
    """Two plans of other numbers of heads alternate in a graph and between its replays, over the same mailboxes."""
    group = dist.new_group(list(range(size)))
    cases = _cases(size)
    bounds = [_Bound(rank, size, group, cases[name], heads, 128) for name, heads in ((first, 2), (second, 8))]
    with _wishing("auto" if dist.get_backend() == "nccl" else "1"):
        try:
            for bound in bounds:
                bound.check(bound.call())
        except RuntimeError as error:
            return _shared_or_skip(error)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            captured = [(bound, bound.call()) for bound in (*bounds, bounds[0])]
        for replay in range(1, REPLAYS + 1):
            if replay % 5 == 0:
                for bound in bounds:
                    bound.draw(replay)
            for _, result in captured:
                result.output.fill_(float("nan"))
            graph.replay()
            for bound, result in captured:
                bound.check(result)
            eager = bounds[replay % 2]
            eager.check(eager.call())
    return None


@on_groups
@pytest.mark.parametrize(
    "first, second", [("one sequence", "several, zigzag"), ("zigzag", "there and back"), ("spans", "one sequence")]
)
def test_graphs_are_replayed_while_plans_alternate(size, backend, first, second):
    _run(_replayed, size, backend, first, second)


def _forked(rank: int, size: int) -> str | None:
    """Two calls on two streams of one capture follow each other, as eager ones do."""
    group = dist.new_group(list(range(size)))
    bounds = [_Bound(rank, size, group, _cases(size)[name], 8, 128) for name in ("one sequence", "several, zigzag")]
    with _wishing("auto" if dist.get_backend() == "nccl" else "1"):
        try:
            for bound in bounds:
                bound.check(bound.call())
        except RuntimeError as error:
            return _shared_or_skip(error)
        graph, beside = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            beside.wait_stream(torch.cuda.current_stream())
            results = [bounds[0].call()]
            with torch.cuda.stream(beside):
                results += [bounds[1].call(), bounds[0].call()]
            results.append(bounds[1].call())
            torch.cuda.current_stream().wait_stream(beside)
        for _ in range(REPLAYS):
            for result in results:
                result.output.fill_(float("nan"))
            graph.replay()
            for number, result in enumerate(results):
                bounds[number % 2].check(result)
    return None


@on_groups
def test_calls_on_two_streams_of_a_capture_follow_each_other(size, backend):
    _run(_forked, size, backend)


def _grown(rank: int, size: int) -> str | None:
    """A plan that needs more than there is comes after a capture: the graph goes on with what it has."""
    group = dist.new_group(list(range(size)))
    small = _Bound(rank, size, group, _cases(size)["one sequence"], 1, 64)
    large = _Bound(rank, size, group, _cases(size)["several, zigzag"], 8, 128)
    with _wishing("auto" if dist.get_backend() == "nccl" else "1"):
        try:
            small.check(small.call())
        except RuntimeError as error:
            return _shared_or_skip(error)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            captured = small.call()
        with pytest.raises(RuntimeError, match=r"no mailboxes for this plan yet|not on cuda"), _capturing():
            large.call()
        for _ in range(6):
            graph.replay()
            small.check(captured)
            large.check(large.call())
            small.check(small.call())
    return None


@contextmanager
def _capturing() -> Iterator[None]:
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        yield


@on_groups
def test_graphs_outlive_the_mailboxes_that_others_outgrow(size, backend):
    _run(_grown, size, backend)


TIMEOUT = 5.0  # seconds


def _waiting(rank: int, size: int, heads: int) -> str | None:
    groups = [dist.new_group(list(range(size)), timeout=timedelta(seconds=s)) for s in (60.0, TIMEOUT)]
    bound = _Bound(rank, size, groups[0], _cases(size)["one sequence"], heads, 128)
    with _wishing("auto" if dist.get_backend() == "nccl" else "1"):
        try:
            bound.check(bound.call())  # compiled; one rank may take longer
        except RuntimeError as error:
            return _shared_or_skip(error)
        bound.group = groups[1]
        bound.check(bound.call())
        if rank == 0:
            return "away"
        begun = time.monotonic()
        try:
            bound.call()
            torch.cuda.synchronize()
        except RuntimeError as error:
            seconds = time.monotonic() - begun
            return f"{'in time' if TIMEOUT - 1 < seconds < 3 * TIMEOUT else seconds}: {error}"
    return "nothing"


@pytest.mark.parametrize("heads", [1, 16])  # of which programs have 8 and 32 rows: one thread waits, and four
@pytest.mark.parametrize("size, backend", GROUPS[:1])
def test_who_waits_for_a_peer_that_stays_away_ends_at_the_groups_timeout(size, backend, heads):
    pool = RankPool(size, backend)
    try:
        outcomes = pool.outcomes(_waiting, size, heads)
    finally:
        pool.close()
    if "overlapping" in str(outcomes[0].value):
        pytest.skip(outcomes[0].value[:200])
    assert outcomes[0].value == "away"
    said = outcomes[1].value or outcomes[1].error  # a watchdog may end the process first
    assert ("in time" in said and "assert" in said) or "died" in said


def test_the_environment_is_as_it_was():
    assert os.environ.get(VARIABLE) == BEFORE
