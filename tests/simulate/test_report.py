"""The command: cases, table, JSON, plot and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from gdncp.simulate.__main__ import main, parse_batch


def test_all_fixups_on_several_machines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = tmp_path / "cases.json", tmp_path / "cases.svg"
    arguments = "--seq-lens 64K 4096x3,100 --gpus 8 1 --fixup all --ownership contiguous zigzag --gates forget"
    arguments += " --gpus-per-node 4 --link nvlink5 --node-link 20:12.5"
    assert main([*arguments.split(), "--json", str(files[0]), "--plot", str(files[1])]) == 0
    out = capsys.readouterr().out
    assert "head_sharded" in out and "zigzag" in out and "the fastest fixup" in out
    cases = json.loads(files[0].read_text())["cases"]
    assert len(cases) == 2 * 2 * 2 * 4
    for gpus in (1, 8):
        own = [case for case in cases if case["gpus"] == gpus and case["batch"] == "64K"]
        best = min(case["outcome"]["seconds"] for case in own)
        assert all((case["outcome"]["seconds"] == best) == case["wins"] for case in own)
        assert all(len(case["outcome"]["bytes_sent"]) == gpus for case in own)
    assert all(case["efficiency"] <= 1.001 for case in cases if case["batch"] == "64K")
    assert any(case["chosen"] for case in cases if case["gpus"] == 8)
    root = ElementTree.parse(files[1]).getroot()
    assert len(root.findall("{*}polyline")) == 2 * 2 * 4


def test_weak_scaling_and_peers(tmp_path: Path) -> None:
    file = tmp_path / "weak.json"
    arguments = "--seq-lens 16K --gpus 1 4 --weak --scheme ours fla-cp:0.5.1 --gates fresh"
    assert main([*arguments.split(), "--json", str(file)]) == 0
    cases = json.loads(file.read_text())["cases"]
    assert [case["tokens"] for case in cases] == [16384, 16384, 65536, 65536]
    assert [case["efficiency"] for case in cases[:2]] == [1.0, 1.0]
    assert all(case["efficiency"] < 1 for case in cases[2:])


def test_ways_to_finish_spans_and_lanes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "ways.json"
    arguments = "--seq-lens 64K --gpus 1 2 --finish entry_late --fold-span 2 --lanes-per-rank 2 --lanes-by heads"
    assert main([*arguments.split(), "--json", str(file)]) == 0
    assert "late, spans 2, heads / 2" in capsys.readouterr().out
    cases = json.loads(file.read_text())["cases"]
    assert [case["way"] for case in cases] == ["spans 2, heads / 2", "late, spans 2, heads / 2"]
    assert all(len(case["outcome"]["exchange"]) == case["gpus"] for case in cases)
    assert main("--seq-lens 128K --gpus 2 --link 50:10 --lanes-per-rank auto --cp-chunk-len 8192".split()) == 0
    assert "heads / 2" in capsys.readouterr().out


def test_known_times(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check"]) == 0
    assert "0 by more than 15%" in capsys.readouterr().out


def test_batches() -> None:
    assert parse_batch("2M") == [2 << 20]
    assert parse_batch("4Kx2,100,0") == [4096, 4096, 100, 0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--seq-lens 1G", "--seq-lens must be tokens"),
        ("--seq-lens 0", "--seq-lens must have tokens"),
        ("--gpus 5000", "--gpus must be from 1 to 4096"),
        ("--heads 16", "--heads must be QK/V"),
        ("--fixup ring", "--fixup must be"),
        ("--ownership mine", "--ownership must be"),
        ("--finish soon", "--finish must be"),
        ("--fold-span 0", "--fold-span must be"),
        ("--lanes-per-rank few", "--lanes-per-rank must be"),
        ("--lanes-by head", "--lanes-by must be"),
        ("--gates two", "--gates must be"),
        ("--profile b200", "--profile must be"),
        ("--link fast", "--link must be"),
        ("--gpus-per-node 0", "--gpus-per-node must be"),
        ("--scheme fla", "--scheme must be ours or one of"),
        ("--scheme fla-cp --seq-lens 64x2", "--scheme: peers are simulated for --seq-lens of one sequence"),
        ("--scheme fla-cp --profile cpu", "--scheme: peers' times are known for"),
        ("--cp-chunk-len 100", "--cp-chunk-len must be"),
        ("--heads 16/24", "--heads 16/24: num_q_heads=16"),
        ("--check --profile nowhere", "--check goes alone, got --gpus too"),
        ("--json same --plot ./same", "--plot must be another file than --json"),
        ("--plot=", "--plot must name a file"),
        ("--json /dev/null/x", "--json /dev/null/x:"),
    ],
)
def test_refusals(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--gpus", "1", *arguments.split()])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
