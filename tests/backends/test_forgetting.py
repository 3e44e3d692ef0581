"""What is left out of stage 2 is never more than what the bound says, however hostile the inputs."""

import dataclasses
import pickle

import pytest
import torch

from gdncp.backends import AffineMaps
from gdncp.backends.torch_forget import round_up
from gdncp.forgetting import FP32_FLOOR, error_bound, rank_terms
from gdncp.reference import contract_ratio, error_norms, relative_error
from tests.backends.driver import make_inputs, make_state, oracle, run, take

LENS = [900, 64, 401]
THRESHOLDS = [2.0**-24, 2.0**-8, 0.3]  # 0.3 makes what was dropped large enough to be seen


def forgetful(case):
    gates = {"resets": "resets", "growing": "weak"}.get(case, "mixed")
    beta = {"beta 0": (0, 0), "growing": (2, 2), "resets": (0, 2), "negative beta": (-1, 1)}.get(case, (0, 1))
    x = make_inputs(sum(LENS), (2, 2, 4), gates=gates, beta=beta, value_scale=1e-3 if case == "small v" else 1.0)
    if case in ("growing", "resets"):  # beta·‖k‖² up to 2.9: single tokens multiply a state by up to 1.9
        x = dataclasses.replace(x, k=x.k * 1.2)
    if case == "growing":  # and gates bring it down again
        x.gate[:] = -1.0
    elif gates == "mixed":
        x.gate.mul_(3)
    return x, 10 * make_state(len(LENS), x)


def bound_of(x, result):
    plan = result.plan
    terms = [
        rank_terms(take(x, plan.token_ranges(rank)), plan.rank_plan(rank), result.maps[rank], result.entry_states[rank])
        for rank in range(plan.world_size)
    ]
    return error_bound(pickle.loads(pickle.dumps(terms)))


@pytest.mark.parametrize("forget_below", THRESHOLDS)
@pytest.mark.parametrize("case", ["mixed", "resets", "beta 0", "small v", "growing", "negative beta"])
def test_the_bound_is_never_exceeded(case, forget_below):
    x, state = forgetful(case)
    ref = oracle(x, LENS, state, checkpoint_every_n_tokens=64)
    result = run(x, LENS, 128, state, forget_below=forget_below, every=64, world_size=2)
    bound = bound_of(x, result)
    rows = [row for rank in range(2) for row in result.plan.checkpoint_rows(rank)]
    checkpoint_bound = torch.cat(bound.checkpoints)
    for y, y_ref, allowed, lens in (
        (result.output, ref.output, bound.output, LENS),
        (result.final_state, ref.final_state, bound.final_state, None),
        (result.checkpoints[rows], ref.checkpoints[rows], checkpoint_bound, None),
    ):
        # tolerance as without forgetting: 5e-6 also where beta·‖k‖² > 2 multiplies rounding errors
        ratio = contract_ratio(y, y_ref, 5e-6, allowed + FP32_FLOOR, lens)
        assert ratio.max() <= 1, f"{ratio.max():.3f} of what is allowed"
    if forget_below == 0.3 and case == "mixed":
        error, norm = error_norms(result.output, ref.output, LENS)
        assert (error > 100 * 5e-6 * norm).any()  # without the bound this would be far outside
        assert bound.summary()["scanned_share"] < 1


def test_a_bound_that_is_put_off_is_made_at_every_reading():
    maps = AffineMaps.empty(2, 1, 4, 4, torch.device("cpu"))
    maps.dropped_rows.zero_()
    maps.deferred += [lambda: maps.dropped_rows.add_(1.0)] * 2  # of two lanes
    assert [float(maps.dropped.max()) for _ in range(2)] == [2.0, 4.0]


def test_nothing_dropped_at_threshold_zero():
    x, state = forgetful("mixed")
    result = run(x, LENS, 128, state)
    bound = bound_of(x, result)
    assert bound.output.max() == bound.final_state.max() == bound.num_forgot == 0
    assert bound.tokens_scanned == bound.tokens_in_maps
    (maps,) = result.maps
    assert not maps.dropped.any() and not maps.forgot.any()


def test_what_was_forgotten_is_reported():
    x, state = forgetful("mixed")
    ((maps,), bound) = ((r := run(x, LENS, 128, state, forget_below=2.0**-24)).maps, bound_of(x, r))
    kept, forgot = maps.transition[~maps.forgot], maps.transition[maps.forgot]
    assert forgot.numel() and not forgot.any()
    first = [r.plan.rank_plan(0).map_rows[c.index] for c in r.plan.cp_chunks if c.is_first and not c.is_last]
    assert kept.flatten(1).any(1).sum() == (~maps.forgot).sum() - (~maps.forgot[first]).sum()
    assert (maps.gain[maps.forgot] < 2.0**-24).all() and (maps.gain[~maps.forgot] >= 2.0**-24).all()
    assert ((maps.scanned < 128) <= maps.forgot).all() and (maps.scanned < 128).any()
    summary = bound.summary()
    assert summary["forgot_share"] == maps.forgot.double().mean()
    assert summary["tokens_scanned"] == maps.scanned.sum()


def test_the_cut_is_the_latest_chunk_boundary_that_the_bound_allows():
    x = make_inputs(256 + 10, gates="weak", beta=(0, 0))
    x.gate[:] = 0
    x.gate[100, 0] = -30.0  # head 0 forgets in the second of four chunks; head 1 never
    (maps,) = run(x, [266], 256, forget_below=1e-10).maps
    assert maps.scanned.tolist() == [[256 - 64, 256]] and maps.forgot.tolist() == [[True, False]]
    x.gate[128, 0] = -20.0  # on their own, gates of the third chunk are not enough
    assert run(x, [266], 256, forget_below=1e-10).maps[0].scanned.tolist() == [[256 - 64, 256]]
    x.gate[250, 0] = -10.0  # now they are, with the last chunk's
    assert run(x, [266], 256, forget_below=1e-10).maps[0].scanned.tolist() == [[256 - 128, 256]]


@pytest.mark.parametrize("sign", [1, -1])
def test_the_bound_is_tight_where_all_tokens_pull_one_way(sign):
    x = make_inputs(128 + 128 + 1, gates="weak", beta=(sign * 1e-4, sign * 1e-4))
    x.gate[:] = -0.2
    x.k[:], x.v[:] = x.k[0].clone(), x.v[0].clone()
    state = 0.3 * sign * torch.einsum("hv,hk->hvk", x.v[0], x.k[0])[None]
    cut, whole = (run(x, [257], 128, state, forget_below=f).maps[0] for f in (1e-4, 0.0))
    assert (cut.scanned == 64).all()
    dropped = (whole.local_state - cut.local_state).double().norm(dim=(2, 3))
    assert (dropped <= cut.dropped * (1 + 1e-5)).all()  # fp32 rounding of the difference
    assert (dropped >= 0.9 * cut.dropped).all()  # the map shrinks a little where the bound does not


def test_a_first_cp_chunk_keeps_its_initial_state_where_nothing_was_left_out():
    x = make_inputs(128 + 1, gates="weak", beta=(0, 0))
    x.gate[:] = 0
    x.gate[3] = -20.0  # only the whole CP chunk forgets: no later boundary does
    state = 1e9 * make_state(1, x)
    result = run(x, [129], 128, state, forget_below=1e-8)
    (maps,) = result.maps
    assert maps.forgot.all() and (maps.scanned == 128).all() and (maps.dropped == 0).all()
    assert relative_error(result.final_state, oracle(x, [129], state).final_state).max() < 1e-6


def test_a_gain_is_never_below_the_product_of_its_gates():
    """Rounded once, upwards, from float64: logs of alpha rounded to fp32 would be off by 1e-6 over a chunk."""
    x = make_inputs(9 * 64, (16, 16, 16), gates="weak", beta=(0, 0), gate_space="linear")
    x.gate[:] = torch.rand(x.gate.shape, generator=torch.Generator().manual_seed(1)) * 0.8 + 0.1
    (maps,) = run(x, [9 * 64], 64).maps
    exact = torch.stack([part.double().prod(0) for part in x.gate.split(64)][:8])
    assert (maps.gain.double() >= exact * (1 - 1e-12)).all()
    assert (maps.gain.double() <= exact * (1 + 2.0**-22)).all()


def test_outputs_are_off_by_the_norm_over_cp_chunks_of_what_enters_them():
    x, state = forgetful("mixed")
    result = run(take(x, [(0, 900)]), [900], 128, state[:1], forget_below=0.3)
    terms = rank_terms(take(x, [(0, 900)]), result.plan.rank_plan(0), result.maps[0], result.entry_states[0])
    bound = error_bound([terms])
    expected = (terms.output_gain * bound.entry_states[0]).norm(dim=0)
    torch.testing.assert_close(bound.output[0], expected)
    assert (bound.entry_states[0] > 0).sum(0).max() > 2


def test_rounding_up_is_never_below():
    x = torch.tensor([0.0, 1.0, 0.1, 1 + 1e-12, 1e-300, 1e300, torch.inf], dtype=torch.float64)
    narrow = round_up(x)
    assert (narrow.double() >= x).all() and narrow[0] == 0 and narrow[1] == 1
