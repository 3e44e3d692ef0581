"""The run on several GPUs, as far as CPU ranks go: the script end to end, and what it computes and shows."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from gdncp.bench import report
from gdncp.bench.cases import Case, Shape
from gdncp.bench.multi_gpu import checks, killed, merge, page, peers, times, trace
from gdncp.bench.multi_gpu.book import Book
from gdncp.bench.multi_gpu.ours import Planned
from gdncp.bench.multi_gpu.presets import PRESETS
from gdncp.bench.multi_gpu.ranks import Ranks
from gdncp.bench.multi_gpu.small_cases import SMALL_CASES
from gdncp.bench.multi_gpu.variants import every_choice, explicit_ranges
from gdncp.calibrate.links import fit_line, measure_links
from gdncp.collectives.peer_memory import VARIABLE
from tests.distributed.ranks import run_ranks

ROOT = Path(__file__).parents[2]


def test_the_script_runs_parts_on_cpu_ranks_and_merges_them(tmp_path):
    """One part of each kind: under torchrun, and one that starts its ranks itself."""
    environment = os.environ | {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": "", "COMMIT": "abc"}
    command = ["bash", str(ROOT / "bench" / "multi_gpu.sh"), str(tmp_path)]
    environment |= {"PARTS": "links killed"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    found = json.loads((tmp_path / "multi_gpu.json").read_text())
    assert found["environment"]["commit"] == "abc" and found["troubles"] == []
    parts = found["parts"]
    assert list(parts) == ["links", "killed"]
    assert all(part["status"] == "done" and part["exit_code"] == 0 for part in parts.values())
    (survivor,) = parts["killed"]["ways"]["default"]["survivors"]
    assert survivor["raised"] and "broke off on rank 0 of 2" in survivor["said"] and survivor["seconds"] < 15
    text = (tmp_path / "multi_gpu.md").read_text()
    assert "## Links" in text and "| all_to_all | eager |" in text and "## A rank killed" in text


def _parts(rank: int, folder: Path) -> None:
    ranks = Ranks(rank, 2, torch.device("cpu"), "gloo", float("inf"))
    for part in (checks, times, peers):
        book = Book(part.__name__.split(".")[-1], folder, ranks)
        with torch.no_grad():
            part.run(book, PRESETS["tiny"])
        book.end()


def test_every_part_on_two_cpu_ranks(tmp_path):
    run_ranks(_parts, 2, tmp_path)
    found = merge.document(tmp_path, "abc", ["checks", "times", "peers"])
    parts = found["parts"]
    assert found["troubles"] == [] and list(parts) == ["checks", "times", "peers"]
    for row in parts["checks"]["small"] + parts["checks"]["large"]:
        assert row["promised"] > 0 and row["equal"] == row["promised"] and row["left_out"] == 0
    assert {row["variant"] for row in parts["times"]["times"]} >= {"auto", "chain", "all_gather", "head_sharded"}
    for row in parts["times"]["times"]:
        assert row["eager_ms"] > 0 and row["host_us"] > 0 and "graph_ms" not in row
    auto = parts["times"]["times"][0]
    assert set(auto["measured_stages_ms"]) == set(auto["predicted_stages_ms"])
    assert [len(of_rank) for of_rank in auto["measured_stages_ms"].values()] == [2] * 4
    assert [row["gates"] for row in parts["times"]["weak"]] == ["layer", "forget", "one"]
    assert set(parts["peers"]["absent"]) >= {"fla:cp", "flashqla:inter", "flashqla:inter+intra"}
    assert parts["times"]["skipped"] == ["traces: they are of NCCL's kernels"]
    text = page.markdown(found)
    assert "## Same bits as one GPU" in text and "fla:cp is not here" in text and "| auto |" in text


def _out_of_time(rank: int, folder: Path) -> None:
    ranks = Ranks(rank, 2, torch.device("cpu"), "gloo", float("-inf") if rank == 0 else float("inf"))
    book = Book("times", folder, ranks)
    times.run(book, PRESETS["tiny"])
    book.end()


def test_a_kernels_assertion_is_told_without_the_folder_of_its_source():
    said = "kernels/mailboxes.py:179: block: [1,0,0] Assertion `a peer failed` failed."
    assert killed.assertions(["a line", f"/some/where/{said}"]) == [said.removeprefix("kernels/")]


def test_what_there_is_no_time_for_is_said(tmp_path):
    """Rank 0's clock decides for all."""
    run_ranks(_out_of_time, 2, tmp_path)
    skipped = json.loads((tmp_path / "times.json").read_text())["skipped"]
    assert "256x1:1/2 layer: the time budget was spent" in skipped and len(skipped) == 7


def _wrong_on_rank_1(rank: int) -> dict:
    """One case, where rank 1's output is off by one bit."""
    if rank == 1:
        checks.gdncp.prefill, prefill = _off_by_a_bit(checks.gdncp.prefill), checks.gdncp.prefill
    try:
        ranks = Ranks(rank, 2, torch.device("cpu"), "gloo", float("inf"))
        return checks.check_small(ranks, SMALL_CASES[1], "torch", torch.float32, 32)
    finally:
        if rank == 1:
            checks.gdncp.prefill = prefill


def _off_by_a_bit(prefill):
    def wrong(plan, *args, **kwargs):
        result = prefill(plan, *args, **kwargs)
        if plan.world_size > 1:
            result.output.view(torch.int32)[-1, 0, 0] ^= 1
        return result

    return wrong


def test_one_wrong_bit_on_one_rank_is_found():
    rows = run_ranks(_wrong_on_rank_1, 2)
    promised = [name for name, _ in every_choice([1000], 2, 64) if not name.startswith("tree")]
    for row in rows:
        assert row["promised"] == len(promised) and row["equal"] == 0
        assert row["wrong"] == [f"rank 1: {name}: other bits than one GPU" for name in promised]


def test_explicit_ranges_are_a_partition_on_the_grid():
    for size in (1, 2, 4):
        ranges = explicit_ranges([1000, 0, 77], size, 64)
        assert len(ranges) == size and (size < 3 or ranges[-1] == [])
        pieces = sorted(piece for of_rank in ranges for piece in of_rank)
        assert [a for a, _ in pieces] == [0] + [b for _, b in pieces[:-1]] and pieces[-1][1] == 1077
    names = [name for name, _ in every_choice([1000], 2, 64)]
    assert len(names) == len(set(names)) and {"chain", "tree"} <= {name.split()[0] for name in names}


def _links(rank: int) -> dict:
    return measure_links(dist.group.WORLD, torch.device("cpu"), sizes=(4096, 65536))


def test_links_between_cpu_ranks():
    for found in run_ranks(_links, 3):
        assert found["world_size"] == 3 and set(found["exchanges"]) == {"all_gather", "all_to_all", "send_recv"}
        for kinds in found["exchanges"].values():
            assert list(kinds) == ["eager"]
            assert kinds["eager"]["alpha_s"] >= 0 and kinds["eager"]["bytes_per_s"] > 0
            assert all(row["seconds"] > 0 for row in kinds["eager"]["rows"])
        sent = {name: kinds["eager"]["rows"][0]["bytes_sent"] for name, kinds in found["exchanges"].items()}
        assert sent == {"all_gather": 8192, "all_to_all": pytest.approx(4096 * 2 / 3), "send_recv": 4096}


def test_a_line_through_times():
    line = fit_line([(n, 20e-6 + n / 300e9) for n in (4096, 2**20, 2**26)])
    assert line == pytest.approx((20e-6, 300e9))
    assert fit_line([(1000, 2e-5), (2000, 1e-5)]).bytes_per_s == float("inf")  # a line that falls is flat
    assert fit_line([(1000, 1e-6), (2000, 3e-6)]).alpha_s == 0  # and one that starts below zero starts at it


def test_what_a_trace_says_of_an_exchange():
    spin, nccl = "spin_kernel(long)", "ncclDevKernel_AllGather"
    call = [(spin, (0, 100)), (nccl, (100, 110)), ("scan", (120, 200)), (nccl, (180, 230)), ("prefill", (225, 300))]
    later = [(name, (a + 1000, b + 1000)) for name, (a, b) in call]
    found = trace.exchange_of([(nccl, (-5.0, -1.0)), *call, *later], 2)
    assert found == {"nccl_us": 50, "overlapped_us": 25, "exposed_us": 25, "fold_us": 0, "call_us": 180}


class _Peer:
    """Ours under another name, cut in equal parts as peers are; its results off by a factor."""

    one_gpu, any_gates, library = False, False, None

    def __init__(self, name: str, factor: float):
        self.name, self._factor = name, factor

    def bind(self, ranks, case, sets):
        (start, stop), tokens = peers.equal_part(ranks, case), case.shape.num_tokens
        ownership = [[(r * tokens // 2, (r + 1) * tokens // 2)] for r in range(2)]
        ours = Planned(ranks, case, sets, PRESETS["tiny"], 2, ownership=ownership)
        assert ours.output.shape[0] == stop - start
        return [lambda call=call: call().output * self._factor for call in ours.calls]


def _with_peers(rank: int, folder: Path) -> None:
    book = Book("peers", folder, Ranks(rank, 2, torch.device("cpu"), "gloo", float("inf")))
    preset = PRESETS["tiny"]
    case = Case(preset.shapes[0], "forget", preset.dtype, book.ranks.device)
    with torch.no_grad():
        peers._measure(book, preset, _Peer("right", 1.0), case)
        with book.failures_of("wrong"):
            peers._measure(book, preset, _Peer("wrong", 1.001), case)
    book.end()


def test_a_peer_is_timed_where_it_is_right(tmp_path):
    run_ranks(_with_peers, 2, tmp_path)
    found = json.loads((tmp_path / "peers.json").read_text())
    (row,) = found["peers"]
    assert row["peer"] == "right" and row["eager_ms"] > 0 and row["from_ours"] < 1e-5
    assert found["failures"] == ["wrong: ValueError: 0.001 from ours: not timed"]


def _by_messages(rank: int) -> list[str | None]:
    """What the environment says outside and inside."""
    ranks, preset = Ranks(rank, 2, torch.device("cpu"), "gloo", float("inf")), PRESETS["tiny"]
    case = Case(preset.shapes[0], "one", preset.dtype, ranks.device)
    ours = Planned(ranks, case, [case.tokens(seed=1)], preset, 2)
    with ours.by_messages():
        inside = os.environ.get(VARIABLE)
        assert ours.calls[0]().fixup.transport == "gloo" and ours.group.size() == 2
    return [inside, os.environ.get(VARIABLE)]


def test_the_planners_choice_is_timed_with_states_sent_by_nccl_too():
    assert run_ranks(_by_messages, 2) == [["0", None]] * 2
    preset, tokens = PRESETS["h200"], Case(Shape(256, 1, 1, 2, 32), "one", torch.float32, torch.device("cpu")).tokens(1)

    def names(length: int, backend: str) -> list[str]:
        shape = Shape(length, 1, *preset.heads[0], preset.head_dim)
        return [name for name, _ in times.variants(preset, shape, tokens, backend)]

    assert {times.BY_MESSAGES, "all_gather", "all_gather, 2 lanes"} < set(names(131072, "nccl"))
    assert times.BY_MESSAGES not in names(131072, "gloo") + names(32768, "nccl")


# ---- the page


def made_up():
    about = {"tokens": 131072, "heads": "16/32", "gates": "one"}
    ours = about | {"variant": "auto", "fixup": "chain", "cp_chunk_len": 4096, "predicted_ms": 1.3, "error": 1e-3}
    ours |= {"eager_ms": 1.5, "graph_ms": 1.4, "host_us": 120.0, "without_fixup_ms": 1.37, "exposed_us": 30.0}
    told = ours | {"variant": "half-lives told", "graph_ms": 1.3}
    one = about | {"eager_ms": 2.5, "graph_ms": 2.4}
    fla = about | {"gates": "layer", "peer": "fla:cp", "one_gpu": False, "eager_ms": 14.0}
    inter = fla | {"peer": "flashqla:inter", "any_gates": True, "eager_ms": 12.0}
    other = inter | {"any_gates": False, "eager_ms": 1.0}  # of other gates than ours, which it depends on
    qla = about | {"peer": "flashqla:auto", "one_gpu": True, "eager_ms": 2.6}
    common = {"world_size": 2, "backend": "nccl", "failures": [], "skipped": []}
    environment = dict(device="A GPU", gpus=["A GPU", "A GPU"], started="today", torch="2", triton="3", nccl="2.27")
    return {
        "schema": merge.SCHEMA,
        "kind": merge.KIND,
        "environment": environment | {"driver": "1", "commit": "abc", "versions": {}},
        "troubles": ["peers: stopped at its time limit"],
        "parts": {
            "times": common | {"times": [ours, told], "one_gpu": [one]},
            "peers": common
            | {
                "peers": [fla, inter, other, qla],
                "skipped": [f"{x}: the time budget was spent" for x in ("fla:cp, 1048576", "fla:cp, 5")],
            },
        },
    }


def test_targets_stand_beside_figures():
    text = page.markdown(made_up())
    line = "| 131072, 16/32 | gates ≈ 1 | 1.450 | 1.400 | 1.300 half-lives told | 1.500 | 120 | 2.400 | 1.71 "
    assert line + "| 12.0 flashqla:inter | 2.600 flashqla:auto | 2.00 |" in text
    assert "| 131072, 16/32 | gates ≈ 1 | chain | 1.400 | 1.370 | 30 |" in text and "difference, µs (≤ 40)" in text
    assert (
        "- peers: stopped at its time limit" in text
        and "- peers: skipped, as the time budget was spent: fla:cp, 1048576; fla:cp, 5\n" in text
    )


def test_the_page_of_results_has_a_section_for_several_gpus():
    text = report.page({"multi_gpu_h200x2": made_up()})
    assert "## 2 GPUs of one host" in text and "### Time" in text and "From multi_gpu_h200x2.json." in text
    with pytest.raises(ValueError, match="multi_gpu_h200x2 has schema 99"):
        report.page({"multi_gpu_h200x2": made_up() | {"schema": 99}})


def test_a_part_that_was_stopped_is_a_trouble(tmp_path):
    (tmp_path / "times.json").write_text(json.dumps({"part": "times", "status": "running", "failures": ["x: E"]}))
    (tmp_path / "times.rc").write_text("124\n")
    (tmp_path / "peers.rc").write_text("1\n")
    found = merge.document(tmp_path, "abc", ["checks", "times", "peers"])
    assert found["troubles"] == [
        "times: x: E",
        "times: stopped at its time limit",
        "peers: ended with exit code 1 before it wrote anything",
    ]
