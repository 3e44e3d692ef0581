"""Offsets beyond 2³¹ elements and grids beyond 65535: only a GPU has the room."""

import pytest
import torch

import gdncp
from tests.numeric import assert_output, assert_within, cu, random_tokens

pytestmark = pytest.mark.gpu


def repeat(tokens, times):
    return {name: x.repeat(times, *[1] * (x.dim() - 1)) for name, x in tokens.items()}


@pytest.mark.parametrize("chunk_len", [None, 8192])
def test_values_and_outputs_beyond_two_to_the_31_elements(chunk_len):
    heads, dim, tail = (1, 1, 64), 128, 300
    block = {n: x.cuda() for n, x in random_tokens(4096, heads, dim, dtype=torch.bfloat16).items()}
    tokens = {n: torch.cat([x, x[:tail]]) for n, x in repeat(block, 64).items()}
    total = tokens["v"].shape[0]
    assert tokens["v"].numel() > 2**31
    seq_lens = [total - tail, tail]  # the last sequence lies wholly beyond
    output, final = gdncp.chunk_gated_delta_rule(
        **tokens, cu_seqlens=cu(seq_lens, "cuda", torch.int64), cu_seqlens_host=[0, *cu(seq_lens)[1:].tolist()],
        output_final_state=True, backend="triton", _cp_chunk_len=chunk_len,
    )  # fmt: skip
    expected = gdncp.gated_delta_rule_reference(**{n: x[-tail:].cpu() for n, x in tokens.items()})
    assert_output(output[-tail:], expected.output, [tail], 5e-3)
    assert_within(final[1:], expected.final_state, 5e-3)
    assert output[: 2**25 // 64].isfinite().all()


@pytest.mark.parametrize("on_host", [True, False])
def test_a_pool_beyond_two_to_the_31_elements(on_host):
    slots, heads, dim = 2**31 // (32 * 128 * 128) + 2, (16, 16, 32), 128
    pool = torch.zeros(slots, 32, dim, dim, device="cuda")
    tokens = {n: x.cuda() for n, x in random_tokens(200, heads, dim, dtype=torch.bfloat16).items()}
    _, final = gdncp.chunk_gated_delta_rule(
        **tokens, initial_state=pool, output_state=pool, output_final_state=True, backend="triton",
        cu_seqlens=cu([200], "cuda"), cu_seqlens_host=[0, 200] if on_host else None,
        state_indices=torch.tensor([slots - 1], device="cuda"),
    )  # fmt: skip
    expected = gdncp.gated_delta_rule_reference(**{n: x.cpu() for n, x in tokens.items()})
    assert_within(final[-1:], expected.final_state, 5e-3)
    assert not final[:-1].any()


@pytest.mark.parametrize("on_host", [True, False])
def test_more_sequences_than_a_grid_has_rows(on_host):
    count, dim = 70_000, 16
    tokens = random_tokens(count, (1, 1, 1), dim)
    seq_lens = [1] * count
    output, final = gdncp.chunk_gated_delta_rule(
        **{n: x.cuda() for n, x in tokens.items()}, output_final_state=True, backend="triton",
        cu_seqlens=cu(seq_lens, "cuda"), cu_seqlens_host=list(range(count + 1)) if on_host else None,
    )  # fmt: skip
    state = tokens["beta"][:, :, None, None] * tokens["v"][:, :, :, None] * tokens["k"][:, :, None, :]
    assert_within(final, state, 2e-5)
    read = torch.einsum("thvk,thk->thv", state, tokens["q"]) / dim**0.5
    assert_within(output.transpose(0, 1)[None], read.transpose(0, 1)[None], 2e-5)
