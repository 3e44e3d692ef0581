"""`python -m gdncp.plan`: the picture of a plan has all of it, stays small and is the same on a terminal and as SVG."""

from __future__ import annotations

import io
import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from gdncp.plan import CpChunk, PrefillPlan, plan_prefill, show, terminal
from gdncp.plan.__main__ import main
from gdncp.plan.svg import svg
from tests.plan.strategies import HEADS, plans

SVG = "{http://www.w3.org/2000/svg}"
MANY = {"world_size": 64, "lanes_per_rank": 4}


def draw(plan: PrefillPlan, **changes: int) -> show.Picture:
    return show.draw(plan, **{"columns": 80, "narrowest": 2, "max_rows": 1000, "max_entries": 1000, **changes})


def printed(plan: PrefillPlan, width: int = 100, **console: Any) -> str:
    file = io.StringIO()
    terminal.show(plan, Console(file=file, width=width, highlight=False, **console), width)
    return file.getvalue()


def many() -> PrefillPlan:
    lengths = [9000 if i % 50 == 0 else 0 if i % 100 == 7 else (37 * i) % 700 for i in range(4096)]
    return plan_prefill(lengths, **MANY, **HEADS)


# ---- what is drawn

quick = settings(deadline=None, max_examples=50)


@quick
@given(plans, st.integers(8, 200), st.integers(1, 4))
def test_every_cp_chunk_is_drawn_once_and_in_order(plan: PrefillPlan, columns: int, narrowest: int) -> None:
    rows = draw(plan, columns=columns, narrowest=narrowest).rows
    drawn: list[CpChunk] = []
    for row in rows:
        of_row = [chunk for block in row.blocks for chunk in block.chunks]
        assert row.num_tokens == sum(chunk.num_tokens for chunk in of_row)
        assert len({(chunk.rank, chunk.lane) for chunk in of_row}) <= 1
        assert of_row == sorted(of_row)
        drawn += of_row
    assert sorted(drawn) == [chunk for chunk in plan.cp_chunks if chunk.num_tokens]


@quick
@given(plans, st.integers(8, 200), st.integers(1, 4))
def test_blocks_lie_side_by_side_as_wide_as_their_tokens(plan: PrefillPlan, columns: int, narrowest: int) -> None:
    rows = [row for row in draw(plan, columns=columns, narrowest=narrowest).rows if row.blocks]
    longest = max((row.num_tokens for row in rows), default=0)
    for row in rows:
        assert row.blocks[0].left == 0
        assert all(a.right == b.left for a, b in pairwise(row.blocks))
        assert all(block.right - block.left >= narrowest for block in row.blocks)
        assert row.blocks[-1].right == max(round(row.num_tokens * columns / longest), narrowest)


@quick
@given(plans)
def test_states_that_cross_ranks_are_marked(plan: PrefillPlan) -> None:
    entering = sum(block.num_entering for row in draw(plan).rows for block in row.blocks)
    assert entering == sum(segment.previous is not None for segment in plan.segments)


def test_a_cp_chunk_that_is_wide_enough_stands_alone() -> None:
    plan = plan_prefill([640, 64, 3, 3, 3, 640, 1], cp_chunk_len=320, **HEADS)
    (row,) = draw(plan, columns=160).rows
    assert [[chunk.sequence for chunk in block.chunks] for block in row.blocks] == [
        *([0], [0], [1]),
        [2, 3, 4],  # under one column each
        *([5], [5], [6]),
    ]
    assert row.blocks[3].sequence is None and row.blocks[3].labels()[:2] == ["3 sequences, 2-4", "3 sequences"]


def test_narrow_cp_chunks_are_joined_within_their_sequence() -> None:
    plan = plan_prefill([64 * 100, 64 * 50], cp_chunk_len=64, world_size=1, **HEADS)
    (row,) = draw(plan, columns=60).rows
    assert [(block.sequence, len(block.chunks)) for block in row.blocks] == [(0, 100), (1, 50)]
    assert show.JOINED in draw(plan, columns=60).notes and not draw(plan, columns=600).notes


def test_neighbours_differ() -> None:
    # side by side: sequences that the turn of 7 colours, or of 52 letters, would give the same
    pairs = [(0, 7), (9, 61), (10, 17)]
    apart = [[(64 * i, 64 * i + 64) for i in pair] for pair in pairs]
    rest = [(64 * i, 64 * i + 64) for i in range(70) if not any(i in pair for pair in pairs)]
    plan = plan_prefill([64] * 70, world_size=4, ownership=[*apart, rest], **HEADS)
    picture = draw(plan, columns=800)
    for row in picture.rows:
        for a, b in pairwise(block.sequence for block in row.blocks):
            assert a is not None and b is not None
            assert picture.colours[a] != picture.colours[b]
            assert picture.letters[a] != picture.letters[b]
    assert "letters repeat after 52" in printed(plan, 250)


def test_ranks_without_tokens_are_one_row() -> None:
    plan = plan_prefill([100], world_size=9, cp_chunk_len=128, ownership=[[], [(0, 100)], *[[]] * 7], **HEADS)
    assert [(row.label, row.text) for row in draw(plan).rows] == [
        ("rank 0", "no tokens"),
        ("rank 1", ""),
        ("ranks 2-8", "no tokens"),
    ]
    assert "ranks 2-8" in printed(plan) and "ranks 2-8" in svg(plan)


def test_a_batch_without_tokens() -> None:
    plan = plan_prefill([0, 0], world_size=2, **HEADS)
    assert [row.label for row in draw(plan).rows] == ["ranks 0-1"]
    assert "2 empty" in printed(plan)
    ElementTree.fromstring(svg(plan))


# ---- caps


def test_rows_and_legend_are_capped_and_what_is_left_out_is_counted() -> None:
    plan = many()
    picture = draw(plan, max_rows=10, max_entries=5)
    assert len(picture.rows) == 10 and len(picture.legend) == 5
    left_out = picture.rows[8]
    assert "… 247 more" in left_out.text and f"{left_out.num_tokens:,} tokens" in left_out.text
    assert sum(row.num_tokens for row in picture.rows) == plan.num_tokens_total
    filled = sum(length > 0 for length in plan.seq_lens)
    assert f"{filled - 5:,} more" in picture.legend_more and f"{4096 - filled} empty" in picture.legend_more


@pytest.mark.parametrize("width", [60, 100, 200])
def test_many_sequences_on_many_ranks_stay_readable(width: int) -> None:
    lines = printed(many(), width).splitlines()
    assert len(lines) < 100
    assert max(map(len, lines)) <= width
    assert len(svg(many())) < 2_000_000


# ---- the terminal


def test_without_colour_there_are_no_escape_codes_and_letters_tell_sequences_apart() -> None:
    plan = plan_prefill([256, 256], world_size=2, cp_chunk_len=128, fixup="chain", ownership="zigzag", **HEADS)
    for text in (printed(plan, color_system=None), printed(plan, force_terminal=True, no_color=True)):
        assert "\x1b" not in text
        bars = re.findall(r"^rank \d +(\S+) +256$", text, re.MULTILINE)
        assert [re.sub(r"([A-Z])\1+", r"\1", bar) for bar in bars] == [">A>B", "|A|B"]
        assert "A  sequence 0: 256 tokens, 2 CP chunks, ranks 0-1" in text
        assert ">  a state enters" in text


def test_in_colour_every_sequence_has_its_own() -> None:
    plan = plan_prefill([256, 256], **HEADS)
    text = printed(plan, force_terminal=True, color_system="truecolor")
    for fill, _ in show.COLOURS[:2]:
        red, green, blue = (int(fill[i : i + 2], 16) for i in (1, 3, 5))
        assert f"48;2;{red};{green};{blue}m" in text


def test_header_and_predicted_times() -> None:
    plan = plan_prefill([4096, 100], world_size=4, cp_chunk_len=256, first_cp_chunk_len=512, fixup="chain", **HEADS)
    text = printed(plan)
    for fact in (
        f"prefill plan {plan.digest[:12]}",
        "2 sequences, 4,196 tokens on 4 ranks, contiguous ownership",
        "16 CP chunks of up to 256 tokens, a sequence's first of 512",
        "fixup chain; reproducible",
        "costs of cpu; fixup chain: states cross ranks in 3 places",
    ):
        assert fact in text
    assert [line.split()[0] for line in text.splitlines()[-7:-2]] == [*plan.predicted, "total"]


def test_balance_is_the_mean_over_the_slowest() -> None:
    plan = plan_prefill([256 * 3], world_size=2, cp_chunk_len=256, ownership=[[(0, 512)], [(512, 768)]], **HEADS)
    of_rank = plan.predicted["precompute_t"]
    line = next(line for line in draw(plan).times if line[0] == "precompute_t")
    assert line[1].endswith("(rank 0)") and line[3] == f"{50 * sum(of_rank) / of_rank[0]:.1f} %"


# ---- SVG


@quick
@given(plans)
def test_the_svg_has_every_block_of_the_picture(plan: PrefillPlan) -> None:
    root = ElementTree.fromstring(svg(plan))
    assert root.find(f"{SVG}title").text == f"prefill plan {plan.digest[:12]}"  # type: ignore[union-attr]
    tokens = 0
    for title in root.iterfind(f"{SVG}rect/{SVG}title"):
        if found := re.search(r", ([\d,]+) tokens$", title.text or ""):
            tokens += int(found[1].replace(",", ""))
    assert tokens == plan.num_tokens_total
    arrows = {block for row in draw(plan).rows for block in row.blocks if block.num_entering}
    assert bool(root.findall(f"{SVG}path")) == bool(arrows)


def test_the_svg_lies_within_its_page_and_needs_nothing_else() -> None:
    text = svg(many())
    root = ElementTree.fromstring(text)
    width, height = float(root.get("width", 0)), float(root.get("height", 0))
    for box in root.iter(f"{SVG}rect"):
        assert float(box.get("x", 0)) + float(box.get("width", 0)) <= width
        assert float(box.get("y", 0)) + float(box.get("height", 0)) <= height
    assert "href" not in text and "@import" not in text and "url(" not in text


# ---- the command


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 0
    return capsys.readouterr().out


def test_arguments_reach_the_plan(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "new" / "plan.json"
    text = run(
        capsys,
        *("--seq-lens", "4K", "300", "0", "128x20", "--world-size", "4", "--ownership", "zigzag"),
        *("--heads", "8/16", "--head-dim", "64", "--cp-chunk-len", "256", "--first-cp-chunk-len", "512"),
        *("--lanes-per-rank", "2", "--fixup", "chain", "--profile", "h200", "--head-half-lives", "4:16384"),
        *("--checkpoint-every-n-tokens", "512", "--require-reproducible", "--forget-below", "0.001"),
        *("--json", str(out), "--svg", str(tmp_path / "plan.svg"), "--width", "70"),
    )
    plan = plan_prefill(
        [4096, 300, 0, *[128] * 20],
        world_size=4,
        ownership="zigzag",
        num_q_heads=8,
        num_k_heads=8,
        num_v_heads=16,
        head_dim=64,
        cp_chunk_len=256,
        first_cp_chunk_len=512,
        checkpoint_every_n_tokens=512,
        fixup="chain",
        lanes_per_rank=2,
        head_half_lives=[4 * 4096 ** (head / 15) for head in range(16)],
        forget_below=0.001,
        require_reproducible=True,
        profile="h200",
    )
    assert plan.digest[:12] in text and max(map(len, text.splitlines())) <= 70
    document = json.loads(out.read_text())
    assert document["plan"]["digest"] == plan.digest and document["plan"]["explain"] == plan.explain()
    assert document["predicted"] == {stage: list(of_rank) for stage, of_rank in plan.predicted.items()}
    assert [rank["num_tokens"] for rank in document["ranks"]] == [plan.num_tokens(rank) for rank in range(4)]
    assert (tmp_path / "plan.svg").read_text(encoding="utf-8") == svg(plan)


def test_lanes_may_be_the_planner_s(capsys: pytest.CaptureFixture[str]) -> None:
    given = {"num_q_heads": 4, "num_k_heads": 4, "num_v_heads": 8, "world_size": 2, "profile": "h200"}
    plan = plan_prefill([5000], lanes_per_rank=None, **given)
    arguments = ("--seq-lens", "5000", "--world-size", "2", "--heads", "4/8", "--lanes-per-rank", "auto")
    assert plan.digest[:12] in run(capsys, *arguments) and plan.lanes_reason


def test_lengths_from_a_file_explicit_ranges_and_three_head_counts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text("[100, 50]\n64x2\n")
    ranges = "[[[100, 278]], [[0, 100]]]"
    text = run(capsys, "--seq-lens-file", str(file), "--world-size", "2", "--ownership", ranges, "--heads", "16/4/4")
    plan = plan_prefill(
        [100, 50, 64, 64],
        world_size=2,
        ownership=json.loads(ranges),
        num_q_heads=16,
        num_k_heads=4,
        num_v_heads=4,
    )
    assert plan.digest[:12] in text


@pytest.mark.parametrize(
    "arguments, words",
    [
        ("", ["--seq-lens", "--seq-lens-file", "required"]),
        ("--seq-lens 4x", ["--seq-lens", "128x20", "'4x'"]),
        ("--seq-lens -5", ["--seq-lens"]),
        ("--seq-lens 1x9999999", ["--seq-lens", "at most", "1x9999999"]),
        ("--seq-lens 1x0", ["--seq-lens", "at least one"]),
        ("--seq-lens-file nowhere.txt", ["--seq-lens-file nowhere.txt", "No such file"]),
        ("--seq-lens 5 --world-size 0", ["--world-size must be a positive int", "0"]),
        ("--seq-lens 5 --world-size 5000", ["--world-size must be at most 4,096", "5000"]),
        ("--seq-lens 5 --world-size x", ["--world-size", "'x'"]),
        ("--seq-lens 5 --ownership zig-zag", ["--ownership must", "did you mean 'zigzag'?"]),
        ("--seq-lens 5 --ownership [[", ["--ownership", "JSON"]),
        ("--seq-lens 5 --ownership " + 900 * "[" + 900 * "]", ["--ownership"]),
        ("--seq-lens 5 --ownership " + 100_000 * "[", ["--ownership is not JSON"]),
        ("--seq-lens 5 --ownership [[[0,4]]]", ["--ownership must", "no rank holds [4, 5)"]),
        ("--seq-lens 5 --heads 16", ["--heads", "QK/V", "'16'"]),
        ("--seq-lens 5 --heads 16/24", ["--heads 16/24: num_q_heads=16", "GVA"]),
        ("--seq-lens 5 --cp-chunk-len 100", ["--cp-chunk-len must be", "multiple", "100"]),
        ("--seq-lens 5 --first-cp-chunk-len 64", ["--first-cp-chunk-len must be None where --cp-chunk-len is"]),
        ("--seq-lens 5 --lanes-by head", ["--lanes-by must", "'head'"]),
        ("--seq-lens 5 --lanes-per-rank many", ["--lanes-per-rank must be auto or a positive int, got 'many'"]),
        ("--seq-lens 5 --lanes-per-rank 0", ["--lanes-per-rank must be auto or a positive int, got '0'"]),
        ("--seq-lens 5 --fixup ring", ["--fixup must", "'ring'"]),
        ("--seq-lens 5 --fixup tree --require-reproducible", ["--fixup must not be 'tree'", "--require-reproducible"]),
        ("--seq-lens 9999999999999999999", ["--seq-lens must have at most"]),
        ("--seq-lens 5 --profile h20", ["--profile must", "did you mean 'h200'?"]),
        ("--seq-lens 5 --head-half-lives 5 6", ["--head-half-lives must", "(32)", "2 numbers"]),
        ("--seq-lens 5 --head-half-lives 9:4", ["--head-half-lives", "LOW:HIGH", "'9:4'"]),
        ("--seq-lens 5 --checkpoint-every-n-tokens 5", ["--checkpoint-every-n-tokens must", "5"]),
        ("--seq-lens 5 --width 10", ["--width", "at least 60", "10"]),
        ("--seq-lens 5 --svg /dev/null/plan.svg", ["--svg", "/dev/null/plan.svg"]),
        ("--seq-lens 5 --svg=", ["--svg must name a file, got ''"]),
        ("--seq-lens 5 --svg plan.out --json ./plan.out", ["--json must be another file than --svg", "plan.out"]),
        ("--seq-lens 5 --ranks 4", ["--ranks"]),
    ],
)
def test_a_wrong_command_line_is_one_line_and_2(
    arguments: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments.split())
    captured = capsys.readouterr()
    assert stop.value.code == 2 and not captured.out
    assert captured.err.count("\n") == 1 and captured.err.startswith("python -m gdncp.plan: error: ")
    assert all(word in captured.err for word in words), captured.err
