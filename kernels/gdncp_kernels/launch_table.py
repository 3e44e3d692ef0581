"""How the plain Triton kernels are launched: a table per architecture.  Never tuned at run time: ranks must not differ.

`launch_tables/sm_NN.json` holds the table of compute capability N.N; `python -m gdncp.tune` writes one on a GPU.  A GPU
whose architecture has no table takes the nearest lower one, and `describe` says so.  GDNCP_LAUNCH_TABLE, read once a
process, is the path of a file to use instead; it must be for the GPU's architecture and the same on every rank, which
ranks compare with their plans.

A table's rows are read from the top and the first that matches wins; `precision`, `k_dim` and `v_dim` match anything
where a row leaves them out.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from triton.runtime import driver

FOLDER = Path(__file__).parent / "launch_tables"
VARIABLE = "GDNCP_LAUNCH_TABLE"
KERNELS = ("precompute_t", "chunk_bounds", "cut", "scan", "fold", "cp_prefill")
SCANS = ("scan", "cp_prefill")
BLOCKED = ("fold", *SCANS)
PRECISIONS = ("tf32", "ieee")
_ALLOWED = {
    "num_warps": (1, 2, 4, 8, 16, 32),
    "num_stages": (1, 2, 3, 4, 5, 6, 7, 8),
    "block": (16, 32, 64, 128, 256),
    "slice": (None, 16, 32, 64, 128, 256),
}


class Choice(NamedTuple):
    """How one kernel is launched."""

    num_warps: int
    num_stages: int
    block: int  # state rows that a program holds (fold: columns and summands); 0 where a kernel has no such thing
    slice: int  # of K that a scan's dot takes at once: fewer registers, more instructions

    @property
    def options(self) -> dict[str, Any]:
        """For the compiler.  Fused multiply-adds are asked for because Triton's default differs by release."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": True}


@dataclass(frozen=True)
class Row:
    """A choice, and the launches that it is for."""

    kernel: str
    num_warps: int
    num_stages: int = 1
    block: int | None = None
    slice: int | None = None  # None: all of K
    precision: str | None = None
    k_dim: int | None = None
    v_dim: int | None = None
    note: str | None = None  # for readers only

    def matches(self, kernel: str, k_dim: int, v_dim: int, precision: str) -> bool:
        return (
            self.kernel == kernel
            and self.precision in (None, precision)
            and self.k_dim in (None, k_dim)
            and self.v_dim in (None, v_dim)
        )


@dataclass(frozen=True)
class LaunchTable:
    arch: int  # 80, 90, ...
    made_by: str
    rows: tuple[Row, ...]
    source: str = ""  # the file it was read from

    def choice(self, kernel: str, k_dim: int, v_dim: int, precision: str) -> Choice:
        """Raises ValueError where no row matches."""
        for row in self.rows:
            if row.matches(kernel, k_dim, v_dim, precision):
                # a block divides both dims, because transitions are scanned in blocks of K rows
                block, slice_ = min(row.block or 0, k_dim, v_dim), min(row.slice or k_dim, k_dim)
                return Choice(row.num_warps, row.num_stages, block, slice_)
        launch = f"kernel {kernel!r}, precision {precision!r}, K = {k_dim}, V = {v_dim}"
        raise ValueError(f"launch table {self.source} has no row for {launch}")

    def preferring(self, rows: tuple[Row, ...]) -> LaunchTable:
        return replace(self, rows=rows + self.rows)

    def to_json(self) -> str:
        """One row a line, without what a row leaves out."""
        rows = [{f.name: v for f in fields(Row) if (v := asdict(row)[f.name]) is not None} for row in self.rows]
        lines = ",\n".join(f"    {json.dumps(row)}" for row in rows)
        head = f'  "arch": "sm_{self.arch}",\n  "made_by": {json.dumps(self.made_by)},'
        return f'{{\n{head}\n  "rows": [\n{lines}\n  ]\n}}\n'


def parse_arch(text: str) -> int:
    """80 of "sm_80"."""
    if not text.startswith("sm_") or not text[3:].isdigit():
        raise ValueError(f"arch must look like 'sm_90', got {text!r}")
    return int(text[3:])


def read_table(path: Path) -> LaunchTable:
    """Raises ValueError that names the file and what is wrong with it."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        rows = tuple(_checked(Row(**row)) for row in data["rows"])
        return LaunchTable(parse_arch(data["arch"]), str(data["made_by"]), rows, str(path))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"launch table {path} cannot be used: {type(error).__name__}: {error}") from error


def _checked(row: Row) -> Row:
    if row.kernel not in KERNELS:
        raise ValueError(f"kernel must be one of {', '.join(KERNELS)}, got {row.kernel!r}")
    if row.precision not in (None, *PRECISIONS):
        raise ValueError(f"precision must be one of {', '.join(PRECISIONS)}, got {row.precision!r}")
    for name, allowed in _ALLOWED.items():
        value = getattr(row, name)
        if (name == "block" and row.kernel not in BLOCKED) or (name == "slice" and row.kernel not in SCANS):
            allowed = (None,)
        if value not in allowed:
            raise ValueError(f"{name} of {row.kernel} must be one of {', '.join(map(str, allowed))}, got {value!r}")
    return row


@cache
def table_of(arch: int) -> LaunchTable:
    """The table that GPUs of this architecture use.  Raises ValueError where there is none."""
    if path := os.environ.get(VARIABLE):
        table = read_table(Path(path))
        if table.arch != arch:
            raise ValueError(f"{VARIABLE}={path} is a table for sm_{table.arch}, but the GPU is sm_{arch}")
        return table
    lower = [a for a in shipped_archs() if a <= arch]
    if not lower:
        raise ValueError(f"no launch table for sm_{arch} or below; there are {', '.join(map(str, shipped_archs()))}")
    return read_table(FOLDER / f"sm_{max(lower)}.json")


@cache
def shipped_archs() -> tuple[int, ...]:
    return tuple(sorted(parse_arch(path.stem) for path in FOLDER.glob("sm_*.json")))


def describe(arch: int) -> str:
    """Which table GPUs of this architecture use, in words."""
    table = table_of(arch)
    why = ""
    if table.arch != arch:
        why = f", the nearest below sm_{arch}, which has none of its own"
    elif os.environ.get(VARIABLE):
        why = f", as {VARIABLE} says"
    return f"sm_{table.arch} ({Path(table.source).name}: {table.made_by}){why}"


def current_arch() -> int:
    """Of the current GPU; in Triton's interpreter the lowest that has a table."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return shipped_archs()[0]
    return _arch_of_device(driver.active.get_current_device())


@cache
def _arch_of_device(device: int) -> int:
    return int(driver.active.get_current_target().arch)


_instead: LaunchTable | None = None


@contextmanager
def using(table: LaunchTable) -> Iterator[None]:
    """Every launch inside looks its choice up in this table."""
    global _instead
    before, _instead = _instead, table
    _choose.cache_clear()
    try:
        yield
    finally:
        _instead = before
        _choose.cache_clear()


def choose(kernel: str, k_dim: int, v_dim: int, precision: str) -> Choice:
    """How to launch a kernel on the current GPU."""
    return _choose(current_arch(), kernel, k_dim, v_dim, precision)


@cache
def _choose(arch: int, kernel: str, k_dim: int, v_dim: int, precision: str) -> Choice:
    return (_instead or table_of(arch)).choice(kernel, k_dim, v_dim, precision)
