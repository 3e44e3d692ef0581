"""The numeric cases of an independent float64 oracle, through FlashInfer's call."""

import pytest
import torch

import gdncp
from tests.conftest import on_targets
from tests.numeric import CASES, assert_output, assert_within, checkpoint_starts, cu, load_case, offsets


def run_case(case, target, *, chunk_len=None, gate_space="linear", on_host=True, use_cp="auto"):
    """Everything that the case has an expectation for: output, final state, checkpoints."""
    device, backend, _ = target
    case = case.to(device)
    pool = case["state_pool"]
    every = case.checkpoint_every_n_tokens
    heads, v_dim, k_dim = case.tensors["expected_final_state"].shape[1:]
    extra = {}
    if every:
        rows = sum(n // every for n in case.seq_lens)
        extra["state_checkpoints"] = torch.full((rows, heads, v_dim, k_dim), torch.nan, device=device)
        extra["checkpoint_cu_starts"] = checkpoint_starts(case.seq_lens, every, device)
    if pool is not None:
        pool = pool.clone()
        extra |= {"output_state": pool, "state_indices": case["state_indices"]}
    output, final = gdncp.chunk_gated_delta_rule(
        case["q"],
        case["k"],
        case["v"],
        case["g" if gate_space == "linear" else "g_log"],
        case["beta"],
        case.scale,
        case["initial_state"] if pool is None else pool,
        True,
        cu(case.seq_lens, device),
        case.use_qk_l2norm_in_kernel,
        checkpoint_every_n_tokens=every,
        _cp_chunk_len=chunk_len,
        use_cp=use_cp,
        backend=backend,
        gate_space=gate_space,
        cu_seqlens_host=offsets(case.seq_lens) if on_host else None,
        forget_below=0.0,
        **extra,
    )
    if pool is not None:
        assert final is pool
        slots = case["state_indices"].long()
        others = torch.ones(pool.shape[0], dtype=torch.bool, device=device).index_fill_(0, slots, False)
        assert torch.equal(pool[others], case["state_pool"][others]), "a slot that no sequence has was touched"
        final = pool[slots]
    return output, final, extra.get("state_checkpoints")


def takes(target, name):
    tensors = load_case(name).tensors
    return target.takes(tensors["q"].dtype, tensors["q"].shape[2])


@pytest.mark.parametrize("chunk_len", [None, 64, 128], ids="cp{}".format)
@pytest.mark.parametrize("name, target", on_targets(CASES, takes))
def test_case(name, chunk_len, target):
    case = load_case(name)
    output, final, checkpoints = run_case(case, target, chunk_len=chunk_len)
    tol = case.tolerance
    assert output.dtype == case["q"].dtype and final.dtype == torch.float32
    assert_output(output, case["expected_output"], case.seq_lens, tol)
    assert_within(final, case["expected_final_state"], tol, what="final state")
    if checkpoints is not None:
        assert_within(checkpoints, case["expected_checkpoints"], tol, what="checkpoints")


LOG_CASES = ["hard_resets", "real_gate_range", "l2norm_in_kernel_fp16", "pool_in_place", "qwen3_next_layer"]


@pytest.mark.parametrize("name, target", on_targets(LOG_CASES, takes))
def test_log_gates_mean_the_same(name, target):
    case = load_case(name)
    output, final, _ = run_case(case, target, chunk_len=64, gate_space="log")
    assert_output(output, case["expected_output"], case.seq_lens, case.tolerance)
    assert_within(final, case["expected_final_state"], case.tolerance, what="final state")


ON_DEVICE = on_targets(CASES, lambda target, name: target.device != "cpu" and takes(target, name))


@pytest.mark.parametrize("chunk_len", [None, 128], ids="cp{}".format)
@pytest.mark.parametrize("name, target", ON_DEVICE)
def test_lengths_that_only_the_device_knows(name, chunk_len, target):
    case = load_case(name)
    use_cp = chunk_len is not None  # "auto" with lengths on the host would choose a split by predicted time
    with_host = run_case(case, target, chunk_len=chunk_len, use_cp=use_cp)
    without = run_case(case, target, chunk_len=chunk_len, use_cp=use_cp, on_host=False)
    if target.backend != "torch":  # torch on CUDA may pick other kernels for another batch
        assert all(a is b or torch.equal(a, b) for a, b in zip(with_host, without, strict=True))
    assert_output(without[0], case["expected_output"], case.seq_lens, case.tolerance)
    assert_within(without[1], case["expected_final_state"], case.tolerance, what="final state")
