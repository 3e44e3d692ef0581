"""Tables built on the device from upper bounds: the same bits as the host plan's, and no way out of the buffers."""

from itertools import pairwise

import pytest
import torch

import gdncp
from gdncp import flashinfer_api
from tests.numeric import assert_output, assert_within, checkpoint_starts, cu, random_state, random_tokens

H, D = 2, 32


@pytest.fixture
def lengths_on_device(monkeypatch):
    """Make a CPU call behave as one whose lengths only the device knows."""
    monkeypatch.setattr(flashinfer_api.validation, "cu_seqlens_arguments", lambda *_: None)
    monkeypatch.setattr(flashinfer_api.validation, "checkpoint_buffers", lambda *_: None)


def run(seq_lens, chunk_len, every=64, **extra):
    total = sum(seq_lens)
    rows = sum(n // every for n in seq_lens)
    buffer = torch.full((rows + 2, H, D, D), 7.0)
    result = gdncp.chunk_gated_delta_rule(
        **random_tokens(total, dim=D, gates="weak"),
        initial_state=random_state(len(seq_lens), H, D),
        output_final_state=True,
        cu_seqlens=cu(seq_lens),
        checkpoint_every_n_tokens=every,
        state_checkpoints=buffer[:rows],
        checkpoint_cu_starts=checkpoint_starts(seq_lens, every),
        _cp_chunk_len=chunk_len,
        **extra,
    )
    assert bool((buffer[rows:] == 7).all())
    return *result, buffer[:rows]


BATCHES = [[300], [100, 0, 130, 64, 1], [0, 0, 200], [200, 0], [1, 2, 3], [63, 64, 65, 128], [640, 1]]


@pytest.mark.parametrize("chunk_len", [None, 64, 128, 192])
@pytest.mark.parametrize("seq_lens", BATCHES, ids=str)
def test_same_bits_as_with_host_lengths(seq_lens, chunk_len, request):
    with_host = run(seq_lens, chunk_len, use_cp="auto" if chunk_len else False)
    request.getfixturevalue("lengths_on_device")
    on_device = run(seq_lens, chunk_len)
    assert all(torch.equal(a, b) for a, b in zip(with_host, on_device, strict=True))


@pytest.mark.parametrize(
    "offsets", [[0, 12, 8, 16], [5, 100], [0, 100], [0, 500], [-3, 60, 200], [0, 500, 100, 128]], ids=str
)
@pytest.mark.parametrize("chunk_len", [None, 64])
def test_lengths_that_lie_stay_inside_the_buffers(offsets, chunk_len, lengths_on_device):
    """Nobody can refuse what only the device knows; it is clamped to [0, T] and made non-decreasing."""
    tokens, output = random_tokens(128, dim=D), torch.full((128, H, D), 7.0)
    gdncp.chunk_gated_delta_rule(
        **tokens, cu_seqlens=torch.tensor(offsets), output=output, output_final_state=True, _cp_chunk_len=chunk_len
    )
    clamped = torch.tensor(offsets).clamp(0, 128).cummax(0).values.tolist()
    covered = slice(clamped[0], clamped[-1])
    assert output[covered].isfinite().all() and not (output[covered] == 7).any()
    assert bool((output[: clamped[0]] == 7).all()) and bool((output[clamped[-1] :] == 7).all()), "rows nobody covers"
    lens = [b - a for a, b in pairwise(clamped)]
    expected = gdncp.gated_delta_rule_reference(**{n: x[covered] for n, x in tokens.items()}, seq_lens=lens)
    assert_output(output[covered], expected.output, lens, 2e-5)


def test_a_max_seqlen_that_is_too_small_costs_no_token(lengths_on_device):
    tokens, seq_lens = random_tokens(256, dim=D), [200, 56]
    output, final = gdncp.chunk_gated_delta_rule(
        **tokens, cu_seqlens=cu(seq_lens), output_final_state=True, max_seqlen=128, use_cp=True
    )
    expected = gdncp.gated_delta_rule_reference(**tokens, seq_lens=seq_lens)
    assert_output(output, expected.output, seq_lens, 2e-5)
    assert_within(final, expected.final_state, 2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e5m2], ids=str)
def test_checkpoint_rows_that_no_sequence_earns_keep_what_they_held(dtype, lengths_on_device):
    """A buffer sized from an upper bound; and offsets that lie write to no row that is not theirs."""
    tokens, seq_lens = random_tokens(256, dim=D), [130, 126]
    expected = gdncp.gated_delta_rule_reference(**tokens, seq_lens=seq_lens, checkpoint_every_n_tokens=64)
    for starts, earned in (([0, 2, 3], 3), ([0, 2, 9], 3), ([0, 1, 2], 2), ([3, 4, 5], 0)):
        rows = torch.full((6, H, D, D), 7.0).to(dtype)
        gdncp.chunk_gated_delta_rule(
            **tokens, cu_seqlens=cu(seq_lens), checkpoint_every_n_tokens=64, _cp_chunk_len=64,
            state_checkpoints=rows, checkpoint_cu_starts=torch.tensor(starts),
        )  # fmt: skip
        if starts[0] == 0:
            taken = expected.checkpoints[:3] if earned == 3 else expected.checkpoints[[0, 2]]
            assert_within(rows[:earned].float(), taken, 2e-5 if dtype == torch.float32 else 0.25, 1e-3)
        assert bool((rows[earned if starts[0] == 0 else 5 :] == 7).all()), starts
