"""What installs, and what importing the library does not need."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_every_package_is_named():
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has no TOML reader; newer ones run this")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    named = set(project["tool"]["setuptools"]["packages"])
    folders = {"gdncp": ROOT / "gdncp", "gdncp_kernels": ROOT / "kernels" / "gdncp_kernels"}
    found = {"gdncp.conf"}
    for package, folder in folders.items():
        for path in [folder, *folder.rglob("*")]:
            if path.is_dir() and any(path.glob("*.py")):
                found.add(".".join([package, *path.relative_to(folder).parts]))
    assert named == found


def test_kernels_and_conf_are_containers():
    assert not (ROOT / "kernels" / "__init__.py").exists(), "`kernels` is Hugging Face's package"
    assert (ROOT / "conf" / "__init__.py").exists(), "pkg://gdncp.conf needs it"


def test_the_library_imports_and_runs_without_hydra_rich_or_triton():
    program = """
import sys
for name in ("hydra", "omegaconf", "rich", "triton", "transformers"):
    sys.modules[name] = None  # as if it were not installed
import torch, gdncp, gdncp.compat, gdncp.store
x = torch.randn(70, 2, 16)
gdncp.chunk_gated_delta_rule(x, x, x, _cp_chunk_len=64)
try:
    gdncp.chunk_gated_delta_rule(x, x, x, backend="triton")
except ValueError as error:
    assert "triton" in str(error), error
else:
    raise AssertionError("a named backend that cannot run must raise")
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT, timeout=120)


def test_the_module_that_torchrun_runs_is_also_the_call():
    program = """
import gdncp
import gdncp.prefill
plan = gdncp.plan_prefill([1], num_q_heads=1, num_k_heads=1, num_v_heads=1, head_dim=16)
import torch
x = torch.randn(1, 1, 16)
assert gdncp.prefill(plan, x, x, x).output.shape == (1, 1, 16)
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT, timeout=120)
