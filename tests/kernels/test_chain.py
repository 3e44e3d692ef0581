"""The Triton stages in a row against the token-by-token float64 oracle."""

from dataclasses import replace

import pytest
import torch

from gdncp.reference import relative_error
from tests.conftest import DEVICE
from tests.kernels.cases import (
    NARROW_TOLERANCE,
    TOLERANCE,
    device_table,
    make_inputs,
    plan_table,
    random_states,
    reference,
    run_chain,
)
from tests.kernels.test_stages import plan_for

SEQ_LENS = [150, 0, 33, 3]  # tails, an empty sequence, one CP chunk and several


def assert_matches(inputs, seq_lens, results, initial_state, tolerance, **checkpoints):
    output, final, kept, _ = results
    expected = reference(inputs, seq_lens=seq_lens, initial_state=initial_state, **checkpoints)
    # outputs are rounded once to the input dtype, by at most half a unit in the last place
    rounding = torch.finfo(inputs.q.dtype).eps / 2 if inputs.q.dtype != torch.float32 else 0.0
    assert relative_error(output, expected.output, seq_lens).max() <= tolerance + rounding
    assert relative_error(final, expected.final_state).max() <= tolerance
    if expected.checkpoints.numel():
        assert relative_error(kept, expected.checkpoints).max() <= tolerance


@pytest.mark.parametrize(
    "arguments",
    [
        {"gates": "mixed"},
        {"gates": "ones", "beta_max": 2.0},
        {"gates": "resets", "gate_space": "log", "heads": (1, 1, 2)},
        {"gates": "none", "heads": (2, 1, 1), "l2norm": False},
        {"gates": "strong", "k_dim": 32, "v_dim": 16},
        {"gates": "mixed", "k_dim": 16, "v_dim": 32, "heads": (1, 1, 1)},
    ],
    ids=str,
)
def test_float32(arguments):
    inputs = make_inputs(sum(SEQ_LENS), **arguments)
    initial_state = random_states(len(SEQ_LENS), inputs)
    positions = [[5, 64, 100, 150], [], [33], []]
    table = plan_table(plan_for(inputs, SEQ_LENS, 64, checkpoint_positions=positions))
    results = run_chain(inputs, SEQ_LENS, table, initial_state)
    assert_matches(inputs, SEQ_LENS, results, initial_state, TOLERANCE, checkpoint_positions=positions)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("precision, tolerance", [("fast", NARROW_TOLERANCE), ("high", TOLERANCE)])
def test_narrow_inputs(dtype, precision, tolerance):
    inputs = make_inputs(130, dtype=dtype, gates="ones", precision=precision)
    initial_state = random_states(1, inputs)
    results = run_chain(inputs, [130], plan_table(plan_for(inputs, [130], 64)), initial_state)
    assert_matches(inputs, [130], results, initial_state, tolerance)


def test_device_table_gives_the_bits_of_the_plan():
    inputs = make_inputs(sum(SEQ_LENS))
    initial_state = random_states(len(SEQ_LENS), inputs)
    plan = plan_for(inputs, SEQ_LENS, 64, checkpoint_every_n_tokens=64)
    exact = run_chain(inputs, SEQ_LENS, plan_table(plan), initial_state)
    padded = run_chain(inputs, SEQ_LENS, device_table(SEQ_LENS, 64, every=64), initial_state)
    for a, b in zip(exact[:3], padded[:3], strict=True):
        assert torch.equal(a, b)
    assert_matches(inputs, SEQ_LENS, padded, initial_state, TOLERANCE, checkpoint_every_n_tokens=64)


def test_bits_do_not_depend_on_batch_mates():
    inputs = make_inputs(sum(SEQ_LENS))
    both, _, _, _ = run_chain(inputs, SEQ_LENS, plan_table(plan_for(inputs, SEQ_LENS, 64)))
    mates = replace(inputs, v=inputs.v.clone(), k=inputs.k.clone())
    mates.v[150:] *= 3
    mates.k[150:] += 1
    other, _, _, _ = run_chain(mates, SEQ_LENS, plan_table(plan_for(inputs, SEQ_LENS, 64)))
    assert torch.equal(both[:150], other[:150]) and not torch.equal(both[150:], other[150:])


def test_no_initial_state_has_the_bits_of_zeros_and_nan_neighbours_stay_out():
    """The middle of a larger buffer whose other rows are NaN: no sequence covers them, so nothing of them shows."""
    inputs = make_inputs(100)
    alone, final, _, _ = run_chain(inputs, [100], plan_table(plan_for(inputs, [100], 64)))

    def surrounded(x):
        wide = torch.full((300, *x.shape[1:]), float("nan"), device=DEVICE)
        wide[100:200] = x
        return wide

    names = ("q", "k", "v", "gate", "beta")
    wide = replace(inputs, **{name: surrounded(getattr(inputs, name)) for name in names})
    table = plan_table(plan_for(inputs, [100], 64))
    table = replace(table, token_start=table.token_start + 100)
    zeros = torch.zeros(1, 2, 16, 16, device=DEVICE)
    output, wide_final, _, _ = run_chain(wide, [100], table, zeros)
    assert torch.equal(output[100:200], alone) and torch.equal(wide_final, final)
    assert output[:100].isnan().all() and output[200:].isnan().all(), "rows that no item covers stay untouched"


def test_forgetting_stays_within_the_reported_bound():
    forget_below = 2.0**-8
    inputs = make_inputs(400, gates="mixed")
    assert inputs.gate is not None
    inputs.gate[:, 1] = 0.93
    initial_state = random_states(1, inputs)
    output, final, _, maps = run_chain(
        inputs, [400], plan_table(plan_for(inputs, [400], 128)), initial_state, forget_below
    )
    assert maps.forgot[:, 1].all() and not maps.forgot[:, 0].any()
    expected = reference(inputs, initial_state=initial_state)
    error = (final.double().cpu() - expected.final_state).flatten(2).norm(dim=2)[0]
    allowed = TOLERANCE * expected.final_state.flatten(2).norm(dim=2)[0]
    assert error[0] <= allowed[0]
    # what the maps left out reaches the end only through the last CP chunk, which does not grow it
    assert error[1] <= allowed[1] + (maps.dropped[:, 1].sum() + maps.gain[:, 1].max() * 100).item()
    assert output.isfinite().all()
