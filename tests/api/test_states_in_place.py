"""Backends with `exact_rows`: the caller's memory is written by the kernels, and zeros are not filled to be read."""

import torch

import gdncp
from tests.conftest import DEVICE
from tests.numeric import random_state, random_tokens

H, D = 1, 16
LENS, EVERY = [150, 0, 70], 64


def tokens():
    return {n: x.to(DEVICE) for n, x in random_tokens(sum(LENS), heads=(H, H, H), dim=D, gates="weak").items()}


def plan(**changes):
    heads = {"num_q_heads": H, "num_k_heads": H, "num_v_heads": H, "head_dim": D}
    arguments = {"cp_chunk_len": 64, "checkpoint_every_n_tokens": EVERY, **heads, **changes}
    return gdncp.plan_prefill(LENS, **arguments)


def run(**arguments):
    return gdncp.prefill(plan(), **tokens(), backend="triton", keep_entry=True, **arguments)


def buffers(dtype):
    final = torch.full((3, H, D, D), 7.0, device=DEVICE, dtype=dtype)
    return {"output_state": final, "state_checkpoints": torch.full_like(final, 7.0)}


def test_no_initial_state_has_the_bits_of_zeros():
    zeros = torch.zeros(3, H, D, D, device=DEVICE)
    a, b = run(forget_below=0.0), run(forget_below=0.0, initial_state=zeros)
    for name in ("output", "final_state", "checkpoints"):
        assert torch.equal(getattr(a, name), getattr(b, name)), name
    assert not a.final_state[1].any() and torch.equal(a.entry.states, b.entry.states)
    assert a.entry.summary.call.skips_starts and not b.entry.summary.call.skips_starts


def test_states_in_place_have_the_bits_of_states_that_are_copied():
    initial = random_state(3, H, D).to(DEVICE)
    expected = run(initial_state=initial)
    for dtype in (torch.float32, torch.bfloat16):
        given = buffers(dtype)
        result = run(initial_state=initial, **given)
        assert (result.entry.summary.sinks.final_states is given["output_state"]) == (dtype == torch.float32)
        for name, x in (("output_state", expected.final_state), ("state_checkpoints", expected.checkpoints)):
            assert torch.equal(given[name], x.to(dtype)), name
    assert torch.equal(expected.final_state[1], initial[1])


def test_a_state_is_updated_in_its_own_memory_and_slots_are_not_taken_for_rows():
    initial = random_state(3, H, D).to(DEVICE)
    expected, state = run(initial_state=initial).final_state, initial.clone()
    run(initial_state=state, output_state=state)
    assert torch.equal(state, expected)
    pool = torch.full((5, H, D, D), 7.0, device=DEVICE)
    slots = torch.tensor([4, 0, 2], device=DEVICE)
    pool[slots] = initial
    run(state_pool=pool, state_indices=slots)
    assert torch.equal(pool[slots], expected) and bool((pool[[1, 3]] == 7).all())


def test_an_output_off_the_grid_is_written_once_whatever_the_lanes():
    """Kernels write from multiples of 16 bytes: elsewhere goes a copy, which lanes share."""
    expected = run().output
    memory = torch.full((expected.numel() + 1,), 7.0, device=DEVICE)
    output = memory[1:].view(expected.shape)
    assert output.data_ptr() % 16
    result = gdncp.prefill(plan(lanes_per_rank=3), **tokens(), backend="triton", output=output, keep_entry=True)
    assert result.output is output and torch.equal(output, expected) and memory[0] == 7
    assert result.entry.summary.sinks.output.data_ptr() % 16 == 0
