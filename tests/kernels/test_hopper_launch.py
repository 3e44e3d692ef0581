"""Which of a kernel's compiled variants a launch takes and with what, a compiler and a driver being pretended."""

import inspect
from types import SimpleNamespace

import torch
import triton.language as tl
from triton.runtime.jit import JITFunction

from gdncp.backends.base import FoldRuns, maps_layout
from gdncp_kernels.hopper import launch, state_fixup, tensor_maps
from gdncp_kernels.hopper.launch import Launcher, Launches, Number, Pointer


def _kernel(x, y, count, scale, BLOCK: tl.constexpr):
    pass


def _mapped(k_map, x, growth, scale, L2NORM: tl.constexpr):
    pass


def launched(machine):
    """Variant, grid, stream and the kernel's arguments of each launch."""
    behind = 14 - 1 if machine.triton == "3.6" else 15
    return [(number, all_[:3], all_[3], all_[behind:]) for number, all_ in machine.launched]


def test_a_variant_is_compiled_once_for_what_calls_differ_in(machine):
    run = Launcher(JITFunction(_kernel), num_warps=4)
    x = torch.zeros(64)
    calls = [(x, None, 3, 1.0, 16), (x[1:], None, 3, 1.0, 16), (x, x, 3, 1.0, 16), (x, None, 3, 1.0, 32)]
    calls += [(x, None, 3, None, 16)]
    again = [(x[4:], None, 5, 2.0, 16), *calls[1:]]  # aligned as x is, other numbers
    for call in [*calls, *again]:
        run(7, *call)
    assert machine.compiled == [(call, {"num_warps": 4}) for call in calls]
    addresses = [tuple(a.data_ptr() if isinstance(a, torch.Tensor) else a for a in call) for call in [*calls, *again]]
    assert launched(machine) == [(i % 5, (7, 1, 1), 100, call) for i, call in enumerate(addresses)]
    machine.device += 1
    run(7, *calls[0])
    assert len(machine.compiled) == len(calls) + 1 and launched(machine)[-1][2] == 101


def test_a_number_of_more_than_32_bits_takes_a_variant_of_its_own(machine):
    run = Launcher(JITFunction(_kernel), num_warps=4)
    x = torch.zeros(64)
    for count in (3, 1 << 31, 5, (1 << 31) + 1):
        run(7, x, None, count, 1.0, 16)
    assert [number for number, *_ in launched(machine)] == [0, 1, 0, 1]


def test_a_compilation_that_still_runs_is_waited_for(machine):
    machine.late = True
    Launcher(JITFunction(_kernel))(1, torch.zeros(16), None, 1, 1.0, 16)
    assert len(launched(machine)) == 1


def prepared(kernel=_mapped):
    k = torch.zeros(96, 2, 128, dtype=torch.bfloat16)
    arguments = {
        "growth": Pointer("tiles", torch.float32, 512),
        "x": Pointer("x", torch.float32),
        "L2NORM": True,
        "k_map": tensor_maps.tokens("k", k),
        "scale": Number("scale", 1.0),
    }
    return Launches(("scale", "k", "x", "tiles"), Launcher(JITFunction(kernel), num_warps=1).prepare(5, arguments))


def test_what_changes_goes_where_it_belongs(machine):
    run = prepared()
    run(0.5, 4096, 32, 1024)
    run(0.25, 8192, 64, 2048)
    run(0.5, 4096, 32, 1024)
    shape = (96, 256, 256, 1)
    expected = [("map 0", *shape, 32, 1536, 0.5, True), ("map 1", *shape, 64, 2560, 0.25, True)]
    assert launched(machine) == [(0, (5, 1, 1), 100, values) for values in (*expected, expected[0])]
    assert machine.encoded == [(a, 3, 2, 9, (64, 64), (96, 256), (256, 1), 0) for a in (4096, 8192)]  # each once


def test_the_stream_is_the_current_one_of_each_launch(machine):
    run, values = prepared(), (0.5, 4096, 32, 1024)
    for stream in (100, 200, 100, 300):
        machine.stream = stream - machine.device
        run(*values)
    assert [stream for _, _, stream, _ in launched(machine)] == [100, 200, 100, 300]


def test_what_is_kept_of_earlier_launches_is_bounded_and_theirs(machine, monkeypatch):
    monkeypatch.setattr(launch, "_MOST_FILLED", 3)
    run, base = prepared(), (0.5, 4096, 32, 1024)
    calls = [base, (0.25, *base[1:]), (0.5, 8192, 32, 1024), (0.5, 4096, 64, 1024), (0.5, 4096, 32, 2048), base]
    for call in calls:
        run(*call)
        assert run._filled.cache_info().currsize <= 3
    maps = {4096: "map 0", 8192: "map 1"}
    expected = [(maps[k], 96, 256, 256, 1, x, tiles + 512, scale, True) for scale, k, x, tiles in calls]
    assert [values for *_, values in launched(machine)] == expected


def test_a_pointer_off_the_grid_takes_a_variant_of_its_own(machine):
    run = prepared()
    run(0.5, 4096, 32, 1024)
    run(0.5, 4096, 36, 1024)
    run(0.5, 4096, 40, 1024)
    run(0.5, 4096, 36, 1028)
    assert [number for number, *_ in launched(machine)] == [0, 1, 1, 2]
    aligned = [
        [x.data_ptr() % 16 == 0 for x in arguments if isinstance(x, Pointer)] for arguments, _ in machine.compiled
    ]
    assert aligned == [[True, True], [False, True], [False, False]]


def test_a_profiler_sees_each_launch(machine, monkeypatch):
    seen = SimpleNamespace(calls=["a hook"])
    run = prepared()
    monkeypatch.setattr(
        launch,
        "knobs",
        SimpleNamespace(runtime=SimpleNamespace(launch_enter_hook=seen, launch_exit_hook=SimpleNamespace(calls=[]))),
    )
    run(0.5, 4096, 32, 1024)
    ((_, arguments),) = machine.launched
    assert ("metadata", (5, 1, 1), 100) in arguments and seen in arguments


def test_triton_still_has_the_launcher_behind_the_one_that_encodes():
    source = inspect.getsource(launch.nvidia)
    assert "def wrap_handle_tensordesc(launcher, " in source and hasattr(launch.nvidia, "TMA_DTYPE_DEVICE_TO_HOST")


def test_a_rank_without_maps_of_its_own_has_a_fold_too(monkeypatch):
    """States pass through it by mail; a map of no rows cannot be encoded."""
    given = []
    monkeypatch.setattr(Launcher, "prepare", lambda self, count, arguments: given.append((count, arguments)))
    column = torch.zeros(1, dtype=torch.int64)
    for num_maps in (0, 3):
        runs = FoldRuns(1, column, column, column, column, num_fills=column, source=column, source_message=column)
        state_fixup.prepare_runs(maps_layout(num_maps, 2, 128, 128), runs, peers=Pointer("peers", torch.int64))
    (without, with_maps) = (arguments["transition_map"] for _, arguments in given)
    assert (without.name, without.like.shape[0]) == ("entry_states", 2 * 128)  # of one state
    assert (with_maps.name, with_maps.like.shape[0]) == ("maps", 3 * 2 * 128)
    assert [count for count, _ in given] == [2 * 16, 2 * 16]
