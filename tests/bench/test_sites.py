"""bench/site.sh, which both unattended scripts source: where Python finds us and the peers."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(script, *arguments, **changes):
    command = ["bash", str(ROOT / "bench" / script), *map(str, arguments)]
    return subprocess.run(command, env={**os.environ, **changes}, capture_output=True, text=True, timeout=60)


def test_folders_of_peers_come_after_ours_in_the_order_given(tmp_path):
    python = tmp_path / "python"
    python.write_text('#!/usr/bin/env bash\necho "$PYTHONPATH"\n')
    python.chmod(0o755)
    nested = tmp_path / "one" / "nvidia_cutlass_dsl" / "dsl_packages"
    nested.mkdir(parents=True)
    (tmp_path / "two").mkdir()
    done = run("h200.sh", tmp_path / "out", tmp_path / "one", tmp_path / "two", PYTHON=str(python), PYTHONPATH="mine")
    assert done.returncode == 0, done.stderr
    expected = [ROOT, ROOT / "kernels", tmp_path / "one", nested, tmp_path / "two", "mine"]
    assert done.stdout.strip().split(":") == [str(path) for path in expected]


@pytest.mark.parametrize("script", ["h200.sh", "multi_gpu.sh"])
def test_a_folder_that_is_not_there_is_an_error(script, tmp_path):
    done = run(script, tmp_path / "out", tmp_path / "none")
    assert done.returncode == 2 and done.stderr == f"error: no folder {tmp_path / 'none'}\n"
