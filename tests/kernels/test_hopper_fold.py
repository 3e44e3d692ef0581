"""The Hopper set's fold."""

import pytest
import torch

from gdncp.backends.base import AffineMaps, ComposingRuns, FoldRuns
from gdncp.collectives import peer_memory
from gdncp.collectives.peer_memory import COUNTS, WORDS_BYTES, Mailboxes
from gdncp_kernels.hopper.state_fixup import StateFold
from tests.conftest import DEVICE, hopper_only

HEADS = 2
pytestmark = hopper_only
both_dims = pytest.mark.parametrize("dim", [128, 64])
# runs that have nothing to fold: with so many more a program takes more rows, as an H200 has so many SMs
with_idle_runs = pytest.mark.parametrize(
    "dim, idle",
    [(128, 0), (128, 2), (128, 6), (64, 0), (64, 6), (64, 14)],
    ids=[f"{dim}, {rows} rows" for dim in (128, 64) for rows in (8, 16, 32)],
)


def random_maps(num_maps: int, dim: int, seed: int = 7) -> AffineMaps:
    gen = torch.Generator().manual_seed(seed)
    maps = AffineMaps.empty(num_maps, HEADS, dim, dim, torch.device(DEVICE))
    maps.transition.copy_(torch.randn(maps.transition.shape, generator=gen) / dim**0.5)
    maps.local_state.copy_(torch.randn(maps.local_state.shape, generator=gen))
    return maps


@both_dims
def test_fold_is_fp32_and_its_rows_are_their_own(dim):
    maps, fold = random_maps(2, dim), StateFold()
    state, transition, local_state = maps.local_state[0], maps.transition[1], maps.local_state[1]
    out = fold(state, transition, local_state)
    exact = state.double() @ transition.double() + local_state.double()
    assert (out.double() - exact).norm() <= 1e-6 * exact.norm()  # products of 22 bits
    rows = slice(8, 48)
    assert torch.equal(fold(state[:, rows], transition, local_state[:, rows]), out[:, rows])
    assert torch.equal(fold(state[1:], transition[1:], local_state[1:]), out[1:])


@with_idle_runs
@pytest.mark.parametrize("length", [2, 11])
def test_runs_have_the_bits_of_single_folds(dim, idle, length):
    """Three sequences on one rank: the start of one, the middle of one, and one CP chunk, which has nothing to fold.

    11 steps are more than transitions in flight.
    """
    maps, fold = random_maps(2 * length, dim), StateFold()
    num_states = 2 * length + 3
    states = torch.randn(num_states, HEADS, dim, dim, generator=torch.Generator().manual_seed(8)).to(DEVICE)
    expected = states.clone()
    expected[1] = maps.local_state[0]
    for row in range(1, length):
        expected[row + 1] = fold(expected[row], maps.transition[row], maps.local_state[row])
    second = length + 1
    for row in range(length):
        expected[second + row + 1] = fold(
            expected[second + row], maps.transition[length + row], maps.local_state[length + row]
        )

    def column(*x: int) -> torch.Tensor:
        return torch.tensor(x, device=DEVICE)

    none = [0] * idle
    runs = FoldRuns(
        3 + idle,
        column(0, second, num_states - 1, *none),
        column(0, length, 0, *none),
        column(length, length, 0, *none),
        column(1, 0, 1, *none),
    )
    fold.fold_runs(maps, states, runs)
    assert torch.equal(states, expected)


@with_idle_runs
def test_runs_hand_states_on(dim, idle):
    """Two runs that go on elsewhere, of which one fills nothing here, and one that ends here."""
    maps, fold = random_maps(9, dim), StateFold()
    states = torch.randn(9, HEADS, dim, dim, generator=torch.Generator().manual_seed(9)).to(DEVICE)
    expected, exits = states.clone(), torch.full_like(states[:3], 7.0)
    left = exits.clone()

    def folded(entry, row, num_steps, starts, num_fills):
        state = expected[entry]
        for j in range(num_steps):
            local = maps.local_state[row + j]
            state = local if starts and j == 0 else fold(state, maps.transition[row + j], local)
            if j < num_fills:
                expected[entry + j + 1] = state
        return state

    runs = [(0, 0, 3, 1, 2, 1), (3, 3, 4, 0, 0, 0), (7, 7, 1, 0, 1, -1), *[(0, 0, 0, 1, 0, -1)] * idle]
    for entry, row, num_steps, starts, num_fills, leave in runs[:3]:
        state = folded(entry, row, num_steps, starts, num_fills)
        if leave >= 0:
            left[leave] = state
    entry, row, num_steps, starts, num_fills, leave = (torch.tensor(x, device=DEVICE) for x in zip(*runs, strict=True))
    columns = FoldRuns(len(runs), entry, row, num_steps, starts, num_fills, leave)
    fold.fold_runs(maps, states, columns, exits)
    assert torch.equal(states, expected) and torch.equal(exits, left)


@with_idle_runs
@pytest.mark.parametrize("length", [1, 2, 5])
def test_composed_maps_have_the_bits_of_single_folds(dim, idle, length):
    """Of a span that starts its sequence, its local state; of another one, its transition too, -0.0 and all."""
    maps, fold = random_maps(2 * length + 1, dim), StateFold()
    maps.transition[length, 0, :, : dim // 2] = -0.0
    expected = random_maps(2 + idle, dim, seed=11)
    composed = random_maps(2 + idle, dim, seed=11)
    for row, made in ((0, 1), (length, 0)):
        local, transition = maps.local_state[row], maps.transition[row]
        for j in range(row + 1, row + length):
            local = fold(local, maps.transition[j], maps.local_state[j])
            transition = fold(transition, maps.transition[j], torch.zeros_like(transition))
        expected.local_state[made] = local
        if row:
            expected.transition[made] = transition
    runs = [(0, length, 1, 0), (length, length, 0, 0), (length, length, 0, 1), *[(0, 0, 0, 0)] * idle]
    columns = (torch.tensor(x, device=DEVICE) for x in zip(*runs, strict=True))
    fold.compose_runs(maps, ComposingRuns(len(runs), *columns), composed)
    for got, wanted in ((composed.local_state, expected.local_state), (composed.transition, expected.transition)):
        assert torch.equal(got.view(torch.int32), wanted.view(torch.int32))


@with_idle_runs
@pytest.mark.parametrize("length", [1, 5])
def test_runs_inside_spans_put_their_entry_states_in_place(dim, idle, length):
    """A span that starts its sequence, one in the middle, and one whose entry state is not known: from zeros."""
    maps, fold = random_maps(3 * length, dim), StateFold()
    states = torch.randn(3 * length + 1, HEADS, dim, dim, generator=torch.Generator().manual_seed(12)).to(DEVICE)
    spans = torch.randn(4, HEADS, dim, dim, generator=torch.Generator().manual_seed(13)).to(DEVICE)
    expected = states.clone()
    expected[length] = spans[2]
    for first, starts in ((0, 1), (length, 0), (2 * length, -1)):
        state = torch.zeros_like(states[0]) if starts < 0 else expected[first]
        for row in range(first, first + length - 1):
            local = maps.local_state[row]
            state = local if starts > 0 and row == first else fold(state, maps.transition[row], local)
            expected[row + 1] = state
    runs = [
        (length * i, length * i, length - 1, starts, row) for i, (starts, row) in enumerate(((1, 0), (0, 2), (-1, 3)))
    ]
    none = [(3 * length, 0, 0, 1, 0)] * idle
    entry, row, steps, starts, span_row = (torch.tensor(x, device=DEVICE) for x in zip(*runs, *none, strict=True))
    fold.fold_runs(maps, states, FoldRuns(len(runs) + idle, entry, row, steps, starts, span_row=span_row), spans=spans)
    assert torch.equal(states, expected)


def mailboxes_of_two(capacity: int, first: int) -> list[Mailboxes]:
    """Of two ranks that are both here; `first`: the number of messages that every channel has seen."""
    memory = [torch.zeros(peer_memory.memory_bytes(2, capacity), dtype=torch.uint8, device=DEVICE) for _ in range(2)]
    for of_rank in memory:
        of_rank[WORDS_BYTES : WORDS_BYTES + 4 * COUNTS * 2 * capacity].view(torch.int32).fill_(first)
    addresses = [of_rank.data_ptr() for of_rank in memory]
    tables = [torch.tensor(peer_memory.table_of(r, capacity, 10**9, addresses), device=DEVICE) for r in range(2)]
    return [Mailboxes(capacity, table, tuple(memory)) for table in tables]


def runs_by_mail(rank: int, columns: list[tuple[int, ...]], together: bool) -> list[FoldRuns]:
    """One launch, or a launch a run.  Columns: entry row, map row, steps, starts, fills, message in, message out."""

    def of(rows: list[tuple[int, ...]]) -> FoldRuns:
        numbers = [torch.tensor(x, device=DEVICE) for x in zip(*rows, strict=True)]
        other = torch.full_like(numbers[0], 1 - rank)
        none = torch.full_like(other, -1)
        source, target = (torch.where(x >= 0, other, none) for x in numbers[5:])
        words = {"source": source, "source_message": numbers[5], "target": target, "target_message": numbers[6]}
        return FoldRuns(len(rows), *numbers[:4], num_fills=numbers[4], **words)

    return [of(columns)] if together else [of([row]) for row in columns]


@both_dims
@pytest.mark.parametrize("first", [0, 2**31 - 3], ids=["from 0", "counts wrap"])
@pytest.mark.parametrize("sent, received", [(True, False), (False, True), (True, True), (False, False)])
def test_runs_by_mail_have_the_bits_of_single_folds(dim, sent, received, first):
    """Twenty sequences go from rank 0 to rank 1 and some of them back, in one launch each, of 32 rows a program, or in
    many, of 16; again and again, so that places and counts go round."""
    many, fold = 20, StateFold()
    boxes = mailboxes_of_two(many * HEADS * dim // 16, first)
    # rank 0 has 3 maps of each, and 2 of those that come back; rank 1 has 2, or none at the end of those that do not
    back = [i % 3 == 0 for i in range(many)]
    there = runs_by_mail(0, [(5 * i, 5 * i, 3, 1, 2, -1, i) for i in range(many)], sent)
    numbers = [sum(back[:i]) for i in range(many)]
    between = runs_by_mail(
        1,
        [(3 * i, 2 * i, 2, 0, 1, i, numbers[i]) if back[i] else (3 * i, 2 * i, 2 * (i % 2), 0, 2 * (i % 2), i, -1)
         for i in range(many)],
        received,
    )  # fmt: skip
    home = runs_by_mail(0, [(5 * i + 3, 5 * i + 3, 1, 0, 1, numbers[i], -1) for i in range(many) if back[i]], sent)
    for turn in range(5):
        maps = [random_maps(many * steps, dim, seed=10 * turn + steps) for steps in (5, 2)]
        states = [torch.full((many * rows, HEADS, dim, dim), float(turn), device=DEVICE) for rows in (5, 3)]
        expected = [x.clone() for x in states]
        for i in range(many):
            state = maps[0].local_state[5 * i]
            for j in range(3):
                if j:
                    state = fold(state, maps[0].transition[5 * i + j], maps[0].local_state[5 * i + j])
                if j < 2:
                    expected[0][5 * i + j + 1] = state
            expected[1][3 * i] = state
            for j in range(2 if back[i] or i % 2 else 0):
                state = fold(state, maps[1].transition[2 * i + j], maps[1].local_state[2 * i + j])
                if j < (1 if back[i] else 2):
                    expected[1][3 * i + j + 1] = state
            if back[i]:
                expected[0][5 * i + 3] = state
                row = 5 * i + 3
                expected[0][row + 1] = fold(state, maps[0].transition[row], maps[0].local_state[row])
        for rank, launches in ((0, there), (1, between), (0, home)):
            for runs in launches:
                fold.fold_runs_by_mail(maps[rank], states[rank], runs, boxes[rank])
        for got, wanted in zip(states, expected, strict=True):
            assert torch.equal(got, wanted)
