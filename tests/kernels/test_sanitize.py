"""`launch/sanitize.sh` around a made-up compute-sanitizer, and its cases on the torch set."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.kernels import sanitized

ROOT = Path(__file__).parents[2]
SUMMARIES = {
    "memcheck": "ERROR SUMMARY: {} errors",
    "initcheck": "ERROR SUMMARY: {} errors",
    "racecheck": "RACECHECK SUMMARY: {0} hazards displayed (0 errors, {0} warnings)",
}
# Writes the summary that the environment says for its tool to the log file, and its own arguments to the output.
SANITIZER = """#!/usr/bin/env bash
[ "$1" != --version ] || { echo "${VERSION-NVIDIA (R) Compute Sanitizer}"; exit; }
echo "$@"
while [ $# -gt 0 ]; do
    case "$1" in --tool) tool="$2" ;; --log-file) log="$2" ;; esac
    shift
done
summary="SUMMARY_$tool" seconds="SECONDS_$tool"
sleep "${!seconds:-0}"
if [ -n "${MEET:-}" ]; then
    touch "$MEET/$tool"
    until [ -e "$MEET/memcheck" ] && [ -e "$MEET/initcheck" ] && [ -e "$MEET/racecheck" ]; do sleep 0.05; done
fi
echo "========= ${!summary}" >"$log"
"""
# The program without a tool says nothing; its kernels have two names.
PYTHON = """#!/usr/bin/env bash
[ "${@: -1}" != --kernels ] || printf 'a_kernel\\nb_kernel\\n'
exit "${PROGRAM:-0}"
"""


def sanitize(folder, *tools, found=None, **environment):
    for name, text in {"compute-sanitizer": SANITIZER, "python": PYTHON}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    summaries = {f"SUMMARY_{t}": s.format((found or {}).get(t, 0)) for t, s in SUMMARIES.items()}
    variables = {
        **os.environ,
        **summaries,
        "PYTHON": str(folder / "python"),
        "COMPUTE_SANITIZER": str(folder / "compute-sanitizer"),
        "SANITIZE_LOGS": str(folder / "logs"),
        **environment,
    }
    return subprocess.run([ROOT / "launch" / "sanitize.sh", *tools], env=variables, capture_output=True, text=True)


def test_a_line_per_tool_and_success_where_nothing_is_found(tmp_path):
    done = sanitize(tmp_path, SANITIZE_CASES="hopper", SANITIZE_OPTIONS="--print-limit 5")
    assert done.returncode == 0, done.stderr
    assert [line.split()[:2] for line in done.stdout.splitlines()[:-1]] == [
        ["memcheck", "0"],
        ["racecheck", "0"],
        ["initcheck", "0"],
    ]
    asked = {t: (tmp_path / "logs" / f"{t}.out.txt").read_text() for t in SUMMARIES}
    assert all("--print-limit 5 " in a and a.endswith("-m tests.kernels.sanitized hopper\n") for a in asked.values())
    filters = "--kernel-name kns=a_kernel --kernel-name kns=b_kernel"
    assert filters in asked["memcheck"] and filters in asked["racecheck"] and filters not in asked["initcheck"]


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"VERSION": "true (GNU coreutils) 9.1"}, "is not compute-sanitizer; --version says: true (GNU"),
        ({"VERSION": ""}, "is not compute-sanitizer; --version says: nothing"),
        ({"COMPUTE_SANITIZER": "/no/such/tool"}, "COMPUTE_SANITIZER=/no/such/tool is not compute-sanitizer"),
    ],
)
def test_another_tool_is_not_believed(tmp_path, changes, said):
    done = sanitize(tmp_path, **changes)
    assert done.returncode == 2 and said in done.stderr and not done.stdout


@pytest.mark.parametrize("tool", SUMMARIES)
def test_a_finding_fails(tmp_path, tool):
    done = sanitize(tmp_path, found={tool: 3})
    assert done.returncode == 1 and SUMMARIES[tool].format(3) in done.stderr
    assert [line.split()[1] for line in done.stdout.splitlines()[:-1]] == [
        "3" if t == tool else "0" for t in ("memcheck", "racecheck", "initcheck")
    ]


def test_a_tool_out_of_time_fails_and_the_next_runs(tmp_path):
    done = sanitize(tmp_path, "memcheck", "initcheck", SECONDS_memcheck="60", SANITIZE_SECONDS="1")
    assert done.returncode == 1
    assert "not done within 1 s" in done.stdout and "initcheck  0 errors" in done.stdout


def test_tools_side_by_side(tmp_path):
    """Each waits for the others to have begun; one that finds something fails, whichever ends last."""
    meet = {"MEET": str(tmp_path), "SANITIZE_SECONDS": "60"}
    done = sanitize(tmp_path, SANITIZE_AT_ONCE="1", found={"memcheck": 3}, **meet)
    assert done.returncode == 1 and sorted(line.split()[:2] for line in done.stdout.splitlines()[:-1]) == [
        ["initcheck", "0"],
        ["memcheck", "3"],
        ["racecheck", "0"],
    ]


def test_all_cases_of_a_set_must_launch_every_kernel(monkeypatch):
    """Made-up cases, of which one launches: also where a set is asked for by its name, but not where a case is."""
    from triton import knobs

    hook = type(knobs.runtime.launch_enter_hook)()
    monkeypatch.setattr(knobs.runtime, "launch_enter_hook", hook)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(sanitized, "get_backend", lambda _: SimpleNamespace(rejection_reason=lambda **_: None))
    monkeypatch.setattr(sanitized, "SETS", sanitized.SETS[:1])
    monkeypatch.setattr(sanitized, "kernels", lambda _: {"a_kernel", "b_kernel"})

    def launches(*names):
        def case(_):
            for name in names:
                hook(SimpleNamespace(get=lambda: {"name": name}))  # noqa: B023  called at once

        return case

    one, other = launches("a_kernel"), launches("b_kernel")
    one.__name__, other.__name__ = "one", "other"
    monkeypatch.setattr(sanitized, "CASES", (one, other))
    sanitized.run("triton")
    monkeypatch.setattr(sanitized, "CASES", (one,) * 2)
    sanitized.run("triton one 64 and more")  # none at all
    monkeypatch.setattr(sanitized, "CASES", (one, launches()))
    sanitized.run("one")
    for all_ in ("", "triton"):
        with pytest.raises(SystemExit, match="triton 64: never launched: b_kernel"):
            sanitized.run(all_)


def test_no_summary_a_failing_program_and_an_unknown_tool(tmp_path):
    assert sanitize(tmp_path, "memcheck", SUMMARY_memcheck="died").returncode == 1
    assert "without a tool" in sanitize(tmp_path, PROGRAM="1").stderr
    assert sanitize(tmp_path, "leakcheck").returncode == 2


@pytest.mark.parametrize("case", sanitized.CASES, ids=lambda case: case.__name__)
def test_cases_are_calls_that_run(case):
    case(replace(sanitized.SETS[0], backend="torch", dim=16, device="cpu"))


def test_kernels_are_found_by_name():
    command = [sys.executable, "-m", "tests.kernels.sanitized", "--kernels"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([".", "kernels"])}
    names = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True).stdout.split()
    assert len(names) == len(set(names)) and {"recurrence_kernel", "_finish_kernel", "cp_prefill_kernel"} <= set(names)
    assert {"fold_kernel", "precompute_t_kernel"} <= sanitized.kernels("triton") & sanitized.kernels("hopper")
