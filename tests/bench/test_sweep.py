"""`bench/sweep_cp_chunk_len.py` on a CPU: what it times, and what it says of the planner's choice."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from gdncp.bench.cases import Case, Shape
from gdncp.plan.layout import Grid

_FILE = Path(__file__).parents[2] / "bench" / "sweep_cp_chunk_len.py"
_SPEC = importlib.util.spec_from_file_location("sweep_cp_chunk_len", _FILE)
sweep = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(sweep)

SMALL = ["--shapes", "640x2:1/2", "--gates", "one", "--head-dim", "32", "--device", "cpu", "--backend", "torch"]


def rows(capsys, *arguments):
    sweep.main([*SMALL, *arguments])
    said = capsys.readouterr()
    return [json.loads(line) for line in said.out.splitlines()], said.err


def test_a_line_per_grid_with_times_beside_predictions(capsys):
    found, verdict = rows(capsys, "--grids", "auto", "256", "192+128", "640", "--stages")
    # "auto" leaves sequences whole on one core
    lengths = [(row["cp_chunks"], row["first"], row["cp_chunk_len"], row["last"]) for row in found]
    assert lengths == [(1, 640, 640, 640), (3, 256, 256, 128), (5, 192, 128, 64)]
    assert all(row["shape"] == "640x2:1/2" and row["gates"] == "one" for row in found)
    assert found[0]["error"] == 0 and all(0 < row["error"] < sweep.TOLERANCE for row in found[1:])
    for row in found:
        assert row["ms"] > 0 and row["predicted_ms"] == pytest.approx(sum(row["predicted_stages_ms"].values()))
        assert row["stages_ms"].keys() == row["predicted_stages_ms"].keys()
    assert "chosen 640+640" in verdict and "behind" in verdict


def test_wrong_results_get_no_time(capsys, monkeypatch):
    monkeypatch.setattr(sweep, "TOLERANCE", 0.0)
    found, _ = rows(capsys, "--grids", "128")
    assert found[0]["error"] > 0 and found[0]["ms"] is None


def test_the_grids_near_the_best_have_equal_and_unequal_first_cp_chunks():
    case = Case(Shape(32768, 1, 16, 32), "one", torch.bfloat16, torch.device("cuda"))  # nothing is allocated
    grids = sweep.grids_near_the_best(case, 1.25)
    assert Grid(6592, 6592) in grids and len(set(grids)) == len(grids) > 5
    assert any(g.first < g.length for g in grids) and any(g.first > g.length for g in grids)
    times = [sum(sweep.predicted_ms(case, grid).values()) for grid in grids]
    assert times == sorted(times)
    assert times[-1] <= 1.25 * min(t for t, g in zip(times, grids, strict=True) if g.first == g.length)


def test_a_grid_that_cannot_be_read(capsys):
    with pytest.raises(SystemExit, match=r"--grids must be auto, CP_CHUNK_LEN or FIRST\+CP_CHUNK_LEN, got 'x'"):
        rows(capsys, "--grids", "x")
