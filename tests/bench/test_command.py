"""The command and the page, end to end on the CPU."""

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from gdncp.bench import report, tables
from gdncp.bench.__main__ import main
from gdncp.bench.run import Row

ROOT = Path(__file__).parents[2]
SMALL = ["--device", "cpu", "--rounds", "1", "--shapes", "130x2:1/2", "--head-dim", "32"]


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """(exit code, folder) of a run in a process of its own."""
    out = tmp_path_factory.mktemp("bench")
    command = [sys.executable, "-m", "gdncp.bench", "--preset", "quick", *SMALL, "--commit", "abc", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "CPU time, ms" in done.stdout and "130 x 2, 1/2" in done.stdout
    return out


def test_a_run_on_the_cpu_writes_rows_and_tables(result):
    found = json.loads((result / "bench.json").read_text())
    assert found["environment"]["commit"] == "abc" and found["reference_error"] < 1e-11
    assert found["ceilings"]["flops"] > 0 and found["ceilings"]["bytes"] > 0
    assert set(found["absent"]) >= {"triton", "fla", "flashinfer:auto", "flashqla:gates"}
    assert [(row["engine"], row["gates"]) for row in found["rows"]] == [("torch", "forget"), ("torch", "one")]
    for row in found["rows"]:
        assert row["status"] == "ok" and row["gpu_ms"] > 0 and 0 < row["output_error"] < 5e-3
        assert row["reference"] == "oracle" and row["detail"]["cp_chunk_len"] >= 64
    page = (result / "bench.md").read_text()
    assert "| 130 x 2, 1/2, D 32 | torch |" in page and "fla: not here, needs a CUDA device." in page


def test_wrong_results_of_ours_and_spent_budgets_show(tmp_path, capsys):
    assert main([*SMALL, "--gates", "one", "--tolerance", "1e-9", "--out", str(tmp_path)]) == 1
    assert "torch: error of" in capsys.readouterr().err
    assert json.loads((tmp_path / "bench.json").read_text())["rows"][0]["gpu_ms"] is None
    assert main([*SMALL, "--gates", "one", "--time-budget", "0", "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "bench.json").read_text())
    assert found["rows"] == [] and found["left_out"] == ["130x2:1/2 one"]


def test_stages_of_ours(tmp_path):
    assert main([*SMALL, "--gates", "one", "--stages", "--cp-chunk-len", "64", "--out", str(tmp_path)]) == 0
    (row,) = json.loads((tmp_path / "bench.json").read_text())["rows"]
    assert set(row["stages_ms"]) == {"precompute_t", "precompute_mn", "state_fixup", "cp_prefill"}
    assert row["detail"] == {"cp_chunk_len": 64}
    assert "time per stage" in (tmp_path / "bench.md").read_text()


@pytest.mark.parametrize(
    "arguments", [["--shapes", "64"], ["--engines", "fla"], ["--engines", "nobody"], ["--preset", "none"]]
)
def test_a_wrong_command_line_is_code_2(arguments):
    with pytest.raises(SystemExit) as ended:
        main(["--device", "cpu", *arguments])
    assert ended.value.code == 2


# ---- the page


def row(engine, ours, ms, error=2e-3, shape=(8192, 1, 16, 32), gates="forget", status="ok"):
    """A made-up row."""
    seq_len, num_seqs, num_k_heads, num_v_heads = shape
    timed = dict(events_ms=ms + 0.1, graph_ms=ms, gpu_ms=ms) if status == "ok" else {}
    made = Row(seq_len, num_seqs, num_k_heads, num_v_heads, 128, "bfloat16", gates, engine, ours, status)
    errors = dict(output_error=error, output_error_worst=error, state_error=error / 2, state_error_worst=error)
    return asdict(made) | timed | errors | dict(floor_ms=0.05, floor_share=0.05 / ms, host_us=50.0)


def made_up(*rows, **more):
    environment = dict(device="A GPU", started="today", driver="1", cuda="13.0", python="3", torch="2", triton="3")
    environment |= dict(sms=132, commit="abc", versions={"fla": "0.6"})
    ceilings = {"flops": 8e14, "bytes": 4e12}
    found = dict(schema=1, environment=environment, ceilings=ceilings, absent={}, left_out=[], rows=list(rows))
    return found | more


def test_the_page_compares_with_the_best_peer_and_says_what_has_no_time():
    found = made_up(
        row("hopper", True, 0.2),
        row("triton", True, 0.9),
        row("fla", False, 0.1, error=0.02, status="wrong"),
        row("flashinfer:cp", False, 0.5),
        row("flashinfer:auto", False, 0.4),
        left_out=["512x1:16/32 one"],
    )
    page = report.page({"h200": found}, notes="## What was tried\n\nNothing.")
    assert (
        "| 8192 x 1, 16/32 | 0.200 | hopper | 0.400 | flashinfer:auto | 2.00 | 25 % | 2.0e-03 | 2.0e-03 | 50 | - |"
        in page
    )
    assert "## What was tried" in page and "## Run h200" in page and "8e+02" not in page and "800 TFLOP/s" in page
    assert "fla on 8192 x 1, 16/32, forget: wrong" in page and "512x1:16/32 one: left out" in page


def test_of_two_runs_the_one_that_flatters_us_least_counts():
    first = made_up(row("hopper", True, 0.2), row("flashinfer:cp", False, 0.5))
    second = made_up(row("hopper", True, 0.22), row("fla", False, 0.3))
    alone = made_up(row("hopper", True, 0.1))
    for results in ({"a": first, "b": second, "c": alone}, {"c": alone, "b": second, "a": first}):
        page = report.page(results)
        assert "| 8192 x 1, 16/32 | 0.220 | hopper | 0.300 | fla | 1.36 |" in page
    assert "| 8192 x 1, 16/32 | 0.100 | hopper | - | - | - |" in report.page({"c": alone})


def test_a_page_from_files_and_its_check(tmp_path):
    arguments = ["--results", str(tmp_path), "--notes", str(tmp_path / "none.md"), "--out", str(tmp_path / "page.md")]
    assert report.main(arguments) == 1  # nothing to report
    (tmp_path / "x.json").write_text(json.dumps(made_up(row("hopper", True, 0.2))))
    assert report.main([*arguments, "--check"]) == 1
    assert report.main(arguments) == 0
    assert report.main([*arguments, "--check"]) == 0
    (tmp_path / "x.json").write_text(json.dumps(made_up(row("hopper", True, 0.3))))
    assert report.main([*arguments, "--check"]) == 1
    (tmp_path / "x.json").write_text(json.dumps(made_up(schema=99)))
    assert report.main(arguments) == 1


def test_the_committed_page_is_what_the_committed_results_say():
    results = list((ROOT / "bench" / "results").glob("*.json"))
    page = ROOT / "docs" / "performance.md"
    assert page.exists() == bool(results), "docs/performance.md comes from bench/results and from nothing else"
    if results:
        assert report.main(["--check"]) == 0, "run `python -m gdncp.bench.report`"


def test_small_and_large_times_keep_three_digits():
    assert [tables.ms(x) for x in (None, 0.01234, 0.2345, 12.345, 123.4)] == ["-", "0.0123", "0.234", "12.3", "123.4"]
