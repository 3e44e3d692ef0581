"""Which of a kernel's compiled variants a launch takes, with a compiler and a device that are pretended."""

from types import SimpleNamespace

import pytest
import torch
import triton.language as tl
from triton.runtime.jit import JITFunction

from gdncp_kernels.hopper import launch


def _kernel(x, y, count, scale, BLOCK: tl.constexpr):
    pass


@pytest.fixture
def machine(monkeypatch):
    """`compiled`: arguments and options of what was compiled; `launched`: variant, grid and arguments of the rest."""
    machine = SimpleNamespace(device=0, compiled=[], launched=[], finishes=True)

    class Variant:
        def __init__(self, number):
            self.number, self.asm = number, {}

        def __getitem__(self, grid):
            return lambda *arguments: machine.launched.append((self.number, grid, arguments))

    def first_launch(kernel, grid):
        def run(*arguments, **options):
            machine.compiled.append((grid, arguments, options))
            return Variant(len(machine.compiled) - 1) if machine.finishes else None

        return run

    monkeypatch.setattr(JITFunction, "__getitem__", first_launch)
    active = SimpleNamespace(get_current_device=lambda: machine.device)
    monkeypatch.setattr(launch, "driver", SimpleNamespace(active=active))
    return machine


def test_a_variant_is_compiled_once_for_what_calls_differ_in(machine):
    run = launch.Launcher(JITFunction(_kernel), num_warps=4)
    x = torch.zeros(64)
    calls = [(x, None, 3, 1.0, 16), (x[1:], None, 3, 1.0, 16), (x, x, 3, 1.0, 16), (x, None, 3, 1.0, 32)]
    calls += [(x, None, 3, None, 16)]
    for call in calls:
        run(7, *call)
    assert machine.compiled == [((7,), call, {"num_warps": 4}) for call in calls] and not machine.launched
    again = [(x[4:], None, 5, 2.0, 16), *calls[1:]]  # aligned as x is, other numbers
    for call in again:
        run(9, *call)
    assert machine.launched == [(i, (9, 1, 1), call) for i, call in enumerate(again)]
    machine.device = 1
    run(7, *calls[0])
    assert len(machine.compiled) == len(calls) + 1


def test_what_is_not_compiled_yet_is_not_kept(machine):
    run, x = launch.Launcher(JITFunction(_kernel)), torch.zeros(16)
    machine.finishes = False
    run(1, x, x, 1, 1.0, 16)
    machine.finishes = True
    run(1, x, x, 1, 1.0, 16)
    assert len(machine.compiled) == 2 and not machine.launched
