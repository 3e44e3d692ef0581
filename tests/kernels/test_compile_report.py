"""The compile report: what it measures, what it refuses, and that one bad variant does not stop the others."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from gdncp_kernels import compile_report, launch_table
from gdncp_kernels.compile_report import SHARED_KIB, Compiled, Variants, cannot_run, chosen, problems_of
from gdncp_kernels.launch_table import KERNELS
from gdncp_kernels.offline import Resources

GOOD = Resources(registers=255, spill_bytes=64, shared_bytes=99 * 1024, mma={"HMMA": 3}, warnings=())


def run(*arguments, **environment):
    """The command in a process of its own: here kernels are interpreted."""
    kept = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    path = os.pathsep.join([".", "kernels"])
    command = [sys.executable, "-m", "gdncp_kernels.compile_report", "--json", "--jobs", "1", *arguments]
    done = subprocess.run(command, env={**kept, "PYTHONPATH": path, **environment}, capture_output=True, text=True)
    return done.returncode, json.loads(done.stdout), done.stderr


def test_every_kernel_is_measured():
    code, found, _ = run("--arch", "sm_80", "--dims", "32x32", "--inputs", "fp16")
    assert code == 0 and "sm_80.json" in found["launch_tables"]["sm_80"]
    rows = found["rows"]
    assert {row["kernel"] for row in rows} == {f"{name}_kernel" for name in KERNELS}
    assert len({row["key"] for row in rows}) == len(rows), "each code once"
    for row in rows:
        assert row["problems"] == [] and 16 <= row["resources"]["registers"] <= 255
        has_dots = row["kernel"] in ("precompute_t_kernel", "scan_kernel", "cp_prefill_kernel")
        assert bool(row["resources"]["mma"]) == has_dots and row["resources"]["shared_bytes"] >= 0


def test_bad_variants_are_reported_and_the_others_compiled(tmp_path):
    """A launch table without a row for the fold, and with a scan of which one warp holds far too much."""
    table = launch_table.read_table(launch_table.FOLDER / "sm_80.json")
    rows = [row for row in table.rows if row.kernel != "fold"]
    rows = [replace(row, num_warps=1, block=64) if row.kernel == "scan" else row for row in rows]
    path = tmp_path / "bad.json"
    path.write_text(replace(table, rows=tuple(rows)).to_json())
    code, found, errors = run("--arch", "sm_80", "--dims", "64x64", "--inputs", "fp16", GDNCP_LAUNCH_TABLE=str(path))
    assert code == 1
    problems = {row["kernel"]: row["problems"] for row in found["rows"] if row["problems"]}
    assert set(problems) == {"scan_kernel", "(launch)"}
    assert "bytes spilled, 64 allowed" in problems["scan_kernel"][0]
    assert "no row for kernel 'fold'" in problems["(launch)"][0]
    assert "cp_prefill_kernel" in {row["kernel"] for row in found["rows"]}
    assert "scan_kernel" in errors and "cut_kernel" not in errors


def test_what_is_refused():
    assert problems_of(120, GOOD) == ()
    assert problems_of(120, replace(GOOD, spill_bytes=65)) == ("65 bytes spilled, 64 allowed",)
    more = replace(GOOD, shared_bytes=99 * 1024 + 1)
    assert problems_of(120, more) == ("101377 bytes of shared memory, 101376 allowed",)
    assert [problems_of(arch, more) for arch in (80, 90, 100)] == [(), (), ()]
    assert {SHARED_KIB[arch] for arch in (80, 90, 100)} == {163, 227}
    assert problems_of(90, replace(GOOD, warnings=("(C7510) ...",))) == ("(C7510) ...",)


def test_slow_variants_can_run():
    row = Compiled("sm_120", "triton", "cut_kernel", "64x64", "fp16", "", replace(GOOD, spill_bytes=65), ("spills",))
    assert not cannot_run(row)
    assert cannot_run(replace(row, resources=None))
    assert cannot_run(replace(row, resources=replace(GOOD, shared_bytes=99 * 1024 + 1)))


def _crash_on_fp16(variants: Variants) -> list[Compiled]:
    if variants.inputs == "fp16":
        os._exit(9)
    return [Compiled("sm_80", "triton", "cut_kernel", "64x64", variants.inputs, "", GOOD, (), variants.inputs)]


def test_a_compiler_that_crashes_costs_its_own_rows_only():
    variants = chosen(["sm_80"], ["64x64"], ["bf16", "fp16", "fp32"], ["triton"])
    rows = list(compile_report.report(variants, 1, _crash_on_fp16))
    assert [(row.inputs, bool(row.problems)) for row in rows] == [("bf16", False), ("fp16", True), ("fp32", False)]
    assert "crashed" in rows[1].problems[0] and "FAILS" in str(rows[1]) and "FAILS" not in str(rows[0])


def test_what_is_compiled():
    every = chosen(compile_report.ARCHS, compile_report.DIMS, list(compile_report.INPUTS), compile_report.KERNELS)
    hopper = [v for v in every if v.kernels == "hopper"]
    assert {(v.arch, v.k_dim, v.v_dim) for v in hopper} == {(90, 64, 64), (90, 128, 128)}
    assert len(every) - len(hopper) == 4 * len(compile_report.DIMS) * len(compile_report.INPUTS)


@pytest.mark.parametrize("arguments", [["--arch", "sm_70"], ["--arch", "90"], ["--dims", "48x48"], ["--inputs", "fp8"]])
def test_bad_command_lines(arguments, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(SystemExit) as stopped:
        compile_report.main(arguments)
    assert stopped.value.code == 2


def test_interpreted_kernels_are_not_reported(monkeypatch, capsys):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(SystemExit) as stopped:
        compile_report.main(["--arch", "sm_80"])
    assert stopped.value.code == 2 and "TRITON_INTERPRET" in capsys.readouterr().err
