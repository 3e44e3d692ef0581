"""Which kernel set runs a call."""

import pytest
import torch

from gdncp.backends import select_backend
from gdncp.backends.hopper_backend import MIN_TRITON
from gdncp.backends.triton_version import triton_rejection_reason

GLUON = triton_rejection_reason(MIN_TRITON, "triton.experimental.gluon")
CALL = {"device": torch.device("cuda"), "dtype": torch.bfloat16, "k_dim": 128, "v_dim": 128, "precision": "fast"}


@pytest.fixture
def gpu(monkeypatch):
    """A GPU of a compute capability that the test sets, whether or not there is one."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    return lambda *capability: monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)


def selected(name="auto", **changes):
    return select_backend(name, **{**CALL, **changes}).name


@pytest.mark.skipif(GLUON is not None, reason=f"hopper: {GLUON}")
def test_auto_takes_hopper_where_it_can_and_the_next_where_not(gpu):
    gpu(9, 0)
    assert selected() == selected(dtype=torch.float16) == selected(k_dim=64, v_dim=64) == "hopper"
    for change in ({"dtype": torch.float32}, {"k_dim": 256, "v_dim": 256}, {"v_dim": 64}, {"precision": "high"}):
        assert selected(**change) == "triton", change
    assert selected(k_dim=48) == "torch"


@pytest.mark.parametrize("capability, name", [((7, 5), "torch"), ((8, 0), "triton"), ((10, 0), "triton")])
def test_auto_on_other_gpus(gpu, capability, name):
    gpu(*capability)
    assert selected() == name


def test_auto_on_a_cpu_is_torch_also_where_the_interpreter_would_run(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert selected(device=torch.device("cpu")) == "torch"


def test_a_named_set_runs_or_says_why_not(gpu):
    gpu(8, 0)
    assert selected("triton") == "triton" and selected("torch") == "torch"
    with pytest.raises(ValueError, match=r"backend 'hopper' cannot run this call \(hopper: "):
        selected("hopper")
    with pytest.raises(ValueError, match=r"hopper: .*; triton: inputs are torch.float64.*; torch: .*float64"):
        selected(dtype=torch.float64)
