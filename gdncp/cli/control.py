"""Rank 0 alone runs Hydra; the others follow.

`hydra.main` on every rank would make several run directories and let sweeps drift apart.  So rank 0 parses the command
line and, for every point, broadcasts the resolved configuration and the run directory; the others loop on that until
it says stop, which it does however it ends: `--help`, a typo and a failed point end in step on all ranks.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from gdncp import store
from gdncp.cli import config as conf
from gdncp.cli.inputs import find_input
from gdncp.cli.ranks import Ranks
from gdncp.cli.report import Screen
from gdncp.cli.run import run_point

USAGE_ERROR, RUN_FAILED = 2, 1


class Stop(NamedTuple):
    exit_code: int


class Point(NamedTuple):
    config: dict[str, Any]  # plain values: words for enums, nothing left to interpolate
    run_dir: str


def follow(ranks: Ranks) -> int:
    """Ranks other than 0: run what rank 0 says until it says stop."""
    while True:
        message: Stop | Point = ranks.broadcast()
        if isinstance(message, Stop):
            return message.exit_code
        run_point(message.config, Path(message.run_dir), ranks, screen=None)


def lead(ranks: Ranks, arguments: list[str]) -> int:
    """Rank 0: run Hydra on the command line; returns the exit code and has sent it to all."""
    exit_code = RUN_FAILED
    try:
        exit_code = _run_hydra(ranks, arguments)
    except conf.UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        exit_code = USAGE_ERROR
    except OSError as error:  # run_dir cannot be made, or the disk is full
        print(f"failed: {error}", file=sys.stderr)
    except SystemExit as end:  # how Hydra ends --help and its own errors
        exit_code = end.code if isinstance(end.code, int) else RUN_FAILED if end.code else 0
    finally:
        ranks.broadcast(Stop(exit_code))
    return exit_code


def _run_hydra(ranks: Ranks, arguments: list[str]) -> int:
    arguments, name, folders = conf.translate(arguments)
    conf.check(name, arguments)
    screen, outcomes = Screen(), []
    sweep_dir: Path | None = None

    @hydra.main(version_base="1.3", config_path=str(conf.CONF_DIR), config_name=name)
    def job(cfg: DictConfig) -> None:
        nonlocal sweep_dir
        hydra_config = HydraConfig.get()
        if hydra_config.mode == RunMode.MULTIRUN:
            sweep_dir = Path(hydra_config.sweep.dir).absolute()
            if (sweep_dir / "sweep.json").exists():
                raise FileExistsError(f"run_dir={sweep_dir} already holds a sweep; name another or remove it")
        run_dir = Path(hydra_config.runtime.output_dir).absolute()
        outcome = _run_one(ranks, cfg, run_dir, folders, screen)
        outcomes.append(outcome | {"overrides": list(hydra_config.overrides.task), "run_dir": str(run_dir)})

    program, sys.argv = sys.argv, [sys.argv[0], *arguments]
    try:
        with _errors_pass_through():
            job()
    finally:
        sys.argv = program
    if sweep_dir is not None:
        finish_sweep(sweep_dir, outcomes, screen)
    return 0 if all(outcome["ok"] for outcome in outcomes) else RUN_FAILED


@contextmanager
def _errors_pass_through() -> Iterator[None]:
    """Without this Hydra prints a shortened traceback of whatever a job raises and exits."""
    before = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = before


def _run_one(ranks: Ranks, cfg: DictConfig, run_dir: Path, folders: list[Path], screen: Screen) -> dict[str, Any]:
    """One point on all ranks.  What is wrong with it is its outcome, never an exception: a sweep goes on."""
    try:
        config = conf.plain(cfg)
        source = config["input"]
        if "path" in source:
            source["path"] = str(find_input(source["path"], Path.cwd(), *folders, conf.PACKAGE.parent))
        config["run_dir"] = str(run_dir)
        store.claim_run_dir(run_dir, OmegaConf.to_yaml(config))
    except (ValueError, OSError) as error:
        screen.failed(str(error))
        return {"ok": False, "error": str(error)}
    ranks.broadcast(Point(config, str(run_dir)))
    return run_point(config, run_dir, ranks, screen)


def finish_sweep(sweep_dir: Path, outcomes: list[dict[str, Any]], screen: Screen) -> None:
    """One table, best first and failures last, and the same as `sweep.json`."""
    ranked = sorted(outcomes, key=lambda outcome: (not outcome["ok"], outcome.get("seconds", 0.0)))
    keys = ("ok", "overrides", "seconds", "tokens_per_second", "stages", "sent", "error", "run_dir")
    points = [{key: outcome[key] for key in keys if key in outcome} for outcome in ranked]  # the rest: its report.json
    store.write_json(sweep_dir / "sweep.json", {"finished": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "points": points})
    screen.sweep(ranked, sweep_dir / "sweep.json")


def run(ranks: Ranks) -> int:
    """The exit code of the whole command, the same on every rank."""
    return lead(ranks, sys.argv[1:]) if ranks.is_leader else follow(ranks)
