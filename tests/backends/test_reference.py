"""The oracle against the recurrence written out with matrices, and its hand-over to decode steps."""

import math

import pytest
import torch

from gdncp.reference import contract_ratio, decode_step, gated_delta_rule_reference, relative_error

SEED = 7


def tokens(lens, hq, hk, hv, k_dim=6, v_dim=5):
    """Float64, so that the oracle must add no rounding of its own."""
    gen = torch.Generator().manual_seed(SEED)

    def new(*shape):
        return torch.randn(sum(lens), *shape, dtype=torch.float64, generator=gen)

    h = max(hq, hv)
    alpha, beta = torch.sigmoid(2 + new(h)), 2 * torch.sigmoid(new(h))
    state = torch.randn(len(lens), h, v_dim, k_dim, dtype=torch.float64, generator=gen)
    return new(hq, k_dim), new(hk, k_dim), new(hv, v_dim), alpha, beta, state


def by_matrices(q, k, v, alpha, beta, state, lens, scale):
    h, outputs, states, t = state.shape[1], [], [], 0
    eye = torch.eye(k.shape[2], dtype=torch.float64)
    for i, n in enumerate(lens):
        heads = list(state[i])
        for _ in range(n):
            row = []
            for j in range(h):
                kj = k[t, j * k.shape[1] // h]
                vj = v[t, j * v.shape[1] // h]
                shrink = alpha[t, j] * (eye - beta[t, j] * torch.outer(kj, kj))
                heads[j] = heads[j] @ shrink + beta[t, j] * torch.outer(vj, kj)
                row.append(scale * heads[j] @ q[t, j * q.shape[1] // h])
            outputs.append(torch.stack(row))
            states.append(torch.stack(heads))
            t += 1
    return torch.stack(outputs), torch.stack(states)


@pytest.mark.parametrize(("hq", "hk", "hv"), [(2, 2, 2), (4, 2, 2), (2, 2, 4)])
def test_equals_the_recurrence_in_matrices(hq, hk, hv):
    lens = [4, 0, 9, 1]
    q, k, v, alpha, beta, state = tokens(lens, hq, hk, hv)
    result = gated_delta_rule_reference(
        q, k, v, alpha, beta, scale=0.3, initial_state=state, seq_lens=lens, checkpoint_every_n_tokens=2
    )
    outputs, states = by_matrices(q, k, v, alpha, beta, state, lens, 0.3)
    torch.testing.assert_close(result.output, outputs, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(result.final_state[[0, 2, 3]], states[[3, 12, 13]], rtol=1e-12, atol=1e-12)
    assert torch.equal(result.final_state[1], state[1])  # an empty sequence hands its initial state over
    # after 2 and 4 of the first's 4 tokens; 2, 4, 6 and 8 of the third's 9
    torch.testing.assert_close(result.checkpoints, states[[1, 3, 5, 7, 9, 11]], rtol=1e-12, atol=1e-12)


def test_defaults_log_gates_and_l2_norm():
    q, k, v, alpha, _, _ = tokens([7], 2, 2, 2)
    alpha[3] = 0
    unit = [x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k)]
    a = gated_delta_rule_reference(q, k, v, alpha.log(), gate_space="log", use_qk_l2norm_in_kernel=True)
    b = gated_delta_rule_reference(
        *unit, v, alpha, torch.ones_like(alpha), scale=1 / math.sqrt(6), initial_state=torch.zeros(1, 2, 5, 6)
    )
    torch.testing.assert_close(a.output, b.output, rtol=1e-12, atol=1e-12)
    assert a.checkpoints.shape == (0, 2, 5, 6)


def test_prefill_then_decode_is_one_prefill():
    lens = [5, 3]
    q, k, v, alpha, beta, state = tokens(lens, 2, 2, 4)
    whole = gated_delta_rule_reference(q, k, v, alpha, beta, initial_state=state, seq_lens=lens)
    head, last = torch.tensor([0, 1, 2, 3, 5, 6]), torch.tensor([4, 7])
    part = gated_delta_rule_reference(
        *(x[head] for x in (q, k, v, alpha, beta)), initial_state=state, seq_lens=[4, 2], checkpoint_positions=[[], [1]]
    )
    token = [x[last] for x in (q, k, v, alpha, beta)]
    output, new_state = decode_step(*token, state=part.final_state)
    torch.testing.assert_close(output, whole.output[last], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(new_state, whole.final_state, rtol=1e-12, atol=1e-12)
    assert part.checkpoints.shape[0] == 1

    narrow = decode_step(*(x.float() for x in token), state=part.final_state.bfloat16())
    assert narrow[0].dtype == narrow[1].dtype == torch.float32
    assert relative_error(narrow[1], whole.final_state).max() < 2e-2  # a bf16 state to start from, then fp32


def test_errors_are_measured_per_sequence_and_head():
    ref = torch.ones(5, 2, 3)
    x = ref.clone()
    x[3:, 1] += 0.5
    expected = torch.tensor([[0.0, 0.0], [0.0, 0.5]], dtype=torch.float64)
    torch.testing.assert_close(relative_error(x, ref, [3, 2]), expected)
    bound = torch.tensor([0.0, math.sqrt(6) * 0.25])
    torch.testing.assert_close(contract_ratio(x, ref, 0.25, bound, [3, 2]), 2 * expected)
    x[0, 0, 0] = float("nan")
    assert relative_error(x, ref, [3, 2])[0, 0] == math.inf
    assert relative_error(torch.zeros(1, 1, 2, 2), torch.zeros(1, 1, 2, 2)).item() == 0


def test_bad_arguments_are_named():
    q, k, v, *_ = tokens([7], 2, 2, 2)
    with pytest.raises(ValueError, match="seq_lens"):
        gated_delta_rule_reference(q, k, v, seq_lens=[3, 3])
    with pytest.raises(ValueError, match="checkpoint_positions"):
        gated_delta_rule_reference(q, k, v, checkpoint_positions=[[8]])
    with pytest.raises(ValueError, match="k has 2 heads"):
        gated_delta_rule_reference(torch.cat([q, q[:, :1]], 1), k, torch.cat([v, v[:, :1]], 1))
