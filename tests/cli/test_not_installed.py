"""Commands where what they need beside the library is not installed."""

import os
import subprocess
import sys

import pytest

COMMANDS = {
    "gdncp.bench": ("cli", "rich is"),
    "gdncp.calibrate": ("cli", "rich is"),
    "gdncp.plan": ("cli", "rich is"),
    "gdncp.prefill": ("cli", "hydra and rich are"),
    "gdncp.simulate": ("cli", "rich is"),
    "gdncp.tune": ("triton", "triton is"),
    "gdncp_kernels.compile_report": ("triton", "triton is"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_says_so_in_one_line(command):
    missing = "sys.modules.update(dict.fromkeys(['hydra', 'rich', 'triton']))"
    code = f"import runpy, sys; {missing}; runpy.run_module({command!r}, run_name='__main__')"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([".", "kernels"])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    extra, what = COMMANDS[command]
    assert done.returncode == 2
    assert done.stderr == f"python -m {command}: error: {what} not installed.  pip install 'gdncp[{extra}]'\n"
