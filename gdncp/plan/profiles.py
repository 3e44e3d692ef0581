"""What machines take, in seconds and bytes: the numbers of the cost model.

They are in `gdncp/plan/machines/`, a JSON file a machine, each number with its source.  `python -m gdncp.calibrate`
measures a machine and writes such a file, which goes wherever the name of a profile does.
"""

from __future__ import annotations

import difflib
import json
import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

MACHINES = Path(__file__).with_name("machines")
ONE_NODE = 1 << 30  # ranks of a node, of a machine that is one


@dataclass(frozen=True)
class CostProfile:
    """What one machine takes with one kernel set.  "One tile" is a 64-token chunk of one head with head_dim 128.

    Stages 2 and 4 are launches of units, each on one worker: an N and an M, or the outputs, of a CP chunk and head.  A
    worker takes the next unit as soon as it is free, so a partial wave costs a whole one.
    """

    name: str
    workers: int  # units that run side by side: SMs of a GPU; 1 where one call uses the whole device
    opens: bool  # stage 2's launch also runs stage 4 of first CP chunks (`gdncp.backends.base.OpeningBackend`)
    folds_runs: bool  # one launch folds whole runs (`gdncp.backends.base.RunFold`); a chain then sends whole states
    launch_s: float  # starting a stage
    unit_s: float  # a unit's own start and end
    tile_t_s: float  # stage 1, which fills the workers however it is cut: per chunk and state head
    key_tile_t_s: float  # and per chunk and key head
    tile_n_s: float  # stage 2, the scan of N
    tile_m_s: float  # stage 2, the scan of M
    tile_prefill_s: float  # stage 4
    forget_bits: float  # −log2 of the `forget_below` that a call takes by default
    fold_launch_s: float  # starting one step of a fold
    fold_head_s: float  # folding one map of one head into a state
    collective_s: float  # starting a collective
    message_s: float  # one message between ranks of a node
    bytes_per_s: float  # of one rank, within a node
    ranks_per_node: int  # `ONE_NODE`: all, however many
    node_message_s: float  # one message between nodes
    node_peer_s: float  # one more peer of an all-to-all between nodes
    node_bytes_per_s: float  # of one rank, between nodes
    # handing a state on inside a fold to another rank of the node (`gdncp.collectives.peer_memory`), its bytes apart;
    # 0: chains exchange messages
    mail_s: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self)[1:]:
            value = getattr(self, field.name)
            whole, rate = field.type == "int", field.name.endswith("bytes_per_s")
            if field.type == "bool":
                right, allowed = isinstance(value, bool), "true or false"
            else:
                number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
                right = number and (value > 0 if whole or rate else value >= 0) and value < math.inf
                allowed = f"a {'positive' if whole or rate else 'non-negative'} {'int' if whole else 'finite number'}"
            if not right:
                raise ValueError(f"profile {self.name!r}: {field.name} must be {allowed}, got {value!r}")

    def costs(self) -> dict[str, Any]:
        """All but the name, as a profile's file has them."""
        return {name: value for name, value in asdict(self).items() if name != "name"}


class Link(NamedTuple):
    """What a message takes: message_s + bytes / bytes_per_s."""

    message_s: float
    bytes_per_s: float  # of one rank, one way


def read_profile(path: Path) -> CostProfile:
    """A profile from its file: {"name": ..., "costs": {field: number}}; what else is there is for people.

    Raises ValueError, naming the file and what is wrong with it.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"profile {path}: {error}") from None
    name, costs = (document.get(key) if isinstance(document, dict) else None for key in ("name", "costs"))
    if not (isinstance(name, str) and isinstance(costs, dict)):
        raise ValueError(f'profile {path} must be JSON as {{"name": "...", "costs": {{...}}}}')
    known = {field.name for field in fields(CostProfile)} - {"name"}
    needed = known - {"mail_s"}
    for words, what in ((needed - costs.keys(), "has no"), (costs.keys() - known, "has an unknown")):
        if words:
            raise ValueError(f"profile {path} {what} {', '.join(sorted(words))}")
    return CostProfile(name, **costs)


def find_profile(profile: str | Path | CostProfile, argument: str = "profile") -> CostProfile:
    """The shipped profile of that name, one from a .json file, or the profile itself.

    A file is read each time.  Raises ValueError, naming `argument`, where there is no such thing.
    """
    if isinstance(profile, CostProfile):
        return profile
    if isinstance(profile, str) and profile in PROFILES:
        return PROFILES[profile]
    if isinstance(profile, Path) or (isinstance(profile, str) and profile.endswith(".json")):
        return read_profile(Path(profile))
    near = difflib.get_close_matches(profile, PROFILES, n=1) if isinstance(profile, str) else []
    hint = f"; did you mean {near[0]!r}?" if near else ""
    names = ", ".join(map(repr, PROFILES))
    raise ValueError(f"{argument} must be one of {names}, or a path to a .json file, got {profile!r}{hint}")


def default_profile(device_type: str) -> str:
    """The name of the shipped profile for a device that nobody has calibrated."""
    return "h200" if device_type == "cuda" else "cpu"


PROFILES = {name: read_profile(MACHINES / f"{name}.json") for name in ("cpu", "h200")}
LINKS = {
    name: Link(link["message_s"], link["bytes_per_s"])
    for name, link in json.loads((MACHINES / "links.json").read_text(encoding="utf-8")).items()
}
