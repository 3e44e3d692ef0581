"""The command lines that argparse reads: how they say what is wrong."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

PLANNED = (
    *("seq_lens", "world_size", "ownership", "head_dim", "cp_chunk_len", "first_cp_chunk_len", "lanes_per_rank"),
    *("lanes_by", "checkpoint_every_n_tokens", "fixup", "fold_span", "finish", "head_half_lives", "forget_below"),
    *("require_reproducible", "profile"),
)  # arguments of `plan_prefill` that are options of the same name


class Parser(argparse.ArgumentParser):
    """Help from a module's docstring; an error is one line, without the usage, and exit code 2."""

    def __init__(self, prog: str, doc: str | None):
        summary, _, rest = (doc or "").partition("\n")
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(prog, description=summary, epilog=rest, formatter_class=formatter, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}\n")


def as_options(message: str, heads: str) -> str:
    """An error of `plan_prefill` as people know its arguments who gave options; `heads`: what they gave for --heads."""
    if re.match(r"num_[qkv]_heads", message):
        return f"--heads {heads}: {message}"
    long = "|".join(name for name in PLANNED if "_" in name)
    first = "|".join(PLANNED)  # short ones are words like others, but for the first in a message
    return re.sub(
        rf"(?<![\w-])({long})(?!\w)|^({first})(?!\w)", lambda found: "--" + found[0].replace("_", "-"), message
    )


def lanes(text: str) -> int | None:
    """--lanes-per-rank; None: auto."""
    if text == "auto":
        return None
    if not re.fullmatch(r"0*[1-9]\d*", text, re.ASCII):
        raise ValueError(f"--lanes-per-rank must be auto or a positive int, got {text!r}")
    return int(text)


def sequences(text: str) -> tuple[int, int] | None:
    """(tokens, how many) of "4096", "128K", "1M" or "128x20", 20 of 128 tokens; None: it is none of these."""
    match = re.fullmatch(r"(\d+)([KM]?)(?:x(\d+))?", text, re.ASCII)
    return match and (int(match[1]) * {"": 1, "K": 1 << 10, "M": 1 << 20}[match[2]], int(match[3] or 1))


def write_file(path: Path, text: str, option: str) -> None:
    """The file that an option names.  Raises ValueError, naming the option, where it cannot be written."""
    from gdncp import store  # imports torch

    try:
        store.write_text(path, text)
    except OSError as error:
        raise ValueError(f"{option} {path}: {error}") from None


def output_files(args: argparse.Namespace, options: Sequence[str]) -> dict[str, Path]:
    """Option -> the file that it names, of those that were given.

    Raises ValueError for an empty name, and where two are one file.
    """
    files: dict[str, Path] = {}
    for option in options:
        name = getattr(args, option.removeprefix("--").replace("-", "_"))
        if name is None:
            continue
        if not name:
            raise ValueError(f"{option} must name a file, got ''")
        files[option] = Path(name)
    for i, option in enumerate(files):
        for other in [*files][:i]:
            if files[option].resolve() == files[other].resolve():
                raise ValueError(f"{option} must be another file than {other}, got {files[option]} for both")
    return files
