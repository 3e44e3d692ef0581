"""Commands that cannot do without Triton, where it is not installed."""

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize("command", ["gdncp.tune", "gdncp_kernels.compile_report"])
def test_a_command_says_so_in_one_line(command):
    code = f"import runpy, sys; sys.modules['triton'] = None; runpy.run_module({command!r}, run_name='__main__')"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([".", "kernels"])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == f"python -m {command}: error: triton is not installed.  pip install 'gdncp[triton]'\n"
