"""The Hopper kernels against the float64 oracle and against the torch set, on a Hopper GPU; refusals anywhere."""

from dataclasses import replace

import pytest
import torch

import gdncp
from gdncp.backends import get_backend, select_backend
from gdncp.backends.base import TokenInputs
from gdncp.backends.hopper_backend import MIN_TRITON, HopperBackend
from gdncp.backends.torch_backend import TorchBackend
from gdncp.backends.triton_version import triton_rejection_reason
from tests.backends import driver
from tests.conftest import HAS_CUDA, hopper_only
from tests.numeric import TOLERANCE, TOLERANCE_BETA_ABOVE_1, assert_output, assert_within

# bf16: the contract, of which 8 bits take the most part: 4e-3 with gates that never forget, 6.5e-3 with beta from 1 to
# 2.  That is operand rounding, so fp16's 11 bits leave an eighth; twice as much with alike keys, or where P of nearly
# orthogonal q and k gets as small as fp16's subnormals, which one token alone shows.
ALLOWED = {torch.bfloat16: TOLERANCE[torch.bfloat16], torch.float16: 2e-3}
ALLOWED_BETA_ABOVE_1 = {torch.bfloat16: TOLERANCE_BETA_ABOVE_1[torch.bfloat16], torch.float16: 2e-3}
both_dims = pytest.mark.parametrize("dim", [128, 64])
both_dtypes = pytest.mark.parametrize("dtype", list(ALLOWED), ids=str)

SEQ_LENS = [777, 64, 0, 330, 1500, 1]  # tails, one chunk, nothing, one token; 1500 tokens are six CP chunks of 256
HEADS = {"equal": (2, 2, 2), "gva": (1, 1, 3), "gqa": (4, 2, 2)}


def make_inputs(num_tokens, heads=(1, 1, 2), l2norm=False, dtype=torch.bfloat16, dim=128, **arguments) -> TokenInputs:
    inputs = driver.make_inputs(num_tokens, heads, dim, dim, dtype=dtype, **arguments)
    if l2norm:  # rows of any length
        lengths = torch.logspace(-1, 1, num_tokens)[:, None, None]
        q, k = (inputs.q.float() * lengths).to(dtype), (inputs.k.float() * lengths.flip(0)).to(dtype)
        inputs = replace(inputs, q=q, k=k, use_qk_l2norm=True)
    return inputs


def on_gpu(inputs: TokenInputs) -> TokenInputs:
    names = ("q", "k", "v", "gate", "beta")
    return replace(inputs, **{n: None if getattr(inputs, n) is None else getattr(inputs, n).cuda() for n in names})


def assert_matches_oracle(result, inputs, seq_lens, initial, tolerance, **arguments):
    expected = driver.oracle(inputs, seq_lens, initial, **arguments)
    assert_output(result.output, expected.output, seq_lens, tolerance)
    assert_within(result.final_state, expected.final_state, tolerance, what="final state")
    if expected.checkpoints.numel():
        assert_within(result.checkpoints, expected.checkpoints, tolerance, what="checkpoints")


@hopper_only
@both_dims
@both_dtypes
@pytest.mark.parametrize("gates", driver.GATES)
@pytest.mark.parametrize("l2norm", [False, True], ids=["raw", "l2norm"])
def test_gates(gates, l2norm, dtype, dim):
    inputs = make_inputs(sum(SEQ_LENS), gates=gates, l2norm=l2norm, dtype=dtype, dim=dim)
    initial = driver.make_state(len(SEQ_LENS), inputs)
    result = driver.run(on_gpu(inputs), SEQ_LENS, 256, initial.cuda(), backend=HopperBackend())
    assert_matches_oracle(result, inputs, SEQ_LENS, initial, ALLOWED[dtype])


@hopper_only
@both_dims
@both_dtypes
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
def test_heads_linear_gates_and_no_state(heads, dtype, dim):
    words = {"gates": "resets", "gate_space": "linear", "l2norm": True, "dtype": dtype, "dim": dim}
    inputs = make_inputs(sum(SEQ_LENS), heads, **words)
    result = driver.run(on_gpu(inputs), SEQ_LENS, 128, backend=HopperBackend())
    assert_matches_oracle(result, inputs, SEQ_LENS, None, ALLOWED[dtype])


@hopper_only
@both_dims
@both_dtypes
@pytest.mark.parametrize("beta", [(0.0, 2.0), (1.0, 2.0), None], ids=str)
def test_beta_above_one_and_none(beta, dtype, dim):
    inputs = make_inputs(2000, beta=beta, gates="weak", dtype=dtype, dim=dim)
    initial = driver.make_state(1, inputs)
    result = driver.run(on_gpu(inputs), [2000], 192, initial.cuda(), backend=HopperBackend())
    tolerance = (ALLOWED if beta is None else ALLOWED_BETA_ABOVE_1)[dtype]
    assert_matches_oracle(result, inputs, [2000], initial, tolerance)


@hopper_only
@both_dims
@both_dtypes
def test_many_cp_chunks_that_never_forget(dtype, dim):
    inputs = make_inputs(8192, (1, 1, 1), dtype=dtype, dim=dim)
    split = driver.run(on_gpu(inputs), [8192], 128, backend=HopperBackend())
    assert_matches_oracle(split, inputs, [8192], None, ALLOWED[dtype])


@hopper_only
@both_dims
@both_dtypes
def test_scale_and_alike_keys(dtype, dim):
    inputs = make_inputs(700, beta=(0.5, 1.0), gates="weak", dtype=dtype, dim=dim)
    k = torch.nn.functional.normalize(0.5 * inputs.k.float() + inputs.k[:1].float(), dim=-1).to(dtype)
    inputs = replace(inputs, k=k, scale=-1.7)
    result = driver.run(on_gpu(inputs), [700], 256, backend=HopperBackend())
    assert_matches_oracle(result, inputs, [700], None, ALLOWED[dtype])


@hopper_only
@both_dims
@both_dtypes
def test_l2_norm_of_keys_of_zeros_and_of_any_length(dtype, dim):
    inputs = make_inputs(1500, gates="weak", l2norm=True, dtype=dtype, dim=dim)
    lengths = torch.logspace(-3, 3, 1500)[torch.randperm(1500, generator=torch.Generator().manual_seed(3))]
    lengths[::50] = 0
    k = torch.nn.functional.normalize(inputs.k.float(), dim=-1) * lengths[:, None, None]
    inputs, initial = replace(inputs, k=k.to(dtype)), driver.make_state(1, inputs)
    result = driver.run(on_gpu(inputs), [1500], 256, initial.cuda(), backend=HopperBackend())
    assert_matches_oracle(result, inputs, [1500], initial, ALLOWED[dtype])


@hopper_only
@both_dims
@both_dtypes
@pytest.mark.parametrize("l2norm", [False, True], ids=["raw", "l2norm"])
def test_checkpoints_anywhere(l2norm, dtype, dim):
    lens = [300, 0, 64, 129]
    positions = [[1, 5, 64, 100, 128, 299, 300], [], [64], [63, 65, 129]]
    inputs = make_inputs(sum(lens), gates="resets", l2norm=l2norm, dtype=dtype, dim=dim)
    initial = driver.make_state(len(lens), inputs)
    gpu = on_gpu(inputs)
    result = driver.run(gpu, lens, 192, initial.cuda(), positions=positions, backend=HopperBackend())
    assert_matches_oracle(result, inputs, lens, initial, ALLOWED[dtype], checkpoint_positions=positions)
    without = driver.run(gpu, lens, 192, initial.cuda(), backend=HopperBackend())
    assert torch.equal(result.output, without.output) and torch.equal(result.final_state, without.final_state)


@hopper_only
@both_dims
def test_maps_and_their_bounds_are_those_of_the_torch_set(dim):
    inputs = on_gpu(make_inputs(1200, (2, 2, 6), gates="mixed", l2norm=True, dim=dim))
    initial = driver.make_state(2, inputs).cuda()
    lens = [1000, 200]
    for forget_below in (0.0, 2.0**-16):
        ours, theirs = (
            driver.run(inputs, lens, 320, initial, forget_below=forget_below, backend=b)
            for b in (HopperBackend(), TorchBackend())
        )
        a, b = ours.maps[0], theirs.maps[0]
        assert torch.equal(a.scanned, b.scanned) and torch.equal(a.forgot, b.forgot)
        # bf16 operands; of fewer directions tokens contract each more often: emulated 3.1e-3 of 128, 4.9e-3 of 64
        assert_within(a.transition, b.transition, 5e-3 * (128 / dim) ** 0.5, what="transition")
        assert_within(a.local_state, b.local_state, 5e-3, what="local state")
        for x, y in ((a.gain, b.gain), (a.dropped, b.dropped)):  # upper bounds, a little wider than float64's
            assert bool((x >= y * (1 - 1e-6)).all()) and bool((x <= y * 1.02 + 1e-37).all())
        assert bool(a.forgot.any()) == (forget_below > 0) and not bool(a.forgot.all())
    assert bool((a.dropped > 0).any())


@hopper_only
def test_the_bound_on_what_was_left_out_is_read_anew_after_a_replay():
    inputs = on_gpu(make_inputs(1200, (2, 2, 6), gates="mixed", l2norm=True))
    plan = gdncp.plan_prefill([1200], num_q_heads=2, num_k_heads=2, num_v_heads=6, cp_chunk_len=320)
    tokens = (inputs.q, inputs.k, inputs.v, inputs.gate, inputs.beta)
    words = {"gate_space": inputs.gate_space, "use_qk_l2norm_in_kernel": True, "backend": "hopper", "keep_entry": True}
    before = gdncp.prefill(plan, *tokens, **words).entry.summary.maps.dropped.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        maps = gdncp.prefill(plan, *tokens, **words).entry.summary.maps
    for factor in (1, 4):  # v's share of the bound, which is all of it without an initial state
        inputs.v.mul_(factor)
        graph.replay()
        assert bool((before > 0).any()) and torch.allclose(maps.dropped, factor * before, rtol=1e-3)


@hopper_only
def test_forgetting_changes_no_more_than_its_bound():
    inputs = make_inputs(3000, (1, 1, 4), gates="mixed")
    gpu = on_gpu(inputs)
    exact, cut = (driver.run(gpu, [3000], 512, forget_below=f, backend=HopperBackend()) for f in (0.0, 2.0**-16))
    assert bool(cut.maps[0].forgot.any())
    assert_output(cut.output.cpu(), exact.output.cpu(), [3000], 1e-3)
    assert_matches_oracle(cut, inputs, [3000], None, TOLERANCE[torch.bfloat16])


@hopper_only
@both_dims
def test_lengths_on_the_device_give_the_bits_of_the_plan(dim):
    inputs = on_gpu(make_inputs(sum(SEQ_LENS), gates="mixed", dim=dim))
    initial = driver.make_state(len(SEQ_LENS), inputs).cuda()
    offsets = torch.tensor([0, *torch.tensor(SEQ_LENS).cumsum(0).tolist()], device="cuda")
    backend, arguments = HopperBackend(), {"forget_below": 2.0**-16, "every": 128}
    planned = driver.run(inputs, SEQ_LENS, 256, initial, backend=backend, **arguments)
    built = driver.run_from_device(inputs, offsets, 256, initial, backend=backend, **arguments)
    assert torch.equal(planned.output, built.output)
    assert torch.equal(planned.final_state, built.final_state)
    assert torch.equal(planned.checkpoints, built.checkpoints[: planned.checkpoints.shape[0]])


@hopper_only
@both_dims
def test_neighbours_that_are_nan_and_rows_that_nothing_covers(dim):
    lens = [100, 70, 200, 30]  # each but the last ends inside a chunk that its neighbour's rows fill
    inputs = on_gpu(make_inputs(sum(lens) + 50, gates="mixed", l2norm=True, dim=dim))
    offsets = torch.tensor([0, 100, 170, 370, 400], device="cuda")
    clean = driver.run_from_device(inputs, offsets, 128, backend=HopperBackend(), fill=7.0)
    for poison in (slice(100, 170), slice(170, 370), slice(370, 450)):
        tensors = {n: getattr(inputs, n).clone() for n in ("q", "k", "v", "gate", "beta")}
        for x in tensors.values():
            x[poison] = torch.nan
        dirty = driver.run_from_device(replace(inputs, **tensors), offsets, 128, backend=HopperBackend(), fill=7.0)
        for i, (start, stop) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)):
            if stop <= poison.start or start >= poison.stop:
                assert torch.equal(dirty.output[start:stop], clean.output[start:stop]), (poison, i)
                assert torch.equal(dirty.final_state[i], clean.final_state[i]), (poison, i)
    assert bool((clean.output[400:] == 7).all())


@hopper_only
@both_dims
def test_same_bits_again_and_with_other_batch_mates(dim):
    inputs = on_gpu(make_inputs(sum(SEQ_LENS), gates="weak", dim=dim))
    run = lambda x, lens: driver.run(x, lens, 256, backend=HopperBackend())  # noqa: E731
    first, again = run(inputs, SEQ_LENS), run(inputs, SEQ_LENS)
    assert torch.equal(first.output, again.output) and torch.equal(first.final_state, again.final_state)
    start = sum(SEQ_LENS[:4])
    alone = run(driver.take(inputs, [(start, start + 1500)]), [1500])
    assert torch.equal(first.output[start : start + 1500], alone.output)
    assert torch.equal(first.final_state[4], alone.final_state[0])


@hopper_only
def test_views_that_are_not_aligned_and_only_empty_sequences():
    inputs = on_gpu(make_inputs(100))
    names = ("q", "k", "v")

    def shifted(x: torch.Tensor) -> torch.Tensor:
        flat = x.new_empty(x.numel() + 1)
        flat[1:] = x.flatten()
        return flat[1:].view(x.shape)

    a = driver.run(inputs, [100], 128, backend=HopperBackend())
    b = driver.run(
        replace(inputs, **{n: shifted(getattr(inputs, n)) for n in names}), [100], 128, backend=HopperBackend()
    )
    assert torch.equal(a.output, b.output)

    nothing = driver.take(inputs, [])
    initial = driver.make_state(2, inputs).cuda()
    empty = driver.run(nothing, [0, 0], 128, initial, backend=HopperBackend())
    assert torch.equal(empty.final_state, initial)


@hopper_only
@both_dims
@both_dtypes
@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("opens", [True, False])
def test_public_calls_where_stage_2_opens_sequences(lanes, opens, dtype, dim):
    """A sequence's first CP chunk gets outputs and checkpoints in stage 2's launch, and runs of maps fold in one."""
    every, starts = 64, [0, *torch.tensor([n // 64 for n in SEQ_LENS]).cumsum(0).tolist()]
    inputs = make_inputs(sum(SEQ_LENS), (1, 1, 2), gates="mixed", dtype=dtype, dim=dim)
    initial = driver.make_state(len(SEQ_LENS), inputs)
    gpu = on_gpu(inputs)
    heads = {"num_q_heads": 1, "num_k_heads": 1, "num_v_heads": 2, "head_dim": dim}
    plan = gdncp.plan_prefill(
        SEQ_LENS, **heads, cp_chunk_len=256, checkpoint_every_n_tokens=every, lanes_per_rank=lanes, opens=opens
    )
    tokens = (gpu.q, gpu.k, gpu.v, gpu.gate, gpu.beta)
    result = gdncp.prefill(plan, *tokens, initial_state=initial.cuda(), backend="hopper", gate_space="log")
    assert_matches_oracle(result, inputs, SEQ_LENS, initial, ALLOWED[dtype], checkpoint_every_n_tokens=every)

    if not opens:  # which the other call does
        return
    checkpoints = torch.full_like(result.checkpoints, 7.0)
    output, final = gdncp.chunk_gated_delta_rule(
        *tokens,
        initial_state=initial.cuda(),
        output_final_state=True,
        cu_seqlens=torch.tensor([0, *torch.tensor(SEQ_LENS).cumsum(0).tolist()], device="cuda"),
        state_checkpoints=checkpoints,
        checkpoint_cu_starts=torch.tensor(starts, device="cuda"),
        checkpoint_every_n_tokens=every,
        _cp_chunk_len=256,
        backend="hopper",
        gate_space="log",
    )
    for a, b in ((output, result.output), (final, result.final_state), (checkpoints, result.checkpoints)):
        assert torch.equal(a, b)


def test_refusals():
    backend = HopperBackend()
    device = torch.device("cuda")
    arguments = {"device": device, "dtype": torch.bfloat16, "k_dim": 128, "v_dim": 128, "precision": "fast"}
    for change, word in (
        ({"dtype": torch.float32}, "float32"),
        ({"k_dim": 64}, "K = 64 and V = 128"),
        ({"k_dim": 256, "v_dim": 256}, "K = 256 and V = 256"),
        ({"precision": "high"}, "high"),
        ({"device": torch.device("cpu")}, "cpu"),
    ):
        reason = backend.rejection_reason(**{**arguments, **change})
        assert reason is not None and word in reason
    with pytest.raises(ValueError, match="hopper"):
        select_backend("hopper", **{**arguments, "device": torch.device("cpu")})
    assert get_backend("hopper").name == "hopper"
    if HAS_CUDA and torch.cuda.get_device_capability() == (9, 0):  # the tests above run here, or for this reason not
        why_not = triton_rejection_reason(MIN_TRITON, "triton.experimental.gluon")
        assert all(backend.rejection_reason(**{**arguments, "k_dim": d, "v_dim": d}) == why_not for d in (64, 128))


@hopper_only
@both_dims
def test_a_warm_plan_compiles_nothing_and_can_be_captured(monkeypatch, dim):
    from gdncp_kernels.hopper.launch import Launcher

    inputs = on_gpu(make_inputs(1000, gates="mixed", dim=dim))
    heads = {"num_q_heads": 1, "num_k_heads": 1, "num_v_heads": 2, "head_dim": dim}
    plan = gdncp.plan_prefill([1000], **heads, cp_chunk_len=256, checkpoint_every_n_tokens=128)
    words = {"gate_space": inputs.gate_space, "backend": "hopper", "scale": inputs.scale}
    gdncp.warmup(plan, device="cuda", dtype=torch.bfloat16, pooled=True, **words)
    monkeypatch.setattr(Launcher, "compiled", None)
    tokens = (inputs.q, inputs.k, inputs.v, inputs.gate, inputs.beta)
    pool, slots = torch.randn(3, 2, dim, dim, device="cuda"), torch.tensor([1], dtype=torch.int32, device="cuda")
    copy = pool.clone()
    expected = gdncp.prefill(plan, *tokens, state_pool=copy, state_indices=slots, **words)
    graph, other = torch.cuda.CUDAGraph(), pool.clone()
    with torch.cuda.graph(graph):
        result = gdncp.prefill(plan, *tokens, state_pool=other, state_indices=slots, **words)
    for _ in range(20):  # takes the memory that the capture must not have left to others
        gdncp.prefill(plan, *(x.clone() for x in tokens), state_pool=pool.clone(), state_indices=slots, **words)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(result.output, expected.output) and torch.equal(other, copy)
    assert torch.equal(result.checkpoints, expected.checkpoints) and not torch.equal(other, pool)


@hopper_only
@both_dims
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn], ids=str)
def test_pools_in_place_have_the_bits_of_states_that_are_copied(dtype, dim):
    inputs = on_gpu(make_inputs(900, gates="mixed", dim=dim))
    heads = {"num_q_heads": 1, "num_k_heads": 1, "num_v_heads": 2, "head_dim": dim}
    plan = gdncp.plan_prefill([500, 0, 400], **heads, cp_chunk_len=128, forget_below=0.0)
    tokens = (inputs.q, inputs.k, inputs.v, inputs.gate, inputs.beta)
    words = {"gate_space": inputs.gate_space, "backend": "hopper"}
    wide = torch.randn(5, 3, dim, dim, device="cuda").to(dtype)
    pool, slots = wide[:, :2], torch.tensor([4, 0, 2], device="cuda")  # slots that do not touch
    states = pool.float()[slots]
    expected = gdncp.prefill(plan, *tokens, initial_state=states, **words)
    before = pool.float()
    result = gdncp.prefill(plan, *tokens, state_pool=pool, state_indices=slots, **words)
    assert torch.equal(result.output, expected.output)
    assert torch.equal(pool.float()[slots], expected.final_state.to(dtype).float())
    assert torch.equal(pool.float()[[1, 3]], before[[1, 3]])


@hopper_only
def test_calls_in_threads_and_streams_do_not_mix_their_addresses():
    from concurrent.futures import ThreadPoolExecutor

    plan = gdncp.plan_prefill([2000], num_q_heads=1, num_k_heads=1, num_v_heads=2, cp_chunk_len=256)

    def call(seed: int) -> bool:
        inputs = on_gpu(make_inputs(2000, gates="mixed", seed=seed))
        tokens = (inputs.q, inputs.k, inputs.v, inputs.gate, inputs.beta)
        words = {"gate_space": inputs.gate_space, "backend": "hopper"}
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            results = [gdncp.prefill(plan, *tokens, **words) for _ in range(20)]
        torch.cuda.synchronize()
        alone = gdncp.prefill(plan, *tokens, **words)
        return all(torch.equal(r.output, alone.output) for r in results)

    call(0)
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(call, range(8)))
