"""Results on disk: a file is complete or absent, whatever kills the process that writes it."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file


@contextmanager
def _appears_whole(path: Path, *, exclusive: bool = False) -> Iterator[Path]:
    """Yield a temporary name beside `path`; on leaving without an error, flush it to disk and give it its name.

    The temporary lies in the same directory, since a rename is atomic only within one file system.  A link is followed;
    what is there and is no file (a device, a pipe, a directory) is left alone, and OSError raised.
    """
    path = path.resolve()
    check_place(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.touch()
    mode = temporary.stat().st_mode  # as the umask wants it; safetensors makes files that only their owner may read
    try:
        yield temporary
        temporary.chmod(mode)
        with open(temporary, "rb") as handle:
            os.fsync(handle.fileno())
        if exclusive:
            os.link(temporary, path)  # unlike a rename, fails if the name is taken
        else:
            os.replace(temporary, path)
        _sync_directory(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _sync_directory(directory: Path) -> None:
    """Make a new name survive a power cut, on systems that let a directory be opened."""
    try:
        descriptor = os.open(directory, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_place(path: Path) -> None:
    """Raise OSError where no file can come to lie: what is there is none, or a folder above it is a file."""
    path = path.resolve()
    if path.exists() and not path.is_file():
        raise OSError(errno.EEXIST, "what is there is not a regular file", str(path))
    above = next(folder for folder in path.parents if folder.exists())
    if not above.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "a folder above it is a file", str(above))


def write_text(path: Path, text: str, *, exclusive: bool = False) -> None:
    """Write a text file.  `exclusive`: raise FileExistsError instead of replacing one."""
    with _appears_whole(path, exclusive=exclusive) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write JSON that any reader parses: NaN and infinities, which JSON lacks, become strings."""
    write_text(path, json.dumps(_strict(value), indent=2, allow_nan=False) + "\n")


def _strict(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    if isinstance(value, torch.Tensor):
        return _strict(value.tolist())
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, Any] | None = None) -> None:
    """Write a safetensors file; metadata values are stored as JSON text."""
    with _appears_whole(path) as temporary:
        save_file(
            {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()},
            temporary,
            {key: json.dumps(value) for key, value in (metadata or {}).items()},
        )


def claim_run_dir(run_dir: Path, config_yaml: str) -> None:
    """Make a run directory and put `config.yaml` in it, which marks it as taken.

    Raises:
        ValueError: another run has claimed it; results of two runs must not mix.
    """
    try:
        write_text(run_dir / "config.yaml", config_yaml, exclusive=True)
    except FileExistsError:
        raise ValueError(f"run_dir={run_dir} already holds a run; name another or remove it") from None
