"""A file is complete or absent, and two runs never share a directory."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file

from gdncp import store


def test_a_failed_write_leaves_the_old_file_and_no_litter(tmp_path, monkeypatch):
    path = tmp_path / "state.safetensors"
    store.write_tensors(path, {"x": torch.ones(3)})

    def dies_half_way(tensors, file, metadata):
        file.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(store, "save_file", dies_half_way)
    with pytest.raises(OSError, match="disk full"):
        store.write_tensors(path, {"x": torch.zeros(3)})
    assert torch.equal(load_file(path)["x"], torch.ones(3))
    assert [p.name for p in tmp_path.iterdir()] == ["state.safetensors"]


def test_files_may_be_read_as_the_umask_says(tmp_path):
    (tmp_path / "plain").touch()
    store.write_tensors(tmp_path / "x.safetensors", {"x": torch.ones(1)})
    assert (tmp_path / "x.safetensors").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_what_is_no_file_is_left_alone_and_a_link_followed(tmp_path):
    pipe, kept, link = tmp_path / "pipe", tmp_path / "kept.json", tmp_path / "link.json"
    os.mkfifo(pipe)
    for path in (pipe, tmp_path):
        with pytest.raises(OSError, match="not a regular file"):
            store.write_json(path, {})
    assert pipe.is_fifo()
    kept.write_text("old")
    link.symlink_to(kept)
    store.write_json(link, {})
    assert link.is_symlink() and kept.read_text() == "{}\n"


def test_a_run_directory_is_claimed_once(tmp_path):
    store.claim_run_dir(tmp_path / "run", "a: 1\n")
    with pytest.raises(ValueError, match="already holds a run"):
        store.claim_run_dir(tmp_path / "run", "a: 2\n")
    assert (tmp_path / "run" / "config.yaml").read_text() == "a: 1\n"


def test_json_is_strict(tmp_path):
    store.write_json(tmp_path / "x.json", {"a": float("nan"), "b": (1, float("inf")), "c": None})
    assert json.loads((tmp_path / "x.json").read_text(), parse_constant=pytest.fail) == {
        "a": "nan",
        "b": [1, "inf"],
        "c": None,
    }
