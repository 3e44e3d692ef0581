"""The command as a person runs it: in this process for one rank, and under torchrun for two."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import gdncp
from gdncp.cli import control, run
from gdncp.cli.ranks import Ranks

REPOSITORY = Path(__file__).parents[2]
SMALL = ["input.seq_lens=[200,0,70]", "input.head_dim=32", "input.num_v_heads=4", "check=true", "warmup=0"]
SMALL += ["_cp_chunk_len=64", "checkpoint_every_n_tokens=64"]


def run_here(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["prefill", *arguments])
    return control.run(Ranks())


def test_one_rank_end_to_end(monkeypatch, tmp_path, capsys):
    run_dir = tmp_path / "run"
    arguments = [*SMALL, "verify=true", "input.initial_state=true", f"run_dir={run_dir}"]
    assert run_here(monkeypatch, *arguments) == 0
    files = {str(path.relative_to(run_dir)) for path in run_dir.rglob("*") if path.is_file()}
    assert files == {
        "config.yaml",
        "report.json",
        "output/rank0.safetensors",
        "final_state.safetensors",
        "state_checkpoints.safetensors",
    }
    report = json.loads((run_dir / "report.json").read_text())
    assert report["ok"] and report["error"]["ok"] and report["error"]["output"]["relative"] > 0
    assert set(report["stages"]) >= {"precompute_t", "precompute_mn", "state_fixup", "cp_prefill", "total"}
    assert report["plan"]["num_cp_chunks"] == 4 + 1 + 2 and report["versions"]["torch"] == torch.__version__
    stages = report["stages"]
    parts = [sum(stages[name]["predicted_seconds"]) for name in stages if name != "total"]
    assert stages["total"]["predicted_seconds"] == pytest.approx([sum(parts)])
    for stage in stages.values():
        (measured,), (predicted,) = stage["measured_seconds"], stage["predicted_seconds"]
        assert stage["slowest_measured_over_predicted"] == pytest.approx(measured / predicted)
    assert report["backend"] == "torch"
    assert load_file(run_dir / "state_checkpoints.safetensors")["state_checkpoints"].shape == (4, 4, 32, 32)
    shown = capsys.readouterr().out
    assert "kernels: torch" in shown.replace("\n", " ") and "measured / predicted" in shown and "by cpu" in shown
    assert "within tolerance" in shown and str(run_dir) in shown.replace("\n", "")
    assert run_here(monkeypatch, *arguments) == 1, "results of two runs must not mix"
    assert "already holds a run" in capsys.readouterr().out


def test_results_beyond_tolerance_fail(monkeypatch, tmp_path, capsys):
    prefill = gdncp.api.prefill

    def wrong(*args, **kwargs):
        result = prefill(*args, **kwargs)
        result.final_state[2, 1] *= 1.01
        return result

    monkeypatch.setattr(gdncp.api, "prefill", wrong)
    assert run_here(monkeypatch, *SMALL, "verify=true", f"run_dir={tmp_path / 'run'}") == 1
    error = json.loads((tmp_path / "run" / "report.json").read_text())["error"]
    assert not error["ok"] and (error["final_state"]["row"], error["final_state"]["head"]) == (2, 1)
    assert error["output"]["ratio"] <= 1 and "BEYOND TOLERANCE" in capsys.readouterr().out


@pytest.mark.parametrize("own_scale", [False, True], ids=["expected", "oracle"])
def test_a_file_is_held_against_its_expected_values(monkeypatch, tmp_path, own_scale):
    """Wrong expectations fail a run of the file's own call, and are left aside where the call is another one."""
    x = gdncp.cli.inputs.Synthetic(gdncp.cli.inputs.Shape((100,), 1, 1, 1, 16, torch.float32)).tokens(
        [(0, 100)], "linear"
    )
    expected = {"expected_output": torch.ones(100, 1, 16), "expected_final_state": torch.ones(1, 1, 16, 16)}
    save_file({**x, **expected}, tmp_path / "x.safetensors", {"case": json.dumps({"seq_lens": [100]})})
    arguments = ["input=tensors", f"input.path={tmp_path / 'x.safetensors'}", "verify=true", "warmup=0"]
    arguments += ["scale=2.0"] if own_scale else []
    code = run_here(monkeypatch, *arguments, f"run_dir={tmp_path / 'run'}")
    against = json.loads((tmp_path / "run" / "report.json").read_text())["error"]["against"]
    assert (code, against) == ((0, "the float64 oracle") if own_scale else (1, "the file's expected values"))


def test_a_run_dir_that_cannot_be_made_fails_in_a_sentence(monkeypatch, tmp_path, capsys):
    (tmp_path / "file").touch()
    for flag in ([], ["--multirun"]):
        assert run_here(monkeypatch, *SMALL, *flag, f"run_dir={tmp_path / 'file' / 'run'}") == 1
        shown = capsys.readouterr()
        assert "failed: [Errno" in shown.out + shown.err and "Traceback" not in shown.out + shown.err


def test_a_sweep_leaves_an_earlier_one_alone(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(control, "run_point", lambda *_: {"ok": True})
    arguments = ["--multirun", *SMALL, f"run_dir={tmp_path}"]
    assert run_here(monkeypatch, *arguments) == 0
    before = (tmp_path / "sweep.json").read_text()
    assert run_here(monkeypatch, *arguments, "input.seed=1,2,3") == 1
    assert "already holds a sweep" in capsys.readouterr().err
    assert (tmp_path / "sweep.json").read_text() == before and not (tmp_path / "1" / "config.yaml").exists()


def test_the_demo_finds_its_data_from_anywhere(monkeypatch, tmp_path):
    """And runs as the README says; the run itself is left out."""
    seen = []
    monkeypatch.setattr(control, "run_point", lambda config, *_: seen.append(config) or {"ok": True})
    monkeypatch.chdir(tmp_path)
    assert run_here(monkeypatch, "--config", "demo", "run_dir=here") == 0
    prepared = run.prepare(seen[0], 4, torch.device("cpu"))
    assert seen[0]["verify"] and prepared.plan.num_tokens_total == 8892 and prepared.plan.reproducible
    assert all(len(prepared.plan.rank_plan(rank).items) >= 3 for rank in range(4)), "several CP chunks a rank"
    assert (tmp_path / "here" / "config.yaml").is_file()


@pytest.mark.parametrize("use_cp, num_cp_chunks", [("auto", 3), ("true", 4), ("false", 3)])
def test_use_cp_means_what_it_means_in_the_call(monkeypatch, tmp_path, use_cp, num_cp_chunks):
    """[200, 0, 70] is not worth splitting; sqrt(64 · 200) is 113, rounded up to 128."""
    seen = []
    monkeypatch.setattr(control, "run_point", lambda config, *_: seen.append(config) or {"ok": True})
    small = [argument for argument in SMALL if not argument.startswith("_cp_chunk_len")]
    assert run_here(monkeypatch, *small, f"use_cp={use_cp}", f"run_dir={tmp_path / 'run'}") == 0
    assert run.prepare(seen[0], 1, torch.device("cpu")).plan.num_cp_chunks == num_cp_chunks
    if use_cp == "false":
        with pytest.raises(ValueError, match="use_cp=false with 2 ranks"):
            run.prepare(seen[0], 2, torch.device("cpu"))
    with pytest.raises(ValueError, match="use_cp must be one of 'auto', True, False, got 0"):
        run.prepare(seen[0] | {"use_cp": 0}, 1, torch.device("cpu"))
    with pytest.raises(ValueError, match="repeat=0 must be at least 1"):
        run.prepare(seen[0] | {"repeat": 0}, 1, torch.device("cpu"))


@pytest.mark.parametrize("arguments, code", [(["--help"], 0), (["fix_up=chain"], 2), (["--no-such-flag"], 2)])
def test_exit_codes(monkeypatch, capsys, arguments, code):
    assert run_here(monkeypatch, *arguments) == code
    shown = capsys.readouterr()
    assert ("_cp_chunk_len" in shown.out) == (code == 0)
    assert ("the nearest valid one is fixup" in shown.err) == ("fix_up=chain" in arguments)


def torchrun(num_ranks, *arguments):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    return subprocess.run(
        [*command, "-m", "gdncp.prefill", *arguments],
        cwd=REPOSITORY,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_two_ranks_sweep_in_step_past_a_bad_point(tmp_path):
    sweep = tmp_path / "sweep"
    done = torchrun(
        2, *SMALL, "verify=true", "fixup=chain", f"run_dir={sweep}", "--multirun", "_cp_chunk_len=64,100,128"
    )
    assert done.returncode == 1, done.stdout + done.stderr
    points = json.loads((sweep / "sweep.json").read_text())["points"]
    assert [point["ok"] for point in points] == [True, True, False], "best first, failures last"
    assert points[0]["seconds"] <= points[1]["seconds"]
    assert "_cp_chunk_len=100" in points[2]["overrides"] and "got 100" in points[2]["error"]
    assert "Sweep, best first" in done.stdout and "got 100" in done.stdout
    for point in points[:2]:
        run_dir = Path(point["run_dir"])
        report = json.loads((run_dir / "report.json").read_text())
        assert report["plan"]["crosses_ranks"] and sum(report["sent"]["bytes_sent"]) > 0
        held = []
        for rank in (0, 1):
            with safe_open(run_dir / "output" / f"rank{rank}.safetensors", "pt") as file:
                ranges = json.loads(file.metadata()["token_ranges"])
                assert file.get_slice("output").get_shape()[0] == sum(stop - start for start, stop in ranges)
                held += [token for start, stop in ranges for token in range(start, stop)]
        assert sorted(held) == list(range(270))
    finals = [load_file(Path(point["run_dir"]) / "final_state.safetensors")["final_state"] for point in points[:2]]
    torch.testing.assert_close(*finals, rtol=1e-4, atol=1e-5)  # other CP chunks, other rounding
    assert not list(sweep.rglob("*.tmp"))


def test_help_ends_in_step_on_two_ranks():
    done = torchrun(2, "--help")
    assert done.returncode == 0 and done.stdout.count("--multirun key=a,b,c") == 1, done.stderr


def test_the_library_call_survives_an_import_of_the_command():
    import gdncp.prefill

    plan = gdncp.plan_prefill([3], num_q_heads=1, num_k_heads=1, num_v_heads=1, head_dim=16)
    q = torch.randn(3, 1, 16)
    assert gdncp.prefill(plan, q, q, q).output.shape == (3, 1, 16)
