"""`python -m gdncp.capture` where something is not there."""

import sys

import pytest

from gdncp import capture


@pytest.mark.parametrize(
    ("missing", "message"),
    [("transformers", "a model needs transformers"), ("text", "No such file or directory")],
)
def test_what_is_not_there_is_named_in_one_line(missing, message, tmp_path, monkeypatch, capsys):
    text = tmp_path / "text"
    if missing == "transformers":
        monkeypatch.setitem(sys.modules, "transformers", None)
        text.write_bytes(b"text")
    else:
        monkeypatch.setattr(capture, "load_model", lambda *_: (None, None))
    monkeypatch.setattr(sys, "argv", ["capture", "--out", str(tmp_path / "x.safetensors"), "--text", str(text)])
    with pytest.raises(SystemExit) as end:
        capture.main()
    said = capsys.readouterr().err
    assert end.value.code == 2 and message in said and len(said.splitlines()) == 1
