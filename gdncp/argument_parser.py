"""The command lines that argparse reads: how they say what is wrong."""

from __future__ import annotations

import argparse
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """Help from a module's docstring; an error is one line, without the usage, and exit code 2."""

    def __init__(self, prog: str, doc: str | None):
        summary, _, rest = (doc or "").partition("\n")
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(prog, description=summary, epilog=rest, formatter_class=formatter, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}\n")
