"""The Triton backend says why it cannot run, and imports without triton."""

import os
import subprocess
import sys

import torch

from gdncp.backends import hopper_backend, triton_backend, triton_version
from gdncp.backends.triton_backend import TritonBackend
from tests.conftest import DEVICE

CALL = {"device": torch.device(DEVICE), "dtype": torch.bfloat16, "k_dim": 128, "v_dim": 128, "precision": "fast"}


def reason(**changes):
    return TritonBackend().rejection_reason(**{**CALL, **changes})


def test_runs_here():
    assert reason() is None
    assert all(reason(k_dim=k, v_dim=v, dtype=torch.float32) is None for k, v in ((16, 256), (32, 64)))


def test_rejects_head_dims_and_dtypes():
    assert "K is 48" in reason(k_dim=48) and "V is 512" in reason(v_dim=512)
    assert "float64" in reason(dtype=torch.float64)


def test_rejects_an_old_or_missing_triton(monkeypatch):
    uncached = triton_version.triton_rejection_reason.__wrapped__  # read once a process
    monkeypatch.setattr(triton_backend, "triton_rejection_reason", uncached)
    monkeypatch.setattr(hopper_backend, "triton_rejection_reason", uncached)
    monkeypatch.setattr(triton_version, "version", lambda _: "3.3.1")
    assert "3.3.1" in reason() and "3.4" in reason()
    assert "gluon is needed" in hopper_backend.HopperBackend().rejection_reason(**CALL)
    monkeypatch.setattr(triton_version.importlib.util, "find_spec", lambda _: None)
    assert "not installed" in reason()


def test_rejects_devices(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert "TRITON_INTERPRET=1" in reason(device=torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    assert "7.5" in reason(device=torch.device("cuda:0"))


def test_module_imports_without_triton():
    code = "import sys; sys.modules['triton'] = None; import gdncp.backends.triton_backend as b; b.TritonBackend()"
    subprocess.run([sys.executable, "-c", code], check=True, env=_environment())


def _environment():
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return {**environment, "PYTHONPATH": os.pathsep.join([".", "kernels"])}
