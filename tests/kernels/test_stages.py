"""Each stage of the Triton set against its formula in float64, on tiny shapes (the interpreter is slow)."""

import math
from dataclasses import replace

import pytest
import torch

from gdncp.backends.base import Sinks
from gdncp.plan import plan_prefill
from gdncp.reference import contract_ratio, relative_error
from tests.conftest import DEVICE
from tests.kernels.cases import (
    BACKEND,
    TOLERANCE,
    device_table,
    make_inputs,
    plan_table,
    random_states,
    reference,
    rows_of,
    run_maps,
    state_shape,
)


def plan_for(inputs, seq_lens, cp_chunk_len, **arguments):
    heads = {f"num_{n}_heads": getattr(inputs, n).shape[1] for n in "qkv"}
    return plan_prefill(seq_lens, **heads, cp_chunk_len=cp_chunk_len, **arguments)


@pytest.mark.parametrize(
    "gates, gate_space, beta_max", [("mixed", "linear", 1.0), ("ones", "linear", 2.0), ("resets", "log", 1.0)]
)
def test_precompute_t(gates, gate_space, beta_max):
    inputs = make_inputs(100, heads=(2, 2, 4), gates=gates, gate_space=gate_space, beta_max=beta_max)
    tiles = BACKEND.precompute_t(inputs, plan_table(plan_for(inputs, [30, 70], 128)))
    assert inputs.gate is not None and inputs.beta is not None

    for start, stop in ((0, 30), (30, 94), (94, 100)):  # a chunk ends at 64 tokens of its sequence
        rows = slice(start, stop)
        q, k = ((x[rows] * torch.rsqrt(x[rows].square().sum(-1, True) + 1e-6)).double() for x in (inputs.q, inputs.k))
        for h in range(4):
            gate = inputs.gate[rows, h].double()
            alpha = gate.exp() if gate_space == "log" else gate
            decay = torch.ones(stop - start, stop - start, dtype=torch.float64, device=DEVICE).tril()
            for i in range(stop - start):
                for j in range(i):
                    decay[i, j] = alpha[j + 1 : i + 1].prod()
            beta = inputs.beta[rows, h].double()
            a = (beta[:, None] * decay * (k[:, h // 2] @ k[:, h // 2].T)).tril(-1)
            n = stop - start
            solve = torch.linalg.inv(torch.eye(n, dtype=torch.float64, device=DEVICE) + a) * beta
            scores = inputs.scale * decay * (q[:, h // 2] @ k[:, h // 2].T)
            for name, x, expected in (("solve", tiles.solve, solve), ("scores", tiles.scores, scores)):
                got = x[rows, h].double()
                assert not got[:, n:].any(), f"{name}: columns past the chunk"
                error = (got[:, :n] - expected).norm() / expected.norm()
                assert error < 2e-6, f"{name}, head {h}: {error}"  # fp32 products over at most 64 terms
            entered = alpha.cumprod(0)
            torch.testing.assert_close(tiles.from_start[rows, h].double(), entered, rtol=1e-6, atol=1e-37)
            last = alpha.flip(0).cumprod(0).flip(0)
            left = torch.cat([last[1:], last.new_ones(1)]) * (k[:, h // 2] / inputs.k[rows, h // 2]).mean(-1)
            torch.testing.assert_close(tiles.key_out[rows, h].double(), left, rtol=2e-6, atol=1e-37)


@pytest.mark.parametrize("gates", ["ones", "mixed", "resets", "none"])
@pytest.mark.parametrize("heads", [(2, 2, 2), (4, 2, 2), (1, 1, 2)], ids=["mha", "gqa", "gva"])
def test_precompute_mn(gates, heads):
    inputs = make_inputs(190, heads=heads, gates=gates)
    table = plan_table(plan_for(inputs, [190], 64))
    entry_states = torch.full((3, *state_shape(inputs)), float("nan"), device=DEVICE)
    entry_states[0] = random_states(1, inputs)[0]
    _, maps = run_maps(inputs, table, entry_states)

    first = reference(rows_of(inputs, 0, 64), initial_state=entry_states[:1]).final_state
    assert relative_error(maps.local_state[:1], first).max() < TOLERANCE
    assert not maps.transition[0].any(), "a first CP chunk's transition is exactly zero"

    middle = rows_of(inputs, 64, 128)
    assert relative_error(maps.local_state[1:], reference(middle).final_state).max() < TOLERANCE
    middle.v.zero_()  # the rows of S = I, moved on without values, are those of M
    identity = torch.eye(16, device=DEVICE).expand(1, inputs.num_state_heads, 16, 16)
    expected = reference(middle, initial_state=identity).final_state
    assert contract_ratio(maps.transition[1:], expected, TOLERANCE, bound=1e-37).max() <= 1
    assert maps.scanned.tolist() == [[64] * inputs.num_state_heads] * 2
    assert not maps.forgot.any() and not maps.dropped.any()


def test_gain_bounds_the_transition_and_is_exact_where_nothing_forgets():
    inputs = make_inputs(192, gates="mixed", beta_max=2.0)
    entry_states = random_states(3, inputs)
    _, maps = run_maps(inputs, plan_table(plan_for(inputs, [192], 64)), entry_states)
    norms = torch.linalg.matrix_norm(maps.transition[1].double(), 2)
    assert (maps.gain[1] >= norms).all()
    assert inputs.gate is not None
    alpha_product = inputs.gate[64:128].double().prod(0)
    assert (maps.gain[1] >= alpha_product).all() and (maps.gain[1] < 1.0001 * alpha_product).all()
    ones = make_inputs(128, gates="ones")
    _, maps = run_maps(ones, plan_table(plan_for(ones, [128], 64)), entry_states)
    assert (maps.gain == 1).all()


@pytest.mark.parametrize("change", ["as is", "small v", "zero beta"])
def test_forgetting_is_bounded(change):
    """Strong gates in one head: M goes, N starts late, and what N leaves out is within `dropped`."""
    forget_below = 2.0**-8
    inputs = make_inputs(400, heads=(1, 1, 3))
    assert inputs.gate is not None and inputs.beta is not None
    inputs.gate[:, 0] = 0.999
    inputs.gate[:, 1] = 0.95
    inputs.gate[:, 2] = 0.5
    if change == "small v":
        inputs.v[300:] /= 1000  # what precedes the cut is then larger than what follows it
    if change == "zero beta":
        inputs.beta[300:] = 0
    table = plan_table(plan_for(inputs, [400], 192))
    entry_states = random_states(3, inputs)
    _, whole = run_maps(inputs, table, entry_states)
    _, cut = run_maps(inputs, table, entry_states, forget_below)

    assert cut.forgot.tolist() == [[False, True, True]] * 2
    assert not cut.transition[:, 1:].any()
    assert torch.equal(cut.transition[1, 0], whole.transition[1, 0])
    assert torch.equal(cut.gain, whole.gain)
    assert cut.scanned.tolist() == [[192, 128, 64]] * 2  # 0.95 ** 64 = 0.04, 0.95 ** 128 = 0.0014
    error = (cut.local_state.double() - whole.local_state.double()).flatten(2).norm(dim=2)
    assert (error <= cut.dropped + 1e-6 * whole.local_state.flatten(2).norm(dim=2)).all()
    assert (error[:, 0] == 0).all() and (cut.dropped[:, 0] == 0).all()
    assert (error[:, 1] > 0).all() and (cut.dropped[:, 1] < 1).all(), "something is left out, and little"

    # dropped = Π a after the cut · n(cut), n_t = a_t n_{t-1} + β|v||k|, from |initial state| in the first CP chunk
    for row, start in ((0, 0), (1, 192)):
        n = entry_states[0, 1].double().norm().item() if row == 0 else 0.0
        for t in range(start, start + 64):
            k2 = inputs.k[t, 0].double().square().sum().item()
            n = 0.95 * n + inputs.beta[t, 1].item() * inputs.v[t, 1].double().norm().item() * math.sqrt(
                k2 / (k2 + 1e-6)
            )
        expected = n * 0.95**128
        assert expected <= cut.dropped[row, 1].item() <= expected * 1.0001


@pytest.mark.parametrize("shape", [(3, 2), ()], ids=["batched", "single"])
def test_fold(shape):
    generator = torch.Generator().manual_seed(0)

    def normal(rows):
        return torch.randn(*shape, rows, 64, generator=generator).to(DEVICE)

    state, transition, local_state = normal(32), normal(64), normal(32)
    if not shape:
        state, transition, local_state = (x[None] for x in (state, transition, local_state))
    out = BACKEND.fold(state, transition, local_state)
    expected = state.double() @ transition.double() + local_state.double()
    assert (out.double() - expected).norm() / expected.norm() < 1e-6  # IEEE fp32 over 64 terms
    rows = BACKEND.fold.block_rows
    part = BACKEND.fold(state[..., rows:, :], transition, local_state[..., rows:, :])
    assert torch.equal(part, out[..., rows:, :]), "a block of rows has the bits it has in the whole"
    assert torch.equal(BACKEND.fold(state, torch.zeros_like(transition), local_state), local_state)


def test_fold_refuses_partial_blocks():
    x = torch.zeros(1, 20, 64, device=DEVICE)
    with pytest.raises(ValueError, match="20 rows"):
        BACKEND.fold(x, torch.zeros(1, 64, 64, device=DEVICE), x)


@pytest.mark.parametrize("gates", ["ones", "resets"])
def test_cp_prefill(gates):
    """One item with checkpoints inside tiles and at a tile's end; dump rows stay untouched."""
    inputs = make_inputs(150, heads=(2, 2, 4), gates=gates)
    positions = [1, 40, 64, 65, 150]
    table = plan_table(plan_for(inputs, [150], 192, checkpoint_positions=[positions]))
    entry_states = random_states(1, inputs)
    shape = state_shape(inputs)
    sinks = Sinks(
        output=torch.full((150, 4, 16), float("nan"), device=DEVICE),
        final_states=torch.full((2, *shape), 7.0, device=DEVICE),
        checkpoints=torch.full((6, *shape), 7.0, device=DEVICE),
    )
    BACKEND.cp_prefill(inputs, BACKEND.precompute_t(inputs, table), table, entry_states, sinks)
    expected = reference(inputs, initial_state=entry_states, checkpoint_positions=[positions])
    assert relative_error(sinks.output, expected.output, [150]).max() < TOLERANCE
    assert relative_error(sinks.final_states[:1], expected.final_state).max() < TOLERANCE
    assert sinks.checkpoints is not None
    assert relative_error(sinks.checkpoints[:5], expected.checkpoints).max() < TOLERANCE
    assert (sinks.final_states[1] == 7).all() and (sinks.checkpoints[5] == 7).all()


def test_checkpoints_change_no_other_bits():
    inputs = make_inputs(100)
    results = []
    for positions in ([[]], [[3, 64, 100]]):
        table = plan_table(plan_for(inputs, [100], 128, checkpoint_positions=positions))
        sinks = Sinks(
            output=torch.empty(100, 2, 16, device=DEVICE),
            final_states=torch.empty(2, *state_shape(inputs), device=DEVICE),
            checkpoints=torch.empty(4, *state_shape(inputs), device=DEVICE),
        )
        BACKEND.cp_prefill(inputs, BACKEND.precompute_t(inputs, table), table, random_states(1, inputs), sinks)
        results.append((sinks.output, sinks.final_states[0]))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_device_table_pads_with_work_that_does_nothing():
    """A table from upper bounds: maps of last CP chunks go nowhere, rows of real ones equal the plan's bit for bit."""
    inputs, seq_lens = make_inputs(150), [100, 0, 50]
    table = device_table(seq_lens, 64)
    states = random_states(table.num_items, inputs)
    _, maps = run_maps(inputs, table, states)
    _, exact = run_maps(inputs, plan_table(plan_for(inputs, seq_lens, 64)), states)
    assert torch.equal(maps.local_state[:1], exact.local_state)
    assert maps.local_state[1:].isnan().all() and maps.transition[1:].isnan().all()

    table = device_table(seq_lens, 64, every=64, spare_rows=2)
    sinks = Sinks(
        output=torch.empty(150, 2, 16, device=DEVICE),
        final_states=torch.full((4, *state_shape(inputs)), 7.0, device=DEVICE),
        checkpoints=torch.full((4, *state_shape(inputs)), 7.0, device=DEVICE),
    )
    BACKEND.cp_prefill(inputs, BACKEND.precompute_t(inputs, table), table, states, sinks)
    assert sinks.checkpoints is not None
    assert (sinks.final_states[:3] != 7).all() and (sinks.final_states[3] == 7).all()
    assert (sinks.checkpoints[0] != 7).all() and (sinks.checkpoints[1:] == 7).all()


def test_fast_operands_are_rounded_to_tf32_to_nearest():
    """What stage 1 stores for narrow inputs has tf32's 11 bits and lies within half of the last of them."""
    inputs = make_inputs(64, dtype=torch.float16)
    table = plan_table(plan_for(inputs, [64], 64))
    fast, high = (BACKEND.precompute_t(x, table) for x in (inputs, replace(inputs, precision="high")))
    for name in ("solve", "scores"):
        rounded, exact = getattr(fast, name), getattr(high, name)
        assert not (rounded.view(torch.int32) & 0x1FFF).any()
        # half a unit, and what the two differ by before it is rounded
        assert ((rounded - exact).abs() <= exact.abs() * 2.0**-11 + 1e-6).all() and (rounded != exact).any()
        assert abs(((rounded - exact).sum() / exact.abs().sum()).item()) < 2.0**-14, "rounded, not cut off"
