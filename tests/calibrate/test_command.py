"""`python -m gdncp.calibrate` on a CPU, and what reads the file it writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gdncp.calibrate.__main__ import main
from gdncp.plan import PROFILES, find_profile, plan_prefill
from gdncp.plan.__main__ import main as plan_main
from gdncp.simulate.__main__ import main as simulate_main

LAYER = {"num_q_heads": 1, "num_k_heads": 1, "num_v_heads": 2}
TINY = "--device cpu --tokens 128 --heads 1/2 --head-dim 16 --repeats 1".split()


def test_a_cpu_is_measured_and_the_profile_is_read_by_name_s_readers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.json"
    assert main(["--out", str(file), *TINY]) == 0
    said = capsys.readouterr().out
    for words in ("backend torch", "precompute_mn", "whole call", "tile_prefill_s", "predictions are off by"):
        assert words in said

    rows = {row[0]: row[1:] for row in map(str.split, said.splitlines()) if row}
    assert rows["ranks_per_node"] == ["all"] and rows["opens"] == ["no"] and rows["workers"] == ["1"]

    document = json.loads(file.read_text())
    assert document["name"] == "mine" and "message_s" in document["source"]["not measured"]
    profile = find_profile(str(file))
    assert profile.workers == 1 and profile.launch_s + profile.tile_prefill_s > 0
    assert profile.message_s == PROFILES["cpu"].message_s

    assert plan_prefill([1000], profile=str(file), **LAYER).profile == profile
    assert plan_main(["--seq-lens", "1000", "--heads", "1/2", "--profile", str(file)]) == 0
    assert simulate_main(["--seq-lens", "1000", "--heads", "1/2", "--gpus", "2", "--profile", str(file)]) == 0
    assert "costs of mine" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--out x.txt", "--out must be a .json file"),
        (f"--out {__file__}/x.json", f"--out {__file__}/x.json: "),
        ("--out x.json --heads 16", "--heads must be QK/V"),
        ("--out x.json --heads 16/8", "--heads must be QK/V"),
        ("--out x.json --tokens 0", "--tokens must be a positive int"),
        ("--out x.json --base h20", "--base must be one of 'cpu', 'h200'"),
        ("--out x.json --backend fast", "backend must be one of"),
    ],
)
def test_refusals(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gdncp.calibrate.stages.Bench", None)  # before anything is measured
    assert main([*arguments.split(), "--device", "cpu"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[", "Expecting value"),
        ("[" * 100_000, "profile"),
        ("[]", 'must be JSON as {"name"'),
        ('{"name": "x", "costs": {}}', "has no bytes_per_s"),
        ('{"name": "x", "costs": COSTS, "more": 1}', None),
        ('{"name": "x", "costs": MORE}', "has an unknown speed"),
        ('{"name": "x", "costs": WRONG}', "launch_s must be a non-negative finite number, got -1"),
    ],
)
def test_files_that_are_no_profiles(text: str, message: str | None, tmp_path: Path) -> None:
    costs = PROFILES["h200"].costs()
    for word, value in (("COSTS", costs), ("MORE", costs | {"speed": 1}), ("WRONG", costs | {"launch_s": -1})):
        text = text.replace(word, json.dumps(value))
    file = tmp_path / "x.json"
    file.write_text(text)
    if message is None:
        assert plan_prefill([1], profile=str(file), **LAYER).profile.launch_s == costs["launch_s"]
        return
    with pytest.raises(ValueError, match="profile") as raised:
        plan_prefill([1], profile=str(file), **LAYER)
    assert message in str(raised.value)


def test_two_ranks_measure_their_exchanges(tmp_path: Path) -> None:
    file = tmp_path / "two.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "-m", "gdncp.calibrate", "--out", str(file), *TINY], env=environment, capture_output=True, text=True,
        timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "2 ranks over gloo" in done.stdout and "all_to_all" in done.stdout
    document = json.loads(file.read_text())
    # "inf" where a busy machine takes as long for these few bytes as for more of them
    assert float(document["exchanges"]["exchanges"]["send_recv"]["eager"]["bytes_per_s"]) > 0
    assert "bytes_per_s" not in document["source"]["not measured"].replace("node_bytes_per_s", "")
    assert find_profile(file).bytes_per_s != PROFILES["cpu"].bytes_per_s
