"""States in and out of the caller's memory, also where the host cannot see which slots are valid."""

import pytest
import torch

import gdncp
from gdncp.states import STATE_DTYPES, load_states, store_states
from tests.numeric import assert_within, checkpoint_starts, cu, random_state, random_tokens

H, D = 2, 16


def bits(x):
    return x.contiguous().view(torch.uint8)


@pytest.mark.parametrize("dtype", STATE_DTYPES, ids=str)
def test_rows_out_of_range_load_zeros_and_are_not_stored(dtype):
    pool = random_state(4, H, D).to(dtype)
    rows, before = torch.tensor([2, -1, 0, 4, 1 << 40]), pool.clone()
    loaded = torch.full((6, H, D, D), 7.0)
    load_states(pool, rows, loaded, torch.tensor([5, 4, 0, 1, 2]))
    assert torch.equal(loaded[5], before[2].float()) and torch.equal(loaded[0], before[0].float())
    assert not loaded[[4, 1, 2]].any() and bool((loaded[3] == 7).all())

    states = random_state(5, H, D, seed=2)
    store_states(states, pool, rows)
    assert torch.equal(bits(pool[[2, 0]]), bits(states[[0, 2]].to(dtype)))
    assert torch.equal(bits(pool[[1, 3]]), bits(before[[1, 3]]))


@pytest.mark.parametrize("rows", [[-1, 9], [9], []], ids=str)
def test_nothing_is_stored_where_no_row_is_valid(rows):
    pool = random_state(3, H, D)
    before = pool.clone()
    store_states(random_state(len(rows), H, D), pool, torch.tensor(rows, dtype=torch.int64))
    assert torch.equal(pool, before)
    store_states(random_state(len(rows), H, D), pool[:0], torch.tensor(rows, dtype=torch.int64))


def test_a_pool_and_slots_through_prefill():
    """Slots are read where sequences start and written where they end; other rows keep what they hold."""
    tokens, pool = random_tokens(300, dim=D, gates="weak"), random_state(5, H, D)
    before, slots = pool.clone(), torch.tensor([4, 1], dtype=torch.int32)
    heads = {"num_q_heads": H, "num_k_heads": H, "num_v_heads": H, "head_dim": D}
    plan = gdncp.plan_prefill([200, 100], cp_chunk_len=64, **heads)
    expected = gdncp.gated_delta_rule_reference(**tokens, initial_state=before[[4, 1]], seq_lens=[200, 100])
    apart = torch.full((5, H, D, D), 7.0)
    for destination in (apart, None):  # a pool of its own; in place
        result = gdncp.prefill(plan, **tokens, state_pool=pool, state_indices=slots, output_state=destination)
        written = pool if destination is None else destination
        assert result.final_state is written
        assert_within(written[[4, 1]], expected.final_state, 2e-5)
        assert torch.equal(written[[0, 2, 3]], before[[0, 2, 3]] if destination is None else apart[[0, 2, 3]])
        assert bool((apart[[0, 2, 3]] == 7).all())
    for other in (pool[:4], apart[..., :8]):
        with pytest.raises(ValueError, match="output_state must have"):
            gdncp.prefill(plan, **tokens, state_pool=pool, state_indices=slots, output_state=other)
    with pytest.raises(ValueError, match=r"state_indices must lie in \[0, 5\).*got 5 at index 0"):
        gdncp.prefill(plan, **tokens, state_pool=pool, state_indices=slots + 1)


@pytest.mark.parametrize("dtype", STATE_DTYPES, ids=str)
def test_checkpoints_are_rounded_once_to_the_buffers_dtype(dtype):
    tokens, seq_lens, every = random_tokens(300, dim=D), [200, 100], 64
    heads = {"num_q_heads": H, "num_k_heads": H, "num_v_heads": H, "head_dim": D}
    plan = gdncp.plan_prefill(seq_lens, cp_chunk_len=128, checkpoint_every_n_tokens=every, **heads)
    wide = gdncp.prefill(plan, **tokens).checkpoints
    assert wide.dtype == torch.float32 and wide.shape == (4, H, D, D)
    given, called = (torch.empty(4, H, D, D, dtype=dtype) for _ in range(2))
    assert gdncp.prefill(plan, **tokens, state_checkpoints=given).checkpoints is given
    gdncp.chunk_gated_delta_rule(
        **tokens, cu_seqlens=cu(seq_lens), state_checkpoints=called, _cp_chunk_len=128,
        checkpoint_cu_starts=checkpoint_starts(seq_lens, every), checkpoint_every_n_tokens=every,
    )  # fmt: skip
    assert torch.equal(bits(given), bits(wide.to(dtype))) and torch.equal(bits(called), bits(given))


def test_the_three_parts_are_the_whole_and_the_pool_is_written_in_the_last():
    tokens, pool = random_tokens(200, dim=D), random_state(2, H, D)
    heads = {"num_q_heads": H, "num_k_heads": H, "num_v_heads": H, "head_dim": D}
    plan = gdncp.plan_prefill([150, 50], cp_chunk_len=64, **heads)
    whole = gdncp.prefill(plan, **tokens, initial_state=pool, final_state="all")
    before = pool.clone()
    entry = gdncp.fixup(gdncp.summarise(plan, **tokens, state_pool=pool, state_indices=torch.tensor([0, 1])))
    assert torch.equal(pool, before)
    result = gdncp.finish(entry)
    assert result.final_state is pool and torch.equal(pool, whole.final_state)
    assert torch.equal(result.output, whole.output)
