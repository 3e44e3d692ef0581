"""The Hopper set's moves of states have the bits of `gdncp.states`; plain Triton, so in the interpreter too."""

import pytest
import torch

from gdncp import states
from gdncp_kernels.hopper.states import load_states, store_states
from tests.conftest import DEVICE, HAS_CUDA

H, V, K = 3, 48, 32
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if HAS_CUDA else [])]  # the interpreter's is wrong


def pool(dtype, layout):
    x = torch.randn(6, H, V, K, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
    if layout == "transposed":
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)
    return torch.cat([x, x], dim=1)[:, :H] if layout == "slots apart" else x


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "slots apart"])
@pytest.mark.parametrize("rows", [None, [5, -1, 0, 6, 2, 1]], ids=["in order", "slots"])
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("stride", [1, 2])
def test_moves(dtype, layout, rows, index, stride):
    if rows is not None:  # between those of a stride of 2 lie slots that nobody asked for
        rows = torch.tensor([x for row in rows for x in (row, 3)[:stride]], dtype=index, device=DEVICE)[::stride]
    out_rows = torch.tensor([7, 0, 1, 3, 2, 6], device=DEVICE)
    loaded, expected = (torch.full((8, H, V, K), 9.0, device=DEVICE) for _ in range(2))
    load_states(pool(dtype, layout), rows, loaded, out_rows)
    states.load_states(pool(dtype, layout), rows, expected, out_rows)
    assert torch.equal(loaded, expected)

    ours = torch.randn(6, H, V, K, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    stored, expected = pool(dtype, layout), pool(dtype, layout)
    store_states(ours, stored, rows)
    states.store_states(ours, expected, rows)
    assert torch.equal(stored, expected) and stored.stride() == expected.stride()


def test_no_rows_and_no_slots():
    out = torch.full((2, H, V, K), 9.0, device=DEVICE)
    none, one = torch.zeros(0, dtype=torch.int64, device=DEVICE), torch.zeros(1, dtype=torch.int64, device=DEVICE)
    load_states(pool(torch.float32, "contiguous"), none, out, none)
    assert bool((out == 9).all())
    load_states(pool(torch.float32, "contiguous")[:0], one, out, one)
    assert not out[0].any() and bool((out[1] == 9).all())
    store_states(out[:1], pool(torch.float32, "contiguous")[:0], one)
    store_states(out[:0], out, none)
