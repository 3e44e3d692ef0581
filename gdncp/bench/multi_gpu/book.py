"""What a part found, on disk after every case: tables of rows, what failed, what was skipped."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gdncp import store
from gdncp.bench.multi_gpu.ranks import Ranks
from gdncp.bench.run import summary_of


class Book:
    """Rank 0 writes; the others keep the same entries in step and write nothing."""

    def __init__(self, part: str, folder: Path, ranks: Ranks):
        self.part, self.ranks, self.folder = part, ranks, folder
        self._path = folder / f"{part}.json"
        folder.mkdir(parents=True, exist_ok=True)
        self._begun = time.monotonic()
        self.found: dict[str, Any] = {"part": part, "status": "running", "failures": [], "skipped": [], "absent": {}}
        self.found |= {"world_size": ranks.size, "backend": ranks.backend, "device": str(ranks.device.type)}
        self.save()

    def add(self, table: str, row: Any) -> None:
        self.found.setdefault(table, []).append(row)
        self.save()

    def put(self, name: str, value: Any) -> None:
        self.found[name] = value
        self.save()

    def skip(self, what: str, why: str = "the time budget was spent") -> None:
        self.found["skipped"].append(f"{what}: {why}")
        self.save()

    def room_for(self, what: str) -> bool:
        """Whether there is time for another case; else it is noted as skipped.  A collective."""
        if not self.ranks.out_of_time():
            return True
        self.skip(what)
        return False

    @contextmanager
    def failures_of(self, what: str) -> Iterator[None]:
        """An exception is noted and the run goes on.  A device that is gone raises here, and ends the part."""
        try:
            yield
        except Exception as error:
            self.found["failures"].append(f"{what}: {summary_of(error)}")
            self.say(f"{what}: FAILED, {summary_of(error)}")
            self.save()
            self.ranks.synchronize()

    def end(self) -> None:
        self.found["status"] = "done"
        self.save()

    def save(self) -> None:
        self.found["seconds"] = round(time.monotonic() - self._begun, 1)
        if self.ranks.rank == 0:
            store.write_json(self._path, self.found)

    def say(self, text: str) -> None:
        if self.ranks.rank == 0:
            print(f"{time.monotonic() - self._begun:7.1f} s  {self.part}: {text}", flush=True)
