"""The Hopper set's fold."""

import pytest
import torch

from gdncp.backends.base import AffineMaps, FoldRuns
from gdncp_kernels.hopper.state_fixup import StateFold
from tests.conftest import DEVICE, hopper_only

HEADS = 2
pytestmark = hopper_only
both_dims = pytest.mark.parametrize("dim", [128, 64])
# runs that have nothing to fold: with so many more there are more blocks of 16 rows than an H200 has SMs
with_idle_runs = pytest.mark.parametrize(
    "dim, idle",
    [(128, 0), (128, 6), (64, 0), (64, 14)],
    ids=["128, 16 rows", "128, 32 rows", "64, 16 rows", "64, 32 rows"],
)


def random_maps(num_maps: int, dim: int) -> AffineMaps:
    gen = torch.Generator().manual_seed(7)
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
    rows = slice(16, 48)
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
