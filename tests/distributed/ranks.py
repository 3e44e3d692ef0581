"""Run a function on every rank of a process group.

Ranks are processes that stay: one pool per world size and backend serves all tests, so that a test costs milliseconds.
A rank that fails costs its pool, and the next test that needs one gets a fresh pool.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

DEADLINE = 60.0  # seconds: a deadlocked exchange fails the test instead of hanging CI
_GRACE = 1.0  # once one rank failed, how long the others may take to say what they saw

# a rank starts in 0.1 s; under spawn, about 3 s.  `use_deterministic_algorithms` imports the third, for another 2 s
multiprocessing.set_forkserver_preload(["torch", "torch.distributed", "torch._inductor.config", "pytest"])
_processes = multiprocessing.get_context("forkserver")


@dataclass(frozen=True)
class Outcome:
    """What became of one rank's call."""

    value: Any = None
    error: str | None = None  # its traceback, or that it died
    at: float = 0.0  # when: clocks of processes on one machine agree


def _serve(rank: int, world_size: int, backend: str, rendezvous: str, calls: Connection) -> None:
    failure = None
    try:
        _join(rank, world_size, backend, rendezvous)
    except Exception:
        failure = Outcome(error=traceback.format_exc(), at=time.monotonic())
    while True:
        try:
            body, args = calls.recv()
        except EOFError:
            return  # the test process has gone or is done with this pool
        try:
            outcome = failure or Outcome(body(rank, *args))
        except Exception:
            outcome = Outcome(error=traceback.format_exc(), at=time.monotonic())
        calls.send(outcome)


def _join(rank: int, world_size: int, backend: str, rendezvous: str) -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)  # torch.empty comes back full of NaN
    if torch.cuda.is_available():
        torch.cuda.set_device(rank % torch.cuda.device_count())
    # a file, not a port: parallel test workers cannot collide
    dist.init_process_group(
        backend, f"file://{rendezvous}", rank=rank, world_size=world_size, timeout=timedelta(seconds=DEADLINE)
    )


class RankPool:
    """`world_size` processes in one process group that run what they are told, one call at a time."""

    def __init__(self, world_size: int, backend: str = "gloo"):
        self._scratch = tempfile.TemporaryDirectory(prefix="gdncp-ranks-")
        rendezvous = str(Path(self._scratch.name) / "rendezvous")
        self._calls: list[Connection] = []
        self._ranks = []
        for rank in range(world_size):
            mine, theirs = _processes.Pipe()
            process = _processes.Process(
                target=_serve, args=(rank, world_size, backend, rendezvous, theirs), daemon=True
            )
            process.start()
            theirs.close()  # so that a rank that dies is an end of file here
            self._calls.append(mine)
            self._ranks.append(process)

    def outcomes(self, body: Callable[..., Any], *args: Any) -> list[Outcome]:
        """What became of `body(rank, *args)` on every rank; `body` is a function of a module."""
        outcomes: list[Outcome | None] = [None] * len(self._calls)
        for call in self._calls:
            with suppress(BrokenPipeError):  # a rank that died between calls: the answer is an end of file
                call.send((body, args))
        end = time.monotonic() + 2 * DEADLINE
        while missing := [call for call, outcome in zip(self._calls, outcomes, strict=True) if outcome is None]:
            answered = wait(missing, timeout=max(0.0, end - time.monotonic()))
            if not answered:
                break
            for call in answered:
                assert isinstance(call, Connection)
                rank = self._calls.index(call)
                try:
                    outcomes[rank] = call.recv()
                except (EOFError, ConnectionResetError):
                    self._ranks[rank].join()
                    outcomes[rank] = Outcome(
                        error=f"rank {rank} died with exit code {self._ranks[rank].exitcode}", at=time.monotonic()
                    )
                if outcomes[rank].error is not None:
                    end = min(end, time.monotonic() + _GRACE)
        return [o or Outcome(error=f"rank {r} did not answer", at=float("inf")) for r, o in enumerate(outcomes)]

    def close(self) -> None:
        for process in self._ranks:
            process.terminate()
            process.join()
        self._scratch.cleanup()


_pools: dict[tuple[int, str], RankPool] = {}


def run_ranks(body: Callable[..., Any], world_size: int, *args: Any, backend: str = "gloo") -> list[Any]:
    """`body(rank, *args)` on every rank: the values by rank, or AssertionError with the traceback of the first failure.

    `body` is a function of a module; arguments and values must pickle.
    """
    key = world_size, backend
    if key not in _pools:
        _pools[key] = RankPool(world_size, backend)
    outcomes = _pools[key].outcomes(body, *args)
    errors = {outcome.at: (rank, outcome.error) for rank, outcome in enumerate(outcomes) if outcome.error is not None}
    if errors:
        _pools.pop(key).close()
        rank, error = errors[min(errors)]
        raise AssertionError(f"rank {rank} failed first:\n{error}")
    return [outcome.value for outcome in outcomes]
