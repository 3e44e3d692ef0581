"""The numeric contract over lengths, gates, beta and dtypes: error flat in length, splits nearly free."""

import pytest
import torch

import gdncp
from tests.conftest import TARGETS, on_targets
from tests.numeric import GATES, assert_output, assert_within, random_tokens, tolerance_of


def errors(tokens, target, chunk_len, expected, **arguments):
    """Relative L2 of output and final state, the worst head."""
    device, backend, _ = target
    output, final = gdncp.chunk_gated_delta_rule(
        **{n: x.to(device) for n, x in tokens.items()}, output_final_state=True, _cp_chunk_len=chunk_len,
        use_cp=chunk_len is not None, backend=backend, forget_below=0.0, **arguments,
    )  # fmt: skip

    def worst(x, reference, dims):
        x, reference = x.double().cpu(), reference.double()
        return float(((x - reference).norm(dim=dims) / reference.norm(dim=dims)).max())

    return worst(output, expected.output, (0, 2)), worst(final, expected.final_state, (2, 3))


# With bf16 operands the state is rounded once a chunk; where every token reflects, that is never forgotten and adds up
# as the root of the number of chunks: 1.3e-2 after 1024 tokens (measured on an emulation), 1e-2 being allowed.
HOPPER_REFLECTS = "bf16 operands lose 1e-2 where beta is 2 for all of a thousand tokens"


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("beta", ["0 to 2", 2.0])
@pytest.mark.parametrize("gates", ["never", "weak"])
def test_error_does_not_grow_with_length_and_splits_are_nearly_free(gates, beta, target, request):
    if target.backend == "hopper" and beta == 2.0:
        request.applymarker(pytest.mark.xfail(strict=True, raises=AssertionError, reason=HOPPER_REFLECTS))
    # 65536 tokens on a GPU; on a CPU the oracle alone would take minutes
    long, short = (65536, 1024) if target[0] == "cuda" else (6144, 512)
    worst = {}
    for length in (short, long):
        tokens = target.tokens(length, (1, 1, 1), gates=gates, beta_max=2.0)
        if beta == 2.0:
            tokens["beta"] = torch.full_like(tokens["beta"], beta)
        expected = gdncp.gated_delta_rule_reference(**tokens)
        for chunk_len in (None, 256):
            worst[length, chunk_len] = max(errors(tokens, target, chunk_len, expected))
            assert worst[length, chunk_len] <= tolerance_of(target.dtype, tokens["beta"])
        # each entry state is one fp32 fold away from the last: measured up to 3 times the unsplit error
        assert worst[length, 256] <= 4 * max(worst[length, None], 2e-7)
    growth = (long / short) ** 0.5 if beta == 2.0 and gates == "never" else 1.0  # reflections contract nothing
    assert worst[long, None] <= 3 * growth * worst[short, None]  # 3: two draws of a maximum over heads differ by that


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("beta_max", [1.0, 2.0])
@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("dtype, target", on_targets(DTYPES, lambda target, dtype: target.takes(dtype, target.dim)))
def test_every_gate_profile_and_dtype(dtype, gates, beta_max, target):
    tokens = random_tokens(700, (1, 1, 3), target.dim, dtype=dtype, gates=gates, beta_max=beta_max)
    initial = target.states(2, 3)
    expected = gdncp.gated_delta_rule_reference(**tokens, initial_state=initial, seq_lens=[450, 250])
    device, backend, _ = target
    output, final = gdncp.chunk_gated_delta_rule(
        **{n: x.to(device) for n, x in tokens.items()}, initial_state=initial.to(device), output_final_state=True,
        cu_seqlens=torch.tensor([0, 450, 700], device=device), cu_seqlens_host=[0, 450, 700], _cp_chunk_len=128,
        backend=backend, forget_below=0.0,
    )  # fmt: skip
    tol = tolerance_of(dtype, tokens["beta"])
    assert_output(output, expected.output, [450, 250], tol)
    assert_within(final, expected.final_state, tol, what="final state")


@pytest.mark.parametrize("target", TARGETS)
def test_high_precision_is_fp32_arithmetic_on_narrow_inputs(target):
    tokens = random_tokens(500, (2, 2, 2), target.dim, dtype=torch.bfloat16, gates="never", beta_max=2.0)
    expected = gdncp.gated_delta_rule_reference(**tokens)
    if target.backend == "hopper":
        with pytest.raises(ValueError, match="precision is 'high'; only 'fast' is supported"):
            errors(tokens, target, 128, expected, precision="high")
        return
    _, state = errors(tokens, target, 128, expected, precision="high")
    assert state <= 2e-5  # the output is rounded to bf16, the state is not


@pytest.mark.parametrize("target", TARGETS)
def test_heads_one_to_one_gqa_and_gva(target):
    for heads in ((3, 3, 3), (6, 2, 2), (2, 2, 6)):
        tokens = target.tokens(150, heads, gates="weak")
        expected = gdncp.gated_delta_rule_reference(**tokens)
        assert max(errors(tokens, target, 64, expected)) <= target.tolerance
