"""The torch set on a GPU: right, silent (no device read), capturable, and shielded from TF32.  `pytest -m gpu`."""

import pytest
import torch

from gdncp.backends.base import AffineMaps, Sinks
from gdncp.backends.torch_backend import TorchBackend
from gdncp.layout import layout_of_cu_seqlens, layout_of_plan
from gdncp.plan import plan_prefill
from gdncp.reference import relative_error
from tests.backends.driver import GATES, make_inputs, make_state, oracle, run, run_from_device, take

pytestmark = pytest.mark.gpu

LENS = [450, 0, 64, 65, 1, 130]
CU_SEQLENS = torch.tensor([0, *LENS]).cumsum(0)
FORGET = 2.0**-24


def on_gpu(x):
    return type(x)(**{k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in vars(x).items()})


def sample(gates="mixed", beta=(0, 2), dtype=torch.float32, dim=64):
    x = make_inputs(sum(LENS), (2, 2, 4), dim, dim, gates=gates, beta=beta, dtype=dtype)
    return x, make_state(len(LENS), x)


@pytest.mark.parametrize("forget_below", [0.0, FORGET])
@pytest.mark.parametrize("gates", GATES)
def test_against_the_oracle(gates, forget_below):
    x, state = sample(gates)
    ref = oracle(x, LENS, state, checkpoint_every_n_tokens=64)
    kwargs = dict(forget_below=forget_below, every=64)
    for result in (
        run(on_gpu(x), LENS, 128, state.cuda(), world_size=2, lanes=2, **kwargs),
        run_from_device(on_gpu(x), CU_SEQLENS.cuda(), 128, state.cuda(), **kwargs),
    ):
        rows = len(ref.checkpoints)
        # as on the CPU: 2e-7 to 7e-7 measured
        assert relative_error(result.output, ref.output, LENS).max() < 2e-6
        assert relative_error(result.final_state, ref.final_state).max() < 2e-6
        assert relative_error(result.checkpoints[:rows], ref.checkpoints).max() < 2e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_inputs(dtype):
    x, state = sample(dtype=dtype)
    result, ref = run(on_gpu(x), LENS, 128, state.cuda()), oracle(x, LENS, state)
    assert relative_error(result.output, ref.output, LENS).max() < 2.5e-3  # rounded once
    assert relative_error(result.final_state, ref.final_state).max() < 2e-6


def test_tf32_and_autocast_do_not_reach_it():
    x, state = sample("none", dim=128)
    ref = oracle(x, LENS, state)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        with torch.autocast("cuda", torch.bfloat16):
            result = run(on_gpu(x), LENS, 128, state.cuda())
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)
    assert relative_error(result.output, ref.output, LENS).max() < 2e-6


def all_stages(x, layout, entry, maps, sinks, forget_below=FORGET):
    backend = TorchBackend()
    for table in layout.tables:
        tiles = backend.precompute_t(x, table)
        if layout.has_maps:
            backend.precompute_mn(x, tiles, table, entry, maps, forget_below)
        backend.cp_prefill(x, tiles, table, entry, sinks)


def buffers(x, layout, num_rows, initial):
    heads, k_dim, v_dim = x.num_state_heads, x.q.shape[2], x.v.shape[2]
    entry = torch.zeros(num_rows, heads, v_dim, k_dim, device="cuda")
    entry.index_copy_(0, layout.first_rows, initial[layout.first_sequences])
    sinks = Sinks(
        torch.zeros(x.q.shape[0], heads, v_dim, dtype=x.q.dtype, device="cuda"),
        torch.zeros(layout.num_final + 1, heads, v_dim, k_dim, device="cuda"),
        torch.zeros(layout.num_checkpoints + 1, heads, v_dim, k_dim, device="cuda"),
    )
    return entry, AffineMaps.empty(layout.num_maps + 1, heads, k_dim, v_dim, x.q.device), sinks


def from_device(x, cu_seqlens):
    starts = torch.cat([cu_seqlens.new_zeros(1), (cu_seqlens.diff() // 64).cumsum(0)])
    rows = x.q.shape[0] // 64
    kwargs = dict(checkpoint_every_n_tokens=64, checkpoint_cu_starts=starts, num_checkpoints=rows)
    return layout_of_cu_seqlens(cu_seqlens, x.q.shape[0], 128, **kwargs)


def from_host(x):
    heads = dict(num_q_heads=2, num_k_heads=2, num_v_heads=4, head_dim=x.q.shape[2])
    positions = [[1, 63, 64, 70, 450], [], [64], [], [1], [130]]
    plan = plan_prefill(LENS, cp_chunk_len=128, checkpoint_positions=positions, lanes_per_rank=2, **heads)
    return layout_of_plan(plan, 0, x.q.device)


@pytest.mark.parametrize("table", ["host", "device"])
def test_nothing_reads_the_device(table):
    x, state = sample("resets")
    x, state, cu_seqlens = on_gpu(x), state.cuda(), CU_SEQLENS.cuda()
    layout = from_host(x) if table == "host" else from_device(x, cu_seqlens)
    entry, maps, sinks = buffers(x, layout, layout.num_items + 1, state)
    all_stages(x, layout, entry, maps, sinks)  # library handles are made on the first call
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        all_stages(x, layout, entry, maps, sinks)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("table", ["host", "device"])
def test_a_captured_graph_replays_other_tokens(table):
    x, state = sample("resets")
    other = on_gpu(make_inputs(sum(LENS), (2, 2, 4), 64, 64, gates="mixed", beta=(0, 1), seed=5))
    x, state = on_gpu(x), state.cuda()
    layout = from_host(x) if table == "host" else from_device(x, CU_SEQLENS.cuda())
    entry, maps, sinks = buffers(x, layout, layout.num_items + 1, state)
    eager_entry, eager_maps, eager = buffers(x, layout, layout.num_items + 1, state)
    all_stages(other, layout, eager_entry, eager_maps, eager)

    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        all_stages(x, layout, entry, maps, sinks)
    stream.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        all_stages(x, layout, entry, maps, sinks)
    for name in ("q", "k", "v", "gate", "beta"):
        getattr(x, name).copy_(getattr(other, name))
    graph.replay()
    torch.cuda.synchronize()
    for a, b in ((sinks.output, eager.output), (sinks.final_states[:-1], eager.final_states[:-1])):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert torch.equal(maps.forgot[: layout.num_maps], eager_maps.forgot[: layout.num_maps])


def test_a_neighbour_full_of_nan_leaks_nowhere():
    x, state = sample()
    x, state = on_gpu(x), state.cuda()
    clean = run(take(x, [(0, 450)]), [450], 128, state[:1])
    for name in ("q", "k", "v", "gate", "beta"):
        getattr(x, name)[450:] = torch.nan
    state[1:] = torch.nan
    dirty = run_from_device(x, CU_SEQLENS.cuda(), 128, state)
    torch.testing.assert_close(dirty.output[:450], clean.output, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dirty.final_state[:1], clean.final_state, rtol=1e-5, atol=1e-5)
