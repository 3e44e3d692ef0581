"""Mailboxes, without GPUs: what the tables of a plan deliver, and what ranks agree on.

The fold is stood in for by one that takes the same tables; `test_mail_protocol.py` has the steps of kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings

from gdncp.backends.base import FoldRuns, folds_by_mail
from gdncp.collectives import chain, compose, peer_memory, state_fixup
from gdncp.collectives.agreement import agree_or_raise
from gdncp.collectives.fixup import in_spans
from gdncp.collectives.peer_memory import CHANNEL_ROWS, VARIABLE
from gdncp.collectives.spans import fold_in_spans, spans_of
from gdncp.plan import PrefillPlan, plan_prefill
from tests.distributed.affine import (
    BlockFold,
    Problem,
    RunsFold,
    make_plan,
    make_problem,
    rank_share,
    same_bits,
)
from tests.distributed.ranks import run_ranks
from tests.distributed.test_fixup import LONG, MANY, _ownerships
from tests.distributed.test_schedule import plans

CPU = torch.device("cpu")


# ---- what the tables of a plan deliver


class _MailFold(RunsFold):
    """One that leaves what it hands on in `mail`, by (from, to, message), and takes it from there."""

    def __init__(self, rank: int, mail: dict[tuple[int, int, int], torch.Tensor]):
        super().__init__()
        self.rank, self.mail = rank, mail

    def lacks(self, runs: Any) -> bool:
        """Whether something has not arrived: a kernel would wait."""
        wanted = zip(runs.source.tolist(), runs.source_message.tolist(), strict=True)
        return any(source >= 0 and (source, self.rank, message) not in self.mail for source, message in wanted)

    def fold_runs_by_mail(self, maps, entry_states, runs, mailboxes):
        exits = torch.full((runs.num_runs, *entry_states.shape[1:]), float("nan"))
        for run in range(runs.num_runs):
            if (source := int(runs.source[run])) >= 0:
                message = self.mail.pop((source, self.rank, int(runs.source_message[run])))
                entry_states[int(runs.entry_row[run])] = message
            else:
                assert int(runs.starts[run]) == 1 and int(runs.num_steps[run])
        rows = torch.where(runs.target >= 0, torch.arange(runs.num_runs), -1)
        given = {name: getattr(runs, name) for name in ("entry_row", "map_row", "num_steps", "starts", "num_fills")}
        self.fold_runs(maps, entry_states, FoldRuns(runs.num_runs, exit_row=rows, **given), exits)
        for run, (target, message) in enumerate(zip(runs.target.tolist(), runs.target_message.tolist(), strict=True)):
            if target >= 0:
                assert (self.rank, target, message) not in self.mail, "sent twice"
                self.mail[self.rank, target, message] = exits[run]


def _fold_by_mail(plan: PrefillPlan, shares: list[Any]) -> None:
    """All ranks in one process: a launch runs once all that it receives was sent.  Shares: (maps, entry states)."""
    mail: dict[tuple[int, int, int], torch.Tensor] = {}
    folds = [_MailFold(rank, mail) for rank in range(plan.world_size)]
    assert all(folds_by_mail(fold) for fold in folds)
    left = [list(chain.mail_on(plan, rank, CPU)) for rank in range(plan.world_size)]
    while any(left):
        ready = [rank for rank, launches in enumerate(left) if launches and not folds[rank].lacks(launches[0])]
        assert ready, "all ranks wait"
        for rank in ready:
            folds[rank].fold_runs_by_mail(*shares[rank], left[rank].pop(0), None)
    assert not mail


def _fix_by_mail(plan: PrefillPlan) -> None:
    shares = [rank_share(plan, rank, make_problem(plan)) for rank in range(plan.world_size)]
    _fold_by_mail(plan, [share[:2] for share in shares])
    for _, entry_states, expected in shares:
        assert same_bits(entry_states, expected)


def _with_spans(plan: PrefillPlan, problem: Problem) -> torch.Tensor:
    """Every CP chunk's entry state, from CP chunks alone: by composed maps along a sequence, by its own in a span."""
    fold, entry_states = BlockFold(), problem.entry_states.clone()
    transition, local_state = problem.transition, problem.local_state

    def after(state: torch.Tensor, row: int) -> torch.Tensor:
        return local_state[row] if plan.cp_chunks[row].is_first else fold(state, transition[row], local_state[row])

    for _, cp_chunks in groupby(plan.cp_chunks, lambda c: c.sequence):
        entry = None
        for _, span in groupby(cp_chunks, lambda c: (c.rank, c.ordinal // plan.fold_span)):
            rows = [c.index for c in span]
            first = rows[0]
            made, through = local_state[first], transition[first]
            for row in rows[1:]:
                made = fold(made, transition[row], local_state[row])
                through = fold(through, transition[row], torch.zeros_like(through))
            if entry is not None:
                entry_states[first] = entry
            for row in rows[1:]:
                entry_states[row] = after(entry_states[row - 1], row - 1)
            entry = made if entry is None else fold(entry, through, made)
    return entry_states


def _fix_spans_by_mail(plan: PrefillPlan) -> None:
    """What `Whole` launches: maps of spans, mail along them, folds inside them."""
    fold, problem = RunsFold(), make_problem(plan)
    problem = replace(problem, entry_states=_with_spans(plan, problem))
    shares, folded = [], []
    for rank in range(plan.world_size):
        maps, entry_states, expected = rank_share(plan, rank, problem)
        shares.append((maps, entry_states, expected))
        states = torch.full((len(spans_of(plan, rank)), *entry_states.shape[1:]), float("nan"))
        folded.append((compose(plan, rank, maps, fold), states))
    _fold_by_mail(plan, folded)
    for rank, ((maps, entry_states, expected), (_, states)) in enumerate(zip(shares, folded, strict=True)):
        inside = in_spans(plan, rank, CPU)
        assert inside is not None
        fold_in_spans(inside, states, maps, entry_states, fold)
        assert same_bits(entry_states, expected)
    assert fold.single_launches == 0


@pytest.mark.parametrize("seq_lens", [LONG, MANY, [64, 128]], ids=["long", "many", "short"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_states_by_mail_are_those_of_one_left_fold(world_size, seq_lens):
    for ownership in _ownerships(seq_lens, world_size):
        _fix_by_mail(make_plan(seq_lens, world_size, ownership, "chain"))


@pytest.mark.parametrize("fold_span", [2, 3, 50])
@pytest.mark.parametrize("seq_lens", [LONG, MANY, [64, 128]], ids=["long", "many", "short"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_states_of_spans_by_mail_are_those_of_one_left_fold(world_size, seq_lens, fold_span):
    """Also where ownership is cut inside spans."""
    for ownership in _ownerships(seq_lens, world_size):
        _fix_spans_by_mail(make_plan(seq_lens, world_size, ownership, "chain", fold_span))


def test_a_rank_with_nothing_to_fold_gets_its_entry_state():
    plan = make_plan([64 * 3], 3, [[(0, 64)], [(64, 128)], [(128, 192)]], "chain")
    (last,) = chain.mail_on(plan, 2, CPU)
    assert (last.num_steps.tolist(), last.source.tolist(), last.target.tolist()) == ([0], [1], [-1])
    _fix_by_mail(plan)


@settings(max_examples=60, deadline=None)
@given(plan=plans())
def test_every_message_has_a_number_of_its_own_below_the_most(plan):
    sent: dict[tuple[int, int], list[int]] = {}
    received: dict[tuple[int, int], list[int]] = {}
    for rank in range(plan.world_size):
        for runs in chain.mail_on(plan, rank, CPU):
            for source, message in zip(runs.source.tolist(), runs.source_message.tolist(), strict=True):
                if source >= 0:
                    received.setdefault((source, rank), []).append(message)
            for target, message in zip(runs.target.tolist(), runs.target_message.tolist(), strict=True):
                if target >= 0:
                    sent.setdefault((rank, target), []).append(message)
    most = peer_memory.most_messages(plan)
    assert {pair: sorted(m) for pair, m in sent.items()} == {pair: sorted(m) for pair, m in received.items()}
    assert all(sorted(m) == list(range(len(m))) and len(m) <= most for m in sent.values())
    assert most == max(map(len, sent.values()), default=0)


def test_only_some_chains_go_by_mail():
    words = {"num_q_heads": 4, "num_k_heads": 4, "num_v_heads": 8, "cp_chunk_len": 64, "world_size": 2}

    def channels(**more: Any) -> int:
        return peer_memory.channels_of(plan_prefill([1000], **{**words, "fixup": "chain", **more}), 8, 128)

    assert channels(finish="entry_first") == 8 * 16
    assert channels(finish="entry_first", ownership="zigzag") == 8 * 16  # one message each way
    assert channels(finish="entry_late") == channels(finish="entry_first", fixup="all_gather") == 0
    assert channels(finish="entry_first", fold_span=2) == 8 * 16  # states enter spans as they enter CP chunks
    assert channels(finish="entry_first", lanes_per_rank=2, lanes_by="heads") == 0


# ---- what ranks agree on


def _agreeing(rank: int, broken: dict[int, str], requests: list[int], wish: str) -> list[Any]:
    """Capacities by request where rank's memory cannot be had ("allocate") or mapped ("map"); or what was raised."""
    patch = pytest.MonkeyPatch()

    def allocate(num_bytes, device):
        if broken.get(rank) == "allocate" or (broken.get(rank) == "allocate more" and num_bytes > 1 << 21):
            raise RuntimeError("out of memory")
        return torch.empty(0)

    def map_(group, device, memory, capacity):
        if broken.get(rank) == "map":
            raise RuntimeError("no peer access")
        if broken.get(rank) == "map oddly":
            raise OSError("no file descriptor")
        return peer_memory.Mailboxes(capacity, torch.zeros(8, dtype=torch.int64))

    for name, stand_in in (
        ("_allocate", allocate),
        ("_map", map_),
        ("_uuid", lambda device: f"gpu {rank}"),
        ("_unreachable", lambda *_: "no NVLink" if broken.get(rank) == "reach" else None),
        ("_host", lambda: ("other",) if broken.get(rank) == "host" else ("this",)),
        ("backend_of", lambda group, kind: "nccl"),
    ):
        patch.setattr(peer_memory, name, stand_in)
    patch.setattr(peer_memory._Peers, "in_order", lambda peers: None)
    patch.setenv(VARIABLE, wish)
    group = dist.new_group(list(range(2)))
    found: list[Any] = []
    try:
        for num_channels in requests:
            try:
                boxes = peer_memory.mailboxes_of(group, CPU, num_channels)
                found.append(None if boxes is None else boxes.capacity)
            except RuntimeError as error:
                found.append(str(error))
    finally:
        patch.undo()
    return found


def _both(*arguments: Any) -> list[Any]:
    first, second = run_ranks(_agreeing, 2, *arguments)
    assert first == second
    return first


def test_mailboxes_grow_and_serve_what_needs_less():
    assert _both({}, [24, 16, 32, 33, 8, 64], "auto") == [32, 32, 32, 64, 64, 64]
    too_many = peer_memory.MOST_BYTES // peer_memory.PLACE_BYTES
    assert _both({}, [too_many, 8, too_many, 8], "auto") == [None, 8, None, 8]
    assert _both({}, [8], "0") == [None]


@pytest.mark.parametrize(
    "what, why",
    {
        "allocate": "rank 1: RuntimeError: out of memory",
        "map": "rank 1: RuntimeError: no peer access",
        "map oddly": "rank 1: OSError: no file descriptor",
        "reach": "rank 1: no NVLink",
        "host": "ranks are on several hosts",
    }.items(),
)
def test_where_one_rank_cannot_none_does(what, why):
    assert _both({1: what}, [8, 8], "auto") == [None, None]
    for said in _both({1: what}, [8, 8], "1"):
        assert said.startswith(f"{VARIABLE}=1, but mailboxes in peer memory cannot be had: {why}")


def test_what_there_is_stays_where_more_cannot_be_had():
    assert _both({0: "allocate more"}, [8, 128, 128, 8, 256], "auto") == [8, None, None, 8, None]


def test_a_capture_does_not_make_them(monkeypatch):
    monkeypatch.setattr(peer_memory, "is_capturing", lambda: True)
    monkeypatch.setattr(peer_memory, "backend_of", lambda group, kind: "nccl")
    group = SimpleNamespace(size=lambda: 2)
    with pytest.raises(
        RuntimeError, match=r"no mailboxes for this plan yet: .*gdncp\.warmup with dtype, before a capture"
    ):
        peer_memory._Peers(CPU).more(group, 8)
    monkeypatch.setenv(VARIABLE, "0")
    assert peer_memory._Peers(CPU).more(group, 8) is None


class _Stream:
    def __init__(self, raw: int):
        self.raw = self.cuda_stream = raw
        self.waited: list[_Stream] = []

    def wait_stream(self, other: _Stream) -> None:
        self.waited.append(other)


def test_calls_on_several_streams_follow_each_other(monkeypatch):
    """Eager ones, and those of one capture; a capture does not wait for what is not in it."""
    a, b, c = streams = [_Stream(raw) for raw in range(3)]
    now, capturing = [a], set()

    @contextmanager
    def on(stream: _Stream) -> Iterator[None]:
        assert stream is not a, "the default stream cannot capture, and may not be asked meanwhile"
        before, now[0] = now[0], stream
        yield
        now[0] = before

    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: now[0].raw, raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: now[0])
    monkeypatch.setattr(peer_memory, "is_capturing", lambda: now[0] in capturing)
    monkeypatch.setattr(torch.cuda, "stream", on)
    peers = peer_memory._Peers(CPU)

    def waits(*calls: _Stream) -> list[list[_Stream]]:
        found = []
        for stream in calls:
            now[0] = stream
            peers.in_order()
            found.append(stream.waited[:])
            stream.waited.clear()
        return found

    assert waits(a, a, b, b, a) == [[], [], [a], [], [b]]
    capturing |= {b, c}
    assert waits(b, b, c, b) == [[], [], [b], [c]]
    capturing -= {b, c}
    assert waits(a, b)[1] == [a]
    capturing |= set(streams[1:])
    assert waits(b, c, b) == [[], [b], [c]]
    capturing.clear()
    assert waits(c)[0] == [b]


def test_settings(monkeypatch):
    monkeypatch.setenv(VARIABLE, "yes")
    with pytest.raises(ValueError, match="GDNCP_PEER_MEMORY must be one of auto, 0, 1, got 'yes'"):
        peer_memory.setting()
    for value, meant in {"": "auto", "auto": "auto", "0": "0", "1": "1"}.items():
        monkeypatch.setenv(VARIABLE, value)
        assert peer_memory.setting() == meant


def _settings_differ(rank: int) -> str:
    patch = pytest.MonkeyPatch()
    patch.setenv(VARIABLE, str(rank))
    try:
        agree_or_raise(None, None, None, {})
    except ValueError as error:
        return str(error)
    finally:
        patch.undo()
    return "nothing"


def test_settings_are_the_same_on_every_rank():
    for said in run_ranks(_settings_differ, 2):
        assert said.startswith("ranks differ in GDNCP_PEER_MEMORY: '0' on rank 0; '1' on rank 1")


def _over_gloo(rank: int) -> str:
    plan = make_plan(LONG, 2, "contiguous", "chain")
    maps, entry_states, expected = rank_share(plan, rank, make_problem(plan))
    stats = state_fixup(plan, rank, maps, entry_states, _MailFold(rank, {}))
    assert same_bits(entry_states, expected)
    return stats.transport


def test_what_a_fold_could_send_by_mail_goes_over_gloo_where_the_group_is():
    assert run_ranks(_over_gloo, 2) == ["gloo", "gloo"]


def test_a_place_holds_the_widest_rows():
    assert peer_memory.PLACE_BYTES == CHANNEL_ROWS * 128 * 4
    assert peer_memory.memory_bytes(2, 256) == 128 + 2 * 256 * (16 + 2 * 4096)
