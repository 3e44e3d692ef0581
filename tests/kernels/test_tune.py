"""The tuner: its candidates, what it leaves out, what it takes, and the table it writes."""

from types import SimpleNamespace

import pytest
import torch
from triton import knobs
from triton.runtime.interpreter import GridExecutor

from gdncp import tune
from gdncp_kernels import launch_table
from gdncp_kernels.launch_table import KERNELS, SCANS, Row
from tests.conftest import DEVICE, HAS_CUDA

TABLE = launch_table.read_table(launch_table.FOLDER / "sm_80.json")
SCAN = tune.Problem("scan", "ieee", 16, 32)


def test_dry_run_lists_candidates_of_every_kernel_without_a_gpu(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert tune.main(["--dry-run", "--dims", "128x64"]) == 0
    out = capsys.readouterr().out
    for kernel in KERNELS:
        assert f"{kernel} 128x" in out
    assert "4 warps, block 32, slice 64" in out and "cut 128x64 tf32: 3 candidates" in out


def test_a_sequence_that_cannot_be_cut_is_refused(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(SystemExit) as stopped:
        tune.main(["--out", "x.json", "--tokens", "64"])
    assert stopped.value.code == 2 and "--tokens must be more than 64" in capsys.readouterr().err


@pytest.mark.parametrize("arguments, said", [(["--out", "x.json"], "torch sees none"), ([], "--out FILE is needed")])
def test_without_a_gpu_or_a_file_it_says_so(arguments, said, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as stopped:
        tune.main(arguments)
    assert stopped.value.code == 2 and said in capsys.readouterr().err


def test_candidates_are_rows_that_a_table_can_hold(tmp_path):
    dims = [(16, 16), (64, 128), (256, 128), (128, 256)]
    for problem in tune.problems(dims, launch_table.PRECISIONS):
        rows = tune.candidates(problem)
        assert len(set(rows)) == len(rows), problem
        assert len(rows) > 1 or problem.kernel in (*SCANS, "fold"), problem  # small dims leave those one block
        path = tmp_path / "table.json"
        path.write_text(TABLE.preferring(tuple(rows)).to_json())
        assert launch_table.read_table(path).rows[: len(rows)] == tuple(rows)
        for row in rows:
            assert row.matches(problem.kernel, problem.k_dim, problem.v_dim, problem.precision)
            assert problem.k_dim % (row.block or 1) == 0 and problem.v_dim % (row.block or 1) == 0
            # Triton 3.6 gave wrong products with eight warps where wgmma may be used
            assert problem.kernel not in SCANS or problem.precision == "ieee" or row.num_warps == 4


def test_the_row_of_today_is_the_table_s():
    row = tune.current(TABLE, SCAN)
    assert TABLE.preferring((row,)).choice("scan", 16, 32, "ieee") == TABLE.choice("scan", 16, 32, "ieee")


class FakeBench:
    def __init__(self, times, wrong=()):
        self._times, self._wrong = times, wrong

    def wrong(self, row):
        return "error 1.0" if row.num_warps in self._wrong else None

    def times(self, kernel, rows):
        return [self._times[row.num_warps] for row in rows]


@pytest.mark.parametrize(
    "times, wrong, taken",
    [
        ({4: 1.0, 2: 0.5, 8: 0.7}, (), 2),  # the fastest
        ({4: 1.0, 2: 0.5, 8: 0.7}, (2,), 8),  # of those that are right
        ({4: 1.0, 2: 0.99, 8: 1.2}, (), 4),  # a gain that may be noise changes nothing
        ({4: 1.0, 2: 0.99, 8: 1.2}, (4,), 2),  # unless today's choice is wrong
        ({4: 1.0, 2: 0.5, 8: 0.7}, (2, 4, 8), None),
    ],
)
def test_the_fastest_right_row_is_taken(times, wrong, taken):
    problem = tune.Problem("precompute_t", "tf32", 64, 64)
    rows = [problem.row(4), problem.row(2), problem.row(8)]
    said = []
    best = tune.best_of(FakeBench(times, wrong), problem, rows, said.append)
    assert (best and best.num_warps) == taken
    assert len(said) == 3 and sum("left out: error" in line for line in said) == len(wrong)


def test_the_table_that_is_written(tmp_path, monkeypatch):
    """On a GPU that is made up: what was measured comes first, the rest is the table in use."""
    pairs = {"get_device_name": lambda: "a GPU", "is_available": lambda: True, "empty_cache": lambda: None}
    for name, value in pairs.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(launch_table, "current_arch", lambda: 89)
    monkeypatch.setattr(tune, "ProcessPoolExecutor", _InThisProcess)
    monkeypatch.setattr(tune, "refused", lambda arch, row: "spills" if row.num_warps == 1 else None)
    monkeypatch.setattr(tune, "Bench", lambda *_: FakeBench({1: 0.1, 2: 0.5, 4: 1.0, 8: 2.0}))
    path = tmp_path / "mine.json"
    command = ["--out", str(path), "--dims", "64x64", "--precisions", "tf32", "--kernels", "precompute_t", "cut"]
    assert tune.main(command) == 0
    table = launch_table.read_table(path)
    assert table.arch == 89 and "a GPU" in table.made_by
    measured = (Row("precompute_t", 2, precision="tf32", k_dim=64, v_dim=64),)
    assert table.rows == (*measured, Row("cut", 2, precision="tf32", k_dim=64, v_dim=64), *TABLE.rows)


class _InThisProcess:
    def __init__(self, *_, **__):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def map(self, function, values):
        return list(map(function, values))


class MadeUpGpu:
    """A clock, and events that say what had been launched when they were recorded."""

    host_matters, ms = True, 0.0

    def hold(self, ms):
        self.ms += ms

    def synchronize(self):
        pass

    def launch(self, name, ms):
        metadata = SimpleNamespace(get=lambda: {"name": name})
        knobs.runtime.launch_enter_hook(metadata)
        self.ms += ms
        knobs.runtime.launch_exit_hook(metadata)

    def event(self, **_):
        event = SimpleNamespace(at=None)
        event.record = lambda: setattr(event, "at", self.ms)
        event.elapsed_time = lambda other: other.at - event.at
        return event


def test_a_kernel_is_timed_by_itself(monkeypatch):
    gpu = MadeUpGpu()
    monkeypatch.setattr(torch.cuda, "Event", gpu.event)
    launches = [("chunk_bounds_kernel", 1.0), ("cut_kernel", 0.25), ("scan_kernel", 8.0), ("cut_kernel", 0.5)]
    for kernel, ms in (("cut_kernel", 0.75), ("scan_kernel", 8.0)):
        assert tune.kernel_ms(kernel, lambda: [gpu.launch(*x) for x in launches], gpu) == ms
    with pytest.raises(RuntimeError, match="fold_kernel was not launched"):
        tune.kernel_ms("fold_kernel", lambda: gpu.launch("cut_kernel", 1.0), gpu)
    with pytest.raises(ZeroDivisionError):
        tune.kernel_ms("cut_kernel", lambda: 1 / 0, gpu)
    assert not knobs.runtime.launch_enter_hook.calls and not knobs.runtime.launch_exit_hook.calls


def test_every_kernel_is_launched_in_the_call_that_it_is_timed_in(monkeypatch):
    """Also those of stage 2, in a sequence that the planner leaves whole."""
    if not HAS_CUDA:  # launches of the interpreter tell nobody
        gpu = MadeUpGpu()
        monkeypatch.setattr(torch.cuda, "Event", gpu.event)
        monkeypatch.setattr(tune, "clock_of", lambda _: gpu)
        monkeypatch.setattr(GridExecutor, "__call__", lambda self, *_, **__: gpu.launch(self.fn.__name__, 1.0))
    bench = tune.Bench(TABLE, SCAN, 130, (1, 1), torch.device(DEVICE))
    for kernel in KERNELS:
        v_dim = 16 if kernel == "fold" else 32
        assert bench.times(kernel, [tune.current(TABLE, tune.Problem(kernel, "ieee", 16, v_dim))])[0] > 0, kernel


def test_rows_run_and_wrong_ones_are_seen(monkeypatch):
    """The real checks and times, on small inputs."""
    device = torch.device(DEVICE)
    if not HAS_CUDA:
        monkeypatch.setattr(tune, "REPEATS", 1)
        monkeypatch.setattr(tune, "SMALL", 300)
    bench = tune.Bench(TABLE, SCAN, 130, (1, 1), device)
    good = SCAN.row(8, 16, 16)
    assert bench.wrong(good) is None
    times = bench.times("scan", [good])
    assert len(times) == 1 and times[0] > 0
    bench._expected[1] *= 1 + 1e-3
    assert "error 1.0e-03, 2.0e-05 allowed" in bench.wrong(good)
    bench._expected[1][0, 0, 0, 0] = float("nan")
    assert "error nan" in bench.wrong(good)
    monkeypatch.setattr(tune, "results", lambda *_: 1 / 0)
    assert bench.wrong(good) == "ZeroDivisionError: division by zero"
