"""What commands need beside what the library does."""

from __future__ import annotations

import importlib.util
import sys


def need(command: str, extra: str, *modules: str) -> None:
    """End the program with one line and exit code 2 where a module is missing; `extra`: of ours, that installs it."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        stop(command, f"{' and '.join(missing)} {'are' if len(missing) > 1 else 'is'} not installed.", extra)


def stop(command: str, reason: str, extra: str) -> None:
    print(f"python -m {command}: error: {reason}  pip install 'gdncp[{extra}]'", file=sys.stderr)
    sys.exit(2)
