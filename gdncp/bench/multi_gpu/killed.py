"""A rank is killed while ranks exchange: what the others say, and after how long.

The launcher starts the ranks itself, since torchrun would end the survivors.  Over NCCL three ways to be told, side by
side: by default, where a chain goes by mail (its kernel waits and ends by an assertion); states sent by NCCL (a
watchdog ends the process); and those with TORCH_NCCL_BLOCKING_WAIT=1, under which the call raises.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gdncp import store
from gdncp.bench.cases import Case, Shape
from gdncp.bench.multi_gpu.ours import Planned
from gdncp.bench.multi_gpu.presets import PRESETS
from gdncp.bench.multi_gpu.ranks import join
from gdncp.collectives.peer_memory import VARIABLE

GROUP_TIMEOUT = 10.0  # seconds
START_LIMIT, END_LIMIT = 35.0, 40.0  # seconds for ranks to begin, and for survivors to end
WAYS = {
    "default": {},
    "by NCCL": {VARIABLE: "0"},
    "by NCCL, blocking wait": {VARIABLE: "0", "TORCH_NCCL_BLOCKING_WAIT": "1"},
}
TELLING = ("broke off", "Watchdog", "terminate called", "what():", "Error")


def run(folder: Path, world_size: int, backend: str, preset: str, budget: float) -> int:
    """Write killed.json; returns the exit code."""
    found: dict[str, Any] = {"part": "killed", "status": "done", "failures": [], "skipped": [], "backend": backend}
    found |= {"world_size": world_size, "group_timeout_s": GROUP_TIMEOUT}
    logs = folder.parent / "logs" / "killed"
    if world_size < 2:
        found["skipped"].append("a rank killed: one rank leaves no survivors")
    else:
        start_by = time.monotonic() + min(budget, START_LIMIT)

        def one_way(way: str) -> dict[str, Any] | None:
            ranks = Processes(world_size, backend, preset, WAYS[way], logs / way)
            try:
                return ranks.kill_last(start_by)
            except RuntimeError as error:
                found["failures"].append(f"{way}: {error}")
                return None
            finally:
                ranks.stop()

        ways = list(WAYS) if backend == "nccl" else ["default"]
        with ThreadPoolExecutor() as pool:  # side by side: most of it is waiting
            answers = dict(zip(ways, pool.map(one_way, ways), strict=True))
        found["ways"] = {way: said for way, said in answers.items() if said is not None}
    store.write_json(folder / "killed.json", found)
    for way, said in found.get("ways", {}).items():
        for survivor in said["survivors"]:
            print(f"killed, {way}: rank {survivor['rank']} after {survivor['seconds']} s: {survivor['said'][:200]}")
    return 1 if found["failures"] else 0


def assertions(lines: Sequence[str]) -> list[str]:
    """Of kernels; without the folder of the source."""
    return [re.sub(r"^\S*/", "", line) for line in lines if "Assertion" in line]


class Processes:
    """Processes that prefill over and over; their output goes to files."""

    def __init__(self, size: int, backend: str, preset: str, more: dict[str, str], logs: Path):
        logs.mkdir(parents=True, exist_ok=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._logs, self._ranks = [logs / f"{rank}" for rank in range(size)], []
        for rank, log in enumerate(self._logs):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_PORT": port}
            environment = os.environ | more | {key: str(value) for key, value in place.items()}
            command = [sys.executable, "-m", "gdncp.bench.multi_gpu.killed", preset, backend]
            with log.open("w") as out:
                self._ranks.append(
                    subprocess.Popen(
                        command, env=environment | {"MASTER_ADDR": "127.0.0.1"}, stdout=out, stderr=subprocess.STDOUT
                    )
                )

    def kill_last(self, start_by: float) -> dict[str, Any]:
        """SIGKILL for the last rank once all are under way; the others' words and delays.  RuntimeError if one ends."""
        while not all('"ready"' in log.read_text() for log in self._logs):
            ended = [rank.returncode for rank in self._ranks if rank.poll() is not None]
            if ended or time.monotonic() > start_by:
                last = [line for log in self._logs for line in log.read_text().splitlines()[-1:]]
                raise RuntimeError(f"ranks did not get under way (exit codes {ended}): {last}")
            time.sleep(0.1)
        self._ranks[-1].send_signal(signal.SIGKILL)
        killed = time.monotonic()
        seen: dict[int, float] = {}  # rank -> seconds until it ended
        while len(seen) < len(self._ranks) - 1 and time.monotonic() < killed + END_LIMIT:
            for number, rank in enumerate(self._ranks[:-1]):
                if number not in seen and rank.poll() is not None:
                    seen[number] = time.monotonic() - killed
            time.sleep(0.02)
        survivors = [self._survivor(rank, killed, seen.get(rank)) for rank in range(len(self._ranks) - 1)]
        return {"killed_rank": len(self._ranks) - 1, "survivors": survivors}

    def _survivor(self, rank: int, killed: float, ended: float | None) -> dict[str, Any]:
        text = self._logs[rank].read_text(errors="replace")
        lines = text.splitlines()
        row = {"rank": rank, "exit_code": self._ranks[rank].poll(), "ended_after_s": ended and round(ended, 2)}
        raised = [json.loads(line) for line in lines if line.startswith('{"raised"')]
        if raised:
            words = [*assertions(lines)[:1], raised[0]["raised"]]  # a kernel's first
            return row | {"seconds": round(raised[0]["at"] - killed, 2), "said": " ".join(words), "raised": True}
        telling = [line for line in lines if any(word in line for word in TELLING)]
        said = " ".join(telling[:3])[:1500] or f"nothing within {END_LIMIT:.0f} s"
        return row | {"seconds": row["ended_after_s"], "said": said, "raised": False}

    def stop(self) -> None:
        for rank in self._ranks:
            rank.kill()
            rank.wait()


def rank_main(arguments: Sequence[str]) -> None:
    """One rank: prefill until something breaks, and say what."""
    name, backend = arguments
    preset = PRESETS[name]
    with join(backend, float("inf")) as ranks, torch.no_grad():
        group = dist.new_group(timeout=timedelta(seconds=GROUP_TIMEOUT))
        case = Case(Shape(preset.lengths[0], 1, *preset.heads[0], preset.head_dim), "one", preset.dtype, ranks.device)
        sets = [case.tokens(seed=1)]
        Planned(ranks, case, sets, preset, 1).calls[0]()  # compiling may take longer than the timeout: first alone
        ours = Planned(ranks, case, sets, preset, ranks.size)
        assert ours.plan.crosses_ranks
        ours.group = group
        (call,) = ours.calls
        ranks.synchronize()
        ranks.together("compiled")
        calls = 0
        try:
            while True:
                call()
                ranks.synchronize()
                calls += 1
                if calls == 3:
                    print(json.dumps({"ready": ranks.rank}), flush=True)
        except Exception as error:
            print(json.dumps({"raised": f"{type(error).__name__}: {error}", "at": time.monotonic()}), flush=True)
            os._exit(1)  # a group that has lost a rank cannot be taken down in step


if __name__ == "__main__":
    rank_main(sys.argv[1:])
