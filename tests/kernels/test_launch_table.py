"""How the plain set is launched on which GPU: tables, their fallback, and kernels that obey them."""

import json
from dataclasses import replace
from itertools import product

import pytest

from gdncp.backends.triton_backend import HEAD_DIMS
from gdncp_kernels import launch_table
from gdncp_kernels.launch_table import KERNELS, PRECISIONS, SCANS, LaunchTable, Row
from tests.kernels.cases import TOLERANCE, make_inputs, plan_table, random_states, run_chain
from tests.kernels.test_chain import assert_matches
from tests.kernels.test_stages import plan_for


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """Tables are read once a process."""
    monkeypatch.delenv(launch_table.VARIABLE, raising=False)
    launch_table.table_of.cache_clear()
    yield
    launch_table.table_of.cache_clear()


@pytest.mark.parametrize("arch", launch_table.shipped_archs())
def test_shipped_tables_have_a_choice_for_every_launch(arch):
    table = launch_table.table_of(arch)
    assert table.arch == arch
    for kernel, k_dim, v_dim, precision in product(KERNELS, HEAD_DIMS, HEAD_DIMS, PRECISIONS):
        choice = table.choice(kernel, k_dim, v_dim, precision)
        if kernel in launch_table.BLOCKED:
            assert k_dim % choice.block == 0 and v_dim % choice.block == 0, "blocks of N and of M"
        if kernel in SCANS:
            assert k_dim % choice.slice == 0
            # Triton 3.6 gave wrong products with eight warps where wgmma may be used (M = 64)
            assert precision == "ieee" or choice.num_warps == 4
        assert choice.options["enable_fp_fusion"] is True


def test_the_first_row_that_matches_wins():
    rows = (Row("cut", 4, precision="ieee", k_dim=64), Row("cut", 2, v_dim=32), Row("cut", 1))
    table = LaunchTable(80, "a test", rows)
    found = [
        table.choice("cut", *launch).num_warps for launch in ((64, 32, "ieee"), (64, 32, "tf32"), (64, 64, "tf32"))
    ]
    assert found == [4, 2, 1]
    assert table.preferring((Row("cut", 8, k_dim=64),)).choice("cut", 64, 32, "ieee").num_warps == 8
    with pytest.raises(ValueError, match=r"'scan', precision 'tf32', K = 64, V = 32"):
        table.choice("scan", 64, 32, "tf32")


def test_an_arch_without_a_table_takes_the_nearest_below_and_says_so():
    assert launch_table.table_of(89) == launch_table.table_of(80)
    assert launch_table.table_of(121) == launch_table.table_of(120)
    assert "sm_80" in launch_table.describe(89) and "nearest below sm_89" in launch_table.describe(89)
    assert "nearest" not in launch_table.describe(90) and "sm_90.json" in launch_table.describe(90)
    with pytest.raises(ValueError, match="sm_75"):
        launch_table.table_of(75)


def test_a_named_file_is_used_instead(tmp_path, monkeypatch):
    table = LaunchTable(90, "a test", (Row("cut", 2), Row("scan", 4, block=32, slice=16, k_dim=128)))
    path = tmp_path / "mine.json"
    path.write_text(table.to_json())
    assert launch_table.read_table(path) == replace(table, source=str(path))
    monkeypatch.setenv(launch_table.VARIABLE, str(path))
    assert launch_table.table_of(90).rows == table.rows
    assert "mine.json" in launch_table.describe(90) and launch_table.VARIABLE in launch_table.describe(90)
    with pytest.raises(ValueError, match=r"for sm_90, but the GPU is sm_80"):
        launch_table.table_of(80)


@pytest.mark.parametrize(
    "row, said",
    [
        ({"kernel": "scam", "num_warps": 4}, "scan.*'scam'"),
        ({"kernel": "cut", "num_warps": 3}, "num_warps of cut.*3"),
        ({"kernel": "cut", "num_warps": 1, "block": 16}, "block of cut"),
        ({"kernel": "fold", "num_warps": 1, "block": 16, "slice": 16}, "slice of fold"),
        ({"kernel": "fold", "num_warps": 1}, "block of fold.*None"),
        ({"kernel": "scan", "num_warps": 4, "block": 24}, "block of scan.*24"),
        ({"kernel": "cut", "num_warps": 1, "precision": "fp8"}, "tf32, ieee.*'fp8'"),
        ({"kernel": "cut", "num_warps": 1, "warps": 4}, "warps"),
        ({"num_warps": 1}, "kernel"),
    ],
    ids=str,
)
def test_bad_rows_are_refused_with_the_file(tmp_path, row, said):
    path = tmp_path / "bad.json"
    path.write_text(json.dumps({"arch": "sm_90", "made_by": "a test", "rows": [row]}))
    with pytest.raises(ValueError, match=rf"bad.json.*{said}"):
        launch_table.read_table(path)


@pytest.mark.parametrize(
    "text", ["", "{}", '{"arch": "90", "made_by": "x", "rows": []}', '{"arch": "sm_x", "rows": []}']
)
def test_bad_files_are_refused(tmp_path, text):
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"bad.json cannot be used"):
        launch_table.read_table(path)
    with pytest.raises(ValueError, match=r"none.json cannot be used: FileNotFoundError"):
        launch_table.read_table(tmp_path / "none.json")


def test_states_in_slices_and_small_blocks_give_what_whole_ones_do():
    """K in two slices, V and M in two blocks, with checkpoints; heads that never forget."""
    seq_lens, positions = [150, 40], [[5, 64, 100, 150], [33]]
    inputs = make_inputs(sum(seq_lens), heads=(1, 1, 1), k_dim=32, v_dim=32, gates="ones", beta_max=2.0)
    initial_state = random_states(2, inputs)
    work = plan_table(plan_for(inputs, seq_lens, 64, checkpoint_positions=positions))
    small = tuple(Row(kernel, 4, block=16, slice=16) for kernel in SCANS)
    whole = tuple(Row(kernel, 4, block=32) for kernel in SCANS)
    for rows in (small, whole):
        with launch_table.using(launch_table.table_of(80).preferring(rows)):
            assert launch_table.choose("scan", 32, 32, "ieee").slice == (rows[0].slice or 32)
            results = run_chain(inputs, seq_lens, work, initial_state)
        assert_matches(inputs, seq_lens, results, initial_state, TOLERANCE, checkpoint_positions=positions)
