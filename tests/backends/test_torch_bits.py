"""What must not change a bit of the torch set on a CPU, and what must not be touched."""

import dataclasses
from contextlib import contextmanager

import pytest
import torch

from gdncp.backends.torch_backend import TorchBackend
from gdncp.backends.torch_inverse import unit_lower_inverse
from gdncp.backends.torch_shield import ieee_fp32
from tests.backends.driver import make_inputs, make_state, run, run_from_device, take

LENS = [450, 0, 64, 65, 1, 130]
FORGET = 2.0**-24


def sample(gates="mixed", **kwargs):
    x = make_inputs(sum(LENS), (2, 2, 4), gates=gates, beta=(0, 2), **kwargs)
    if gates == "mixed":
        x.gate.mul_(2)  # so that some heads forget within a CP chunk and some do not
    return x, make_state(len(LENS), x)


def assert_same(a, b):
    assert torch.equal(a.output, b.output)
    assert torch.equal(a.final_state, b.final_state)
    # buffers made from upper bounds have more rows than there are checkpoints
    rows = min(len(a.checkpoints), len(b.checkpoints))
    assert torch.equal(a.checkpoints[:rows], b.checkpoints[:rows])


@pytest.fixture(scope="module", params=[0.0, FORGET], ids=["never forgets", "forgets"])
def forget_below(request):
    return request.param


@pytest.fixture(scope="module")
def base(forget_below):
    x, state = sample()
    result = run(x, LENS, 128, state, forget_below=forget_below, every=64)
    assert result.maps[0].forgot.any() == (forget_below > 0) and not result.maps[0].forgot.all()
    return x, state, result


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
@pytest.mark.parametrize("ownership", ["contiguous", "zigzag"])
def test_ranks_and_ownership(base, forget_below, world_size, ownership):
    x, state, result = base
    kwargs = dict(world_size=world_size, ownership=ownership, lanes=1 + world_size % 3)
    assert_same(result, run(x, LENS, 128, state, forget_below=forget_below, every=64, **kwargs))


def test_lengths_from_the_device_and_masks_in_place_of_skipped_work(base, forget_below):
    x, state, result = base
    cu_seqlens = torch.tensor([0, *LENS]).cumsum(0)
    kwargs = dict(forget_below=forget_below, every=64)
    masking = TorchBackend(never_looks=True)
    assert_same(result, run_from_device(x, cu_seqlens, 128, state, **kwargs))
    assert_same(result, run_from_device(x, cu_seqlens.int(), 128, state, backend=masking, **kwargs))
    assert_same(result, run(x, LENS, 128, state, backend=masking, lanes=2, **kwargs))


def test_checkpoints_inside_tiles_with_masks():
    x, state = sample()
    kwargs = dict(positions=[[1, 63, 64, 70, 450], [], [64], [65], [1], [129, 130]])
    assert_same(run(x, LENS, 128, state, **kwargs), run(x, LENS, 128, state, backend=TorchBackend(True), **kwargs))


def test_batch_mates(base, forget_below):
    x, state, result = base
    for i, n in enumerate(LENS):
        start = sum(LENS[:i])
        alone = run(take(x, [(start, start + n)]), [n], 128, state[i : i + 1], forget_below=forget_below)
        assert torch.equal(alone.output, result.output[start : start + n])
        assert torch.equal(alone.final_state[0], result.final_state[i])


@pytest.mark.parametrize("dim", [16, 128])
def test_threads(dim):
    x, state = sample(k_dim=dim, v_dim=dim)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append(run(x, LENS, 128, state, forget_below=FORGET, every=64))
    finally:
        torch.set_num_threads(before)
    assert_same(results[0], results[1])


def test_zeros_and_no_initial_state():
    x, _ = sample()
    zeros = torch.zeros(len(LENS), 4, 24, 16)
    assert_same(run(x, LENS, 128), run(x, LENS, 128, zeros))


@pytest.mark.parametrize("v_dim", [24, 40, 128])
def test_fold_by_blocks_of_rows_and_one_map_at_a_time(v_dim):
    fold = TorchBackend().fold
    gen = torch.Generator().manual_seed(3)
    state, local = torch.randn(2, 5, 3, v_dim, 16, generator=gen)
    transition = torch.randn(5, 3, 16, 16, generator=gen)
    whole = fold(state, transition, local)
    torch.testing.assert_close(whole, state @ transition + local, rtol=1e-5, atol=1e-5)
    for start in range(0, v_dim, fold.block_rows):
        for rows in (slice(start, start + fold.block_rows), slice(start, None)):
            part = fold(state[..., rows, :], transition, local[..., rows, :])
            assert torch.equal(part, whole[..., rows, :])
    for i in range(5):
        assert torch.equal(fold(state[i, 1:2], transition[i, 1:2], local[i, 1:2]), whole[i, 1:2])


def test_inverse_alone_and_in_a_batch():
    a = torch.randn(50, 64, 64, generator=torch.Generator().manual_seed(1)) * 0.1
    inverse = unit_lower_inverse(a)
    lower = a.tril(-1).double() + torch.eye(64)
    error = (inverse.double() @ lower - torch.eye(64)).abs().max()
    assert error < 2e-6  # 64 fp32 sums of entries near 1
    assert torch.equal(inverse[7:10], unit_lower_inverse(a[7:10]))


# ---- what the process around us has set


@contextmanager
def setting(owner, name, value):
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def legacy_precision(value):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(value)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


new_flags = pytest.mark.skipif(not hasattr(torch.backends, "fp32_precision"), reason="torch before 2.9")
SURROUNDINGS = [
    pytest.param(lambda: torch.autocast("cpu", torch.bfloat16), id="autocast"),
    pytest.param(lambda: legacy_precision("medium"), id="legacy medium"),
    pytest.param(lambda: setting(torch.backends.cuda.matmul, "allow_tf32", True), id="allow_tf32"),
    pytest.param(lambda: setting(torch.backends, "fp32_precision", "bf16"), id="fp32_precision", marks=new_flags),
    pytest.param(
        lambda: setting(torch.backends.mkldnn.matmul, "fp32_precision", "bf16"), id="mkldnn bf16", marks=new_flags
    ),
    pytest.param(lambda: default_dtype(torch.float64), id="default dtype"),
    pytest.param(lambda: torch.device("meta"), id="default device"),
    pytest.param(torch.inference_mode, id="inference mode"),
]


@pytest.mark.parametrize("surrounding", SURROUNDINGS)
def test_surroundings_change_no_bit(surrounding):
    x = make_inputs(300, k_dim=64, v_dim=64, gates="weak")
    state = make_state(1, x)
    backend = InSurroundings(surrounding)
    assert_same(run(x, [300], 128, state, every=64), run(x, [300], 128, state, every=64, backend=backend))


def test_the_older_precision_flag_alone(monkeypatch):
    monkeypatch.setattr("gdncp.backends.torch_shield._HAS_FLAG_PER_BACKEND", False)  # as before torch 2.9
    x = make_inputs(300, k_dim=64, v_dim=64, gates="weak")
    backend = InSurroundings(lambda: legacy_precision("medium"))
    assert_same(run(x, [300], 128), run(x, [300], 128, backend=backend))


class InSurroundings(TorchBackend):
    """Enters the surroundings at each call: what is around it (the tests' own tensors) stays outside."""

    def __init__(self, surrounding):
        super().__init__()
        self.surrounding = surrounding

    def precompute_t(self, *args):
        with self.surrounding():
            return super().precompute_t(*args)

    def precompute_mn(self, *args):
        with self.surrounding():
            return super().precompute_mn(*args)

    def cp_prefill(self, *args):
        with self.surrounding():
            return super().cp_prefill(*args)

    @property
    def fold(self):
        def fold(*args):
            with self.surrounding():
                return self._fold(*args)

        return fold


def test_flags_are_left_as_they_were():
    def flags():
        return [
            torch.get_float32_matmul_precision(),
            torch.backends.cuda.matmul.allow_tf32,
            getattr(torch.backends.cuda.matmul, "fp32_precision", None),
            getattr(torch.backends.mkldnn, "matmul", None) and torch.backends.mkldnn.matmul.fp32_precision,
            torch.is_autocast_enabled("cpu"),
            torch.is_grad_enabled(),
        ]

    for precision in ("highest", "medium", "high"):
        with legacy_precision(precision), torch.autocast("cpu", torch.bfloat16):
            before = flags()
            with pytest.raises(RuntimeError, match="inside"), ieee_fp32(torch.device("cpu")):
                raise RuntimeError("inside")
            assert flags() == before


@new_flags
def test_a_flag_that_follows_another_still_does():
    own, above = torch.backends.mkldnn.matmul, torch.backends.mkldnn
    with setting(own, "fp32_precision", "none"), setting(above, "fp32_precision", "bf16"):
        with ieee_fp32(torch.device("cpu")):
            assert own.fp32_precision == "ieee"
        assert own.fp32_precision == "bf16"
        above.fp32_precision = "ieee"
        assert own.fp32_precision == "ieee"


def test_inputs_that_need_gradients():
    x, state = sample()
    names = ("q", "k", "v", "gate", "beta")
    needing = dataclasses.replace(x, **{n: getattr(x, n).clone().requires_grad_() for n in names})
    result = run(needing, LENS, 128, state.clone())
    assert_same(run(x, LENS, 128, state), result)
    assert not (result.output.requires_grad or result.final_state.requires_grad)


# ---- what lies beside a sequence


def test_a_neighbour_full_of_nan_leaks_nowhere(forget_below):
    x, state = sample()
    clean = run(x, LENS, 128, state, forget_below=forget_below, every=64)
    for name in ("q", "k", "v", "gate", "beta"):
        getattr(x, name)[450:515] = torch.nan  # the second and third sequences, between unaligned ones
    state[1] = torch.nan
    dirty = run(x, LENS, 128, state, forget_below=forget_below, every=64)
    assert torch.equal(clean.output[:450], dirty.output[:450])
    assert torch.equal(clean.output[579:], dirty.output[579:])
    assert torch.equal(clean.final_state[4:], dirty.final_state[4:])
    assert dirty.output[450:514].isnan().all()


@pytest.mark.parametrize("never_looks", [False, True])
def test_rows_that_no_sequence_covers_are_neither_read_nor_written(never_looks):
    x = make_inputs(300, gates="weak")
    backend = TorchBackend(never_looks)
    whole = run(take(x, [(0, 230)]), [100, 130], 64)
    for name in ("q", "k", "v", "gate", "beta"):
        getattr(x, name)[230:] = torch.nan
    result = run_from_device(x, torch.tensor([0, 100, 230]), 64, backend=backend, fill=7.0)
    assert torch.equal(result.output[:230], whole.output)
    assert (result.output[230:] == 7.0).all()


@pytest.mark.parametrize("never_looks", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 10])
def test_a_batch_of_empty_sequences(never_looks, num_tokens):
    x = make_inputs(num_tokens)
    state = make_state(3, x)
    backend = TorchBackend(never_looks)
    result = run_from_device(x, torch.zeros(4, dtype=torch.int64), 64, state, backend=backend, fill=7.0, every=64)
    assert torch.equal(result.final_state, state)
    assert (result.output == 7.0).all()
    if num_tokens == 0:
        assert torch.equal(run(x, [0, 0, 0], 64, state, backend=backend).final_state, state)


@pytest.mark.parametrize("offsets", [[0, 12, 8, 16], [5, 12, 40], [-3, 20, 400]])
def test_offsets_that_lie_stay_inside_the_buffers(offsets):
    x = make_inputs(150)
    result = run_from_device(x, torch.tensor(offsets), 64, backend=TorchBackend(True), fill=7.0)
    assert result.final_state.isfinite().all() and result.output.isfinite().all()


def test_reasons_for_refusing():
    cpu, backend = torch.device("cpu"), TorchBackend()
    ask = dict(device=cpu, dtype=torch.float16, k_dim=96, v_dim=33, precision="fast")
    assert backend.rejection_reason(**ask) is None
    assert "float64" in backend.rejection_reason(**{**ask, "dtype": torch.float64})
    assert "float64" in backend.rejection_reason(**{**ask, "device": torch.device("mps")})
    assert "meta" in backend.rejection_reason(**{**ask, "device": torch.device("meta")})
    assert "head dims" in backend.rejection_reason(**{**ask, "k_dim": 0})
