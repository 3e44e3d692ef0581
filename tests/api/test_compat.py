"""flash-linear-attention's call: shapes, log gates and state layouts."""

import pytest
import torch

import gdncp
from gdncp import compat
from tests.conftest import DEVICE
from tests.numeric import assert_within, cu, random_state, random_tokens

B, T, H, D = 2, 70, 2, 32


def batch():
    tokens = random_tokens(B * T, dim=D)
    tokens["g"] = tokens["g"].log()
    return tokens, {name: x.unflatten(0, (B, T)) for name, x in tokens.items()}


@pytest.mark.parametrize("state_is_vk", [False, True])
def test_a_batch_of_equal_lengths(state_is_vk):
    packed, batched = batch()
    initial = random_state(B, H, D)
    given = initial if state_is_vk else initial.transpose(-1, -2).contiguous()
    output, final = compat.chunk_gated_delta_rule(
        **batched, initial_state=given, output_final_state=True, transpose_state_layout=state_is_vk
    )
    expected = gdncp.gated_delta_rule_reference(**packed, initial_state=initial, seq_lens=[T] * B, gate_space="log")
    assert output.shape == (B, T, H, D)
    assert_within(output.transpose(1, 2), expected.output.unflatten(0, (B, T)).transpose(1, 2), 2e-5)
    assert_within(final if state_is_vk else final.transpose(-1, -2), expected.final_state, 2e-5)


def test_packed_sequences_and_narrow_gates():
    packed, _ = batch()
    packed["beta"] = packed["beta"].bfloat16()
    output, final = compat.chunk_gated_delta_rule(**{n: x[None] for n, x in packed.items()}, cu_seqlens=cu([50, 90]))
    assert final is None
    expected = gdncp.gated_delta_rule_reference(
        **{**packed, "beta": packed["beta"].float()}, seq_lens=[50, 90], gate_space="log"
    )
    assert_within(output.transpose(1, 2), expected.output[None].transpose(1, 2), 2e-5)


def test_a_batch_with_cu_seqlens_is_refused():
    _, batched = batch()
    with pytest.raises(ValueError, match="q must have batch size 1 where cu_seqlens is given, got 2"):
        compat.chunk_gated_delta_rule(**batched, cu_seqlens=cu([T, T]))
    with pytest.raises(ValueError, match="head_first must be False"):
        compat.chunk_gated_delta_rule(**batched, head_first=True)
    with pytest.raises(ValueError, match=r"q must have shape \[B, T, H, D\]"):
        compat.chunk_gated_delta_rule(**{n: x[0] for n, x in batched.items()})


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (lambda x: {"k": x["k"][:, 1:]}, r"k must have shape \[2, 70, heads, dim\] like q, got \(2, 69, 2, 32\)"),
        (lambda x: {"g": x["g"][..., None]}, r"g must have shape \[2, 70, heads\] like q, got \(2, 70, 2, 1\)"),
        (lambda x: {"beta": [1.0]}, r"beta must be a torch.Tensor, got list"),
        (lambda x: {"v": None}, r"v must be a torch.Tensor, got NoneType"),
        (lambda x: {"initial_state": [0]}, r"initial_state must be a torch.Tensor, got list"),
        (lambda x: {"initial_state": x["q"][0]}, r"initial_state must have 4 dimensions"),
        (lambda x: {"g": -x["g"]}, r"g must be natural logs"),
        (lambda x: {n: t[:0] for n, t in x.items()}, r"q must have at least one sequence, got batch size 0"),
    ],
)
def test_bad_input_is_named(bad, message):
    _, batched = batch()
    with pytest.raises(ValueError, match=message):
        compat.chunk_gated_delta_rule(**{**batched, **bad(batched)})


def test_a_state_of_two_head_dims_is_told_apart():
    """K = 32, V = 16: a swapped layout has the wrong shape."""
    packed, batched = batch()
    v = packed["v"][..., :16].contiguous()
    initial = torch.randn(B, H, 32, 16, generator=torch.Generator().manual_seed(3))
    output, final = compat.chunk_gated_delta_rule(
        **{**batched, "v": v.unflatten(0, (B, T))}, initial_state=initial, output_final_state=True
    )
    expected = gdncp.gated_delta_rule_reference(
        **{**packed, "v": v}, initial_state=initial.mT, seq_lens=[T] * B, gate_space="log"
    )
    assert output.shape == (B, T, H, 16) and final.shape == initial.shape
    assert_within(final, expected.final_state.mT, 2e-5)


@pytest.mark.parametrize("state_is_vk", [False, True])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_what_is_given_to_hold_results_is_returned_in_the_layout_asked_for(state_is_vk, backend):
    """K = 32, V = 16; states, checkpoints and a pool in place."""

    def laid_out(states):
        return states if state_is_vk else states.mT.contiguous()

    def call(**arguments):
        return compat.chunk_gated_delta_rule(
            **batched, transpose_state_layout=state_is_vk, output_final_state=True, backend=backend, **arguments
        )

    batched = {name: x.to(DEVICE) for name, x in batch()[1].items()}
    batched["v"] = batched["v"][..., :16].contiguous()
    initial = laid_out(torch.randn(B, H, 16, 32, generator=torch.Generator().manual_seed(3)).to(DEVICE))
    expected, expected_final = call(initial_state=initial)
    output, final = torch.full_like(expected, 7.0), torch.full_like(initial, 7.0)
    every = {"checkpoint_every_n_tokens": 64, "checkpoint_cu_starts": torch.tensor([0, 1, 2], device=DEVICE)}
    kept = torch.full_like(initial, 7.0)
    found = call(initial_state=initial, output=output, output_state=final, state_checkpoints=kept, **every)
    assert found[0] is output and found[1] is final
    assert torch.equal(output, expected) and torch.equal(final, expected_final)
    packed = {name: x.flatten(0, 1) for name, x in batched.items()}
    reference = gdncp.gated_delta_rule_reference(
        **{name: x.unflatten(0, (B, T))[:, :64].flatten(0, 1) for name, x in packed.items()},
        initial_state=initial if state_is_vk else initial.mT, seq_lens=[64] * B, gate_space="log",
    )  # fmt: skip
    assert_within(kept if state_is_vk else kept.mT, reference.final_state, 2e-5)

    pool = torch.full((5, *initial.shape[1:]), 7.0, device=DEVICE)
    slots = torch.tensor([4, 1], device=DEVICE)
    pool[slots] = initial
    assert call(initial_state=pool, output_state=pool, state_indices=slots)[1] is pool
    assert torch.equal(pool[slots], expected_final) and bool((pool[[0, 2, 3]] == 7).all())


@pytest.mark.parametrize("name", ["initial_state", "output_state", "state_checkpoints"])
def test_a_state_of_the_other_layout_is_refused(name):
    _, batched = batch()
    batched["v"] = batched["v"][..., :16].contiguous()
    with pytest.raises(ValueError, match=rf"{name} must have shape \[.., 32, 16\] \(K, V\), got \(2, 2, 16, 32\)"):
        compat.chunk_gated_delta_rule(**batched, **{name: torch.zeros(B, H, 16, 32)})
    with pytest.raises(ValueError, match="output must be contiguous"):
        compat.chunk_gated_delta_rule(**batched, output=torch.zeros(B, T, 16, H).mT)


@pytest.mark.parametrize("reflects", [False, True])
def test_raw_gates_of_a_layer(reflects):
    _, batched = batch()
    gen = torch.Generator().manual_seed(3)
    raw, logit = (torch.randn(B, T, H, generator=gen).to(DEVICE).bfloat16() for _ in range(2))
    a_log, bias = torch.rand(H, generator=gen).to(DEVICE), torch.randn(H, generator=gen).to(DEVICE)
    decay = -a_log.exp() * torch.log1p((raw.float() + bias).exp())
    update = (2.0 if reflects else 1.0) / (1.0 + (-logit.float()).exp())
    words = {**batched, "output_final_state": True, "state_v_first": True}
    expected = compat.chunk_gated_delta_rule(**{**words, "g": decay, "beta": update})
    got = compat.chunk_gated_delta_rule(
        **{**words, "g": raw, "beta": logit},
        use_gate_in_kernel=True,
        A_log=a_log,
        dt_bias=bias,
        use_beta_sigmoid_in_kernel=True,
        allow_neg_eigval=reflects,
    )
    for x, y in zip(got, expected, strict=True):
        assert (x - y).norm() <= 1e-5 * y.norm()
    without = compat.chunk_gated_delta_rule(**{**words, "g": raw}, use_gate_in_kernel=True, A_log=a_log)[0]
    decay = -a_log.exp() * torch.log1p(raw.float().exp())
    assert (without - compat.chunk_gated_delta_rule(**{**words, "g": decay})[0]).norm() <= 1e-5 * without.norm()


def test_what_newer_callers_pass():
    packed, _ = batch()
    words = {name: x[None] for name, x in packed.items()} | {"cu_seqlens": cu([50, 90])}
    output, _ = compat.chunk_gated_delta_rule(**words)
    again, _ = compat.chunk_gated_delta_rule(**words, cu_seqlens_cpu=cu([50, 90]).cpu(), chunk_indices=cu([1]))
    assert torch.equal(again, output)
    a_log = torch.zeros(H, device=DEVICE)
    for bad, message in (
        ({"cu_seqlens_cpu": torch.tensor([0, 50, 141])}, "cu_seqlens_host"),
        ({"cu_seqlens_cpu": [0, 50, 140], "cu_seqlens_host": [0, 50, 140]}, "give one of them"),
        ({"state_v_first": True, "transpose_state_layout": True}, "give one of them"),
        ({"cp_context": object()}, "cp_context must be None"),
        ({"allow_neg_eigval": True}, "allow_neg_eigval must be False"),
        ({"use_gate_in_kernel": True}, "A_log must be given"),
        ({"use_gate_in_kernel": True, "A_log": a_log, "dt_bias": a_log[:1]}, "dt_bias must have shape"),
        ({"use_gate_in_kernel": True, "A_log": a_log, "g": None}, "g must be given"),
        ({"use_beta_sigmoid_in_kernel": True, "beta": None}, "beta must be given"),
    ):
        with pytest.raises(ValueError, match=message):
            compat.chunk_gated_delta_rule(**{**words, **bad})
