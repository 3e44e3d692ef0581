"""Faults that people reported against other systems, each as an input with the right value or the right error."""

import math

import pytest
import torch

import gdncp
from gdncp import gated_delta_rule_reference as oracle
from tests.conftest import TARGETS
from tests.numeric import assert_output, assert_within, checkpoint_starts, cu, offsets, tolerance_of

pytestmark = pytest.mark.parametrize("target", TARGETS)


def to(tokens, device):
    return {name: x.to(device) for name, x in tokens.items()}


def run(tokens, seq_lens, target, **arguments):
    device, backend, _ = target
    arguments = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}
    arguments.setdefault("cu_seqlens", cu(seq_lens, device))
    arguments.setdefault("cu_seqlens_host", offsets(seq_lens))
    arguments.setdefault("forget_below", 0.0)
    return gdncp.chunk_gated_delta_rule(**to(tokens, device), output_final_state=True, backend=backend, **arguments)


def expect(tokens, seq_lens, **arguments):
    return oracle(**tokens, seq_lens=seq_lens, **arguments)


def check(tokens, seq_lens, target, *, initial_state=None, **arguments):
    output, final = run(tokens, seq_lens, target, initial_state=initial_state, **arguments)
    expected = expect(
        tokens, seq_lens, initial_state=initial_state, **{k: v for k, v in arguments.items() if k == "gate_space"}
    )
    tol = tolerance_of(tokens["q"].dtype, tokens["beta"])
    assert_output(output, expected.output, seq_lens, tol)
    assert_within(final, expected.final_state, tol, what="final state")
    return output, final


# ---- shapes


def test_a_zero_length_sequence_keeps_its_initial_state(target):
    seq_lens, initial = [16, 24, 0], target.states(3)
    _, final = check(target.tokens(40), seq_lens, target, initial_state=initial)
    assert torch.equal(final[2].cpu(), initial[2])
    _, final = check(target.tokens(40), seq_lens, target)
    assert not final[2].any(), "without an initial state it is zeros"


@pytest.mark.parametrize("chunk_len", [None, 64])
def test_an_all_empty_batch(target, chunk_len):
    tokens, initial = target.tokens(0), target.states(2)
    output, final = run(tokens, [0, 0], target, initial_state=initial, _cp_chunk_len=chunk_len)
    assert output.shape == (0, 2, target.dim) and torch.equal(final.cpu(), initial)


@pytest.mark.parametrize("seq_lens", [[1], [2], [3], [3, 1, 2], [63, 65, 1], [1238, 1199, 1240, 1216, 1187, 1203, 519]])
@pytest.mark.parametrize("chunk_len", [None, 64, 192])
def test_lengths_off_every_grid(target, seq_lens, chunk_len):
    check(target.tokens(sum(seq_lens), gates="weak"), seq_lens, target, _cp_chunk_len=chunk_len)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_cu_seqlens_on_four_byte_alignment_and_either_width(target, dtype):
    device = target.device
    storage = torch.zeros(8, dtype=dtype, device=device)
    storage[1:4] = cu([70, 30], device, dtype)
    check(target.tokens(100), [70, 30], target, cu_seqlens=storage[1:4])


# ---- gates


@pytest.mark.parametrize("chunk_len", [None, 64])
@pytest.mark.parametrize("log_gate", [-316.0, -math.inf, math.log(6.5e-12), -5.95, 0.0])
def test_extreme_log_gates(target, log_gate, chunk_len):
    tokens = target.tokens(200)
    tokens["g"] = tokens["g"].log()
    tokens["g"][::7] = log_gate
    check(tokens, [200], target, gate_space="log", _cp_chunk_len=chunk_len, initial_state=target.states(1))


@pytest.mark.parametrize("alpha", [0.0, 1.0, 6.5e-12, 1e-40])
def test_extreme_linear_gates(target, alpha):
    tokens = target.tokens(200)
    tokens["g"][::5] = alpha
    check(tokens, [130, 70], target, _cp_chunk_len=64, initial_state=target.states(2))


def test_every_gate_so_strong_that_a_factored_form_overflows(target):
    tokens = target.tokens(150)
    tokens["g"] = torch.full_like(tokens["g"], -6.5)
    check(tokens, [150], target, gate_space="log", _cp_chunk_len=64)


def test_log_gates_passed_as_linear_and_the_reverse(target):
    tokens = target.tokens(64)
    if target.device == "cpu":  # on a device it would take a wait to see it: `check=True` does
        logs = {**tokens, "g": tokens["g"].log() - 0.1}
        with pytest.raises(ValueError, match=r"g must be linear.*gate_space='log'"):
            run(logs, [64], target)
        with pytest.raises(ValueError, match=r"g must be natural logs.*gate_space='linear'"):
            run(tokens, [64], target, gate_space="log")
    plan = gdncp.plan_prefill([64], num_q_heads=2, num_k_heads=2, num_v_heads=2, head_dim=target.dim)
    with pytest.raises(ValueError, match="g must be natural logs"):
        gdncp.prefill(plan, **to(tokens, target.device), gate_space="log", backend=target.backend, check=True)


@pytest.mark.parametrize("beta", [0.0, 1.0, 2.0])
def test_constant_beta(target, beta):
    tokens = target.tokens(300, gates="never")
    tokens["beta"] = torch.full_like(tokens["beta"], beta)
    check(tokens, [300], target, _cp_chunk_len=64, initial_state=target.states(1))


# ---- long runs


def test_a_prefill_in_two_calls_matches_the_whole(target):
    tokens = target.tokens(500, gates="weak")
    _, whole = run(tokens, [500], target)
    state = None
    for part in (slice(0, 301), slice(301, 500)):
        _, state = run(
            {n: x[part].contiguous() for n, x in tokens.items()}, [part.stop - part.start], target, initial_state=state
        )
    expected = expect(tokens, [500])
    assert_within(state, expected.final_state, target.tolerance)
    assert_within(whole, expected.final_state, target.tolerance)


def test_the_state_hands_over_to_decode(target):
    tokens, device = target.tokens(131), target.device
    expected = expect(tokens, [131])
    _, state = run({n: x[:130].contiguous() for n, x in tokens.items()}, [130], target)
    step = {n: x[130:].to(device) for n, x in tokens.items()}
    output, state = gdncp.decode_step(**step, state=state)
    assert_output(output, expected.output[130:], [1], target.tolerance)
    assert_within(state, expected.final_state, target.tolerance)


# ---- states


def test_no_initial_state_and_zeros_agree_bit_for_bit(target):
    tokens = target.tokens(200)
    without = run(tokens, [150, 50], target, _cp_chunk_len=64)
    zeros = run(tokens, [150, 50], target, _cp_chunk_len=64, initial_state=torch.zeros(2, 2, target.dim, target.dim))
    assert all(torch.equal(a, b) for a, b in zip(without, zeros, strict=True))


def test_dense_and_packed_forms_agree_bit_for_bit(target):
    tokens = target.tokens(200)
    packed = run(tokens, [200], target)
    dense = run(tokens, [200], target, cu_seqlens=None, cu_seqlens_host=None)
    assert all(torch.equal(a, b) for a, b in zip(packed, dense, strict=True))


def test_a_state_is_v_by_k(target):
    """One token: S = beta v kᵀ, which tells [V, K] from [K, V]."""
    tokens = target.tokens(1)
    _, final = run(tokens, [1], target)
    expected = tokens["beta"][0, :, None, None] * tokens["v"][0, :, :, None] * tokens["k"][0, :, None, :]
    assert_within(final, expected[None], target.tolerance)


def test_a_slot_of_minus_one(target):
    tokens, pool = target.tokens(100), target.states(4)
    before = pool.clone()
    device, slots = target.device, torch.tensor([-1, 2])
    pool = pool.to(device)
    arguments = {"initial_state": pool, "output_state": pool, "state_indices": slots}
    if device == "cpu":
        with pytest.raises(ValueError, match=r"state_indices must lie in \[0, 4\).*got -1 at index 0"):
            run(tokens, [40, 60], target, **arguments)
        assert torch.equal(pool, before)
        return
    _, after = run(tokens, [40, 60], target, **arguments)  # where nobody sees it, it is padding: nothing is written
    assert torch.equal(after[[0, 1, 3]].cpu(), before[[0, 1, 3]])
    expected = expect(tokens, [40, 60], initial_state=torch.stack([torch.zeros_like(before[0]), before[2]]))
    assert_within(after[2][None], expected.final_state[1:], target.tolerance)


def test_a_reused_slot_does_not_leak_its_old_state(target):
    tokens = target.tokens(100)
    pool = torch.full((3, 2, target.dim, target.dim), torch.nan).to(target.device)
    _, after = run(tokens, [100], target, output_state=pool, state_indices=torch.tensor([1]))
    assert_within(after[1:2], expect(tokens, [100]).final_state, target.tolerance)
    assert after[[0, 2]].isnan().all()


def test_a_pool_with_strides(target):
    tokens, device = target.tokens(100), target.device
    storage = torch.full((5, 2, 3, target.dim, 2 * target.dim), 7.0, device=device)
    pool = storage[:, 1, :2, :, ::2]  # every dim strided
    initial = target.states(5).to(device)
    pool.copy_(initial)
    _, after = run(tokens, [40, 60], target, initial_state=pool, output_state=pool, state_indices=torch.tensor([3, 0]))
    expected = expect(tokens, [40, 60], initial_state=initial.cpu()[[3, 0]])
    assert_within(after[[3, 0]], expected.final_state, target.tolerance)
    assert torch.equal(after[[1, 2, 4]], initial[[1, 2, 4]])
    assert bool((storage[:, 0] == 7).all()) and bool((storage[:, 1, 2] == 7).all())
    assert bool((storage[:, 1, :2, :, 1::2] == 7).all()), "memory between the strides was written"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_a_narrow_state_is_the_fp32_state_rounded_once(target, dtype):
    tokens, device = target.tokens(100), target.device
    initial = target.states(2).to(dtype)
    _, wide = run(tokens, [40, 60], target, initial_state=initial.float())
    narrow = torch.empty(2, 2, target.dim, target.dim, dtype=dtype, device=device)
    _, final = run(tokens, [40, 60], target, initial_state=initial, output_state=narrow)
    assert final is narrow and torch.equal(final.view(torch.uint8), wide.to(dtype).view(torch.uint8))


# ---- checkpoints


@pytest.mark.parametrize("chunk_len", [None, 64, 320])
@pytest.mark.parametrize("seq_lens", [[500, 700, 900], [1866], [1160], [128, 127, 0, 129]])
def test_checkpoints_count_finished_intervals_only(target, seq_lens, chunk_len):
    tokens, every, device = target.tokens(sum(seq_lens), gates="weak"), 128, target.device
    rows = sum(n // every for n in seq_lens)
    buffer = torch.full((rows + 1, 2, target.dim, target.dim), 7.0, device=device)
    run(
        tokens,
        seq_lens,
        target,
        state_checkpoints=buffer[:rows],
        checkpoint_cu_starts=checkpoint_starts(seq_lens, every, device),
        checkpoint_every_n_tokens=every,
        _cp_chunk_len=chunk_len,
    )
    expected = expect(tokens, seq_lens, checkpoint_every_n_tokens=every)
    assert expected.checkpoints.shape[0] == rows
    assert_within(buffer[:rows], expected.checkpoints, target.tolerance, what="checkpoints")
    assert bool((buffer[rows] == 7).all()), "written past the buffer"


def test_a_missing_or_short_checkpoint_buffer_is_refused(target):
    tokens, device = target.tokens(256), target.device
    starts = checkpoint_starts([256], 128, device)
    with pytest.raises(ValueError, match="must both be provided"):
        run(tokens, [256], target, checkpoint_every_n_tokens=128)
    shape = rf"2, {target.dim}, {target.dim}\)"
    with pytest.raises(ValueError, match=rf"state_checkpoints must have shape \(2, {shape}.*got \(1, {shape}"):
        short = torch.zeros(1, 2, target.dim, target.dim, device=device)
        run(tokens, [256], target, checkpoint_every_n_tokens=128, state_checkpoints=short, checkpoint_cu_starts=starts)
    with pytest.raises(ValueError, match=r"multiple of the chunk size \(64\), got 16"):
        run(tokens, [256], target, checkpoint_every_n_tokens=16)


def test_asking_for_checkpoints_changes_no_other_bit(target):
    tokens, device = target.tokens(300), target.device
    plain = run(tokens, [300], target, _cp_chunk_len=128)
    rows = torch.empty(4, 2, target.dim, target.dim, device=device)
    checkpointed = run(
        tokens,
        [300],
        target,
        _cp_chunk_len=128,
        state_checkpoints=rows,
        checkpoint_cu_starts=checkpoint_starts([300], 64, device),
        checkpoint_every_n_tokens=64,
    )
    assert all(torch.equal(a, b) for a, b in zip(plain, checkpointed, strict=True))


# ---- batches and memory


def test_a_sequence_does_not_depend_on_its_batch_mates(target):
    if target == ("cuda", "torch"):
        pytest.skip("torch on CUDA may pick another matrix kernel for another batch: outside the promise")
    tokens = target.tokens(700)
    together, state = run(tokens, [100, 333, 267], target, _cp_chunk_len=64)
    alone, own = run({n: x[100:433].contiguous() for n, x in tokens.items()}, [333], target, _cp_chunk_len=64)
    assert torch.equal(together[100:433], alone) and torch.equal(state[1], own[0])


def test_the_same_run_twice_gives_the_same_bits(target):
    tokens = target.tokens(400)
    first, second = (run(tokens, [400], target, _cp_chunk_len=128) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("chunk_len", [None, 64])
def test_a_neighbours_nan_stays_with_the_neighbour(target, chunk_len):
    tokens = target.tokens(230)
    clean = run(tokens, [100, 130], target, _cp_chunk_len=chunk_len)
    for x in tokens.values():
        x[100:] = torch.nan
    output, final = run(tokens, [100, 130], target, _cp_chunk_len=chunk_len)
    assert torch.equal(output[:100], clean[0][:100]) and torch.equal(final[0], clean[1][0])
    assert output[100:].isnan().all()


def test_preallocated_output_and_default_scale(target):
    tokens, device = target.tokens(100), target.device
    output = torch.empty_like(tokens["v"], device=device)
    got, _ = run(tokens, [100], target, output=output, scale=0)
    assert got is output and torch.equal(output, run(tokens, [100], target, scale=1 / math.sqrt(target.dim))[0])


@pytest.mark.gpu
def test_no_call_waits_for_the_device(target):
    if target.device != "cuda":
        pytest.skip("there is nothing to wait for on a CPU")
    tokens, slots = to(target.tokens(300), "cuda"), torch.tensor([2, 0], device="cuda")
    pool, rows = target.states(3).cuda(), target.states(4).cuda()
    lengths, starts = cu([100, 200], "cuda"), checkpoint_starts([100, 200], 64, "cuda")

    def call(host, chunk_len):
        return gdncp.chunk_gated_delta_rule(
            **tokens, cu_seqlens=lengths, cu_seqlens_host=host, initial_state=pool, output_state=pool,
            state_indices=slots, output_final_state=True, state_checkpoints=rows, checkpoint_cu_starts=starts,
            checkpoint_every_n_tokens=64, _cp_chunk_len=chunk_len, backend=target.backend,
        )  # fmt: skip

    for host in ([0, 100, 300], None):
        for chunk_len in (None, 64):
            call(host, chunk_len)  # compile and load first
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            try:
                call(host, chunk_len)
            finally:
                torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_a_graph_replays_with_other_lengths_and_slots(target):
    """Tables are built on the device, so a captured call re-reads lengths and slots at every replay."""
    if target.device != "cuda" or target.backend == "torch":
        pytest.skip("graphs are a device matter, and the torch set picks algorithms by shape")
    tokens, pool = to(target.tokens(300), "cuda"), target.states(4).cuda()
    original, lengths = pool.clone(), cu([100, 200], "cuda")
    slots, output = torch.tensor([2, 0], device="cuda"), torch.empty_like(tokens["v"])

    def call():
        return gdncp.chunk_gated_delta_rule(
            **tokens, cu_seqlens=lengths, initial_state=pool, output_state=pool, state_indices=slots, output=output,
            output_final_state=True, _cp_chunk_len=64, backend=target.backend,
        )  # fmt: skip

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    lengths.copy_(cu([30, 270], "cuda"))
    slots.copy_(torch.tensor([1, 3], device="cuda"))
    pool.copy_(original)
    graph.replay()
    arguments = {"initial_state": original[[1, 3]], "_cp_chunk_len": 64, "forget_below": None}
    expected, final = run(tokens, [30, 270], target, **arguments)
    assert torch.equal(output, expected) and torch.equal(pool[[1, 3]], final)
    assert torch.equal(pool[[0, 2]], original[[0, 2]])


@pytest.mark.gpu
def test_tensors_on_another_device_than_the_current_one(target):
    if torch.cuda.device_count() < 2 or target.device != "cuda":
        pytest.skip("needs two CUDA devices")
    tokens = target.tokens(100)
    with torch.cuda.device(0):
        check(tokens, [100], target._replace(device="cuda:1"))


@pytest.mark.gpu
def test_two_streams_do_not_share_scratch(target):
    if target.device != "cuda":
        pytest.skip("needs streams")
    inputs = [target.tokens(2000, seed=s) for s in range(2)]
    alone = [run(t, [2000], target, _cp_chunk_len=128) for t in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    for _ in range(3):
        got = []
        for tokens, stream in zip(inputs, streams, strict=True):
            with torch.cuda.stream(stream):
                got.append(run(tokens, [2000], target, _cp_chunk_len=128))
        torch.cuda.synchronize()
        for a, b in zip(got, alone, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
