"""Compile ahead, in parallel: engines that keep compiled kernels on disk make their first calls in other processes.

Head counts are compiled into kernels, and compiling them one after another would take most of a run's time.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from gdncp.bench.cases import Shape
from gdncp.bench.engines import Engine

# Kernels compiled side by side are kept; choices by time are not, since these processes slow each other down.
ENVIRONMENT = {"FLA_CACHE_RESULTS": "0"}


def jobs(engines: Sequence[Engine], shapes: Sequence[Shape]) -> list[tuple[str, str]]:
    """(library, head counts) of every process; peers first, which compile longest."""
    peers_first = sorted((engine for engine in engines if engine.compiles_to_disk), key=lambda engine: engine.ours)
    libraries = dict.fromkeys(engine.name.split(":")[0] for engine in peers_first)
    heads = dict.fromkeys(shape.heads for shape in shapes)
    return [(library, of_heads) for library in libraries for of_heads in heads]


def prepare(engines: Sequence[Engine], shapes: Sequence[Shape], arguments: Sequence[str], deadline: float) -> list[str]:
    """Run all jobs, as many at a time as there are cores to spare; returns a line for each that did not end well.

    What is not done at `deadline` (on time.monotonic()) is stopped: the run that follows compiles it itself.
    """

    def run(job: tuple[str, str]) -> str | None:
        library, heads = job
        command = [sys.executable, "-m", "gdncp.bench", "--only-first-calls", *arguments, "--engines", library]
        command += ["--shapes", *(str(shape) for shape in shapes if shape.heads == heads)]
        try:
            done = subprocess.run(
                command,
                env=os.environ | ENVIRONMENT,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                timeout=max(0.0, deadline - time.monotonic()),
            )
        except subprocess.TimeoutExpired:
            return f"{library} {heads}: stopped at the deadline"
        last = done.stderr.strip().splitlines()[-1:]
        return f"{library} {heads}: {' '.join(last)}" if done.returncode else None

    with ThreadPoolExecutor(max_workers=max(1, (os.cpu_count() or 2) - 1)) as pool:
        return [line for line in pool.map(run, jobs(engines, shapes)) if line]
