"""The Triton backend says why it cannot run, imports without triton, and its kernels compile for GPUs not here."""

import json
import os
import subprocess
import sys

import pytest
import torch

from gdncp.backends import hopper_backend, triton_backend, triton_version
from gdncp.backends.triton_backend import TritonBackend
from tests.conftest import DEVICE

CALL = {"device": torch.device(DEVICE), "dtype": torch.bfloat16, "k_dim": 128, "v_dim": 128, "precision": "fast"}
SHARED_BYTES = 99 * 1024  # of sm_86, sm_89 and sm_120, the least of all from sm_80
SPILL_BYTES = 2048  # a thread; hundreds of bytes with today's Triton, more with 3.4
COMPILE = """
import json
import sys
from gdncp_kernels.compile_report import compile_all
arch, dim, dtype, bare = json.loads(sys.argv[1])
print(json.dumps([list(c) for c in compile_all(arch, dim, dim, dtype, bare=bare)]))
"""


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


@pytest.mark.parametrize("arch, dim, dtype, bare", [(80, 64, "fp16", True), (90, 128, "bf16", False)])
def test_kernels_compile_for(arch, dim, dtype, bare):
    command = [sys.executable, "-c", COMPILE, json.dumps([arch, dim, dtype, bare])]
    out = subprocess.run(command, check=True, env=_environment(), capture_output=True, text=True).stdout
    kernels = json.loads(out.splitlines()[-1])
    assert len(kernels) == 6
    for name, registers, spilled, shared in kernels:
        assert shared <= SHARED_BYTES, f"{name} needs {shared} bytes of shared memory"
        assert spilled <= SPILL_BYTES, f"{name} spills {spilled} bytes ({registers} registers)"


def _environment():
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return {**environment, "PYTHONPATH": os.pathsep.join([".", "kernels"])}
