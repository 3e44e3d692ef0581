"""A machine: GPUs in nodes, links within and between nodes, and what an exchange over them takes."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import replace

from gdncp.plan.profiles import LINKS, CostProfile, Link
from gdncp.simulate.engine import Engine, Event, Resource
from gdncp.simulate.gpu import Gpu


def parse_link(name: str, text: str) -> Link:
    """A link's name, or MICROSECONDS:GBYTES_PER_S, as 10:50."""
    if text in LINKS:
        return LINKS[text]
    try:
        micros, gigabytes = map(float, text.split(":"))
    except ValueError:
        micros, gigabytes = -1.0, 0.0
    if not (0 <= micros < float("inf") and 0 < gigabytes < float("inf")):
        raise ValueError(f"{name} must be {', '.join(LINKS)}, or MICROSECONDS:GBYTES_PER_S, as 10:50, got {text!r}")
    return Link(micros / 1e6, gigabytes * 1e9)


def with_topology(
    profile: CostProfile, gpus_per_node: int | None = None, link: Link | None = None, node_link: Link | None = None
) -> CostProfile:
    """The profile with another topology; None leaves a part as it is."""
    if gpus_per_node is not None:
        profile = replace(profile, ranks_per_node=gpus_per_node)
    if link is not None:
        # memory is mapped over NVLink, at the speed of the link
        mail = profile.mail_s if link in (LINKS["nvlink4"], LINKS["nvlink5"]) else 0.0
        profile = replace(profile, message_s=link.message_s, bytes_per_s=link.bytes_per_s, mail_s=mail)
    if node_link is not None:
        profile = replace(profile, node_message_s=node_link.message_s, node_bytes_per_s=node_link.bytes_per_s)
    return profile


class _Port:
    """One rank's end of a link: what leaves and what comes in do not disturb each other."""

    def __init__(self, engine: Engine) -> None:
        self.out, self.into = Resource(engine), Resource(engine)


class _Meeting:
    """A collective that some ranks have reached."""

    def __init__(self) -> None:
        self.joined = 0
        self.done = Event()


Message = tuple[int, int]  # peer, bytes


class Machine:
    """Ranks with a GPU each and ports to the others; counts what crosses."""

    def __init__(self, profile: CostProfile, world_size: int) -> None:
        self.engine = Engine()
        self.profile = profile
        self.world_size = world_size
        self.gpus = [Gpu(self.engine, profile.workers) for _ in range(world_size)]
        self._near = [_Port(self.engine) for _ in range(world_size)]
        self._far = [_Port(self.engine) for _ in range(world_size)]
        self._posted: dict[tuple[int, int], deque[tuple[bool, int, Event]]] = defaultdict(deque)
        self._meetings: dict[str, _Meeting] = defaultdict(_Meeting)
        self.arrivals: dict[tuple[int, int], Event] = defaultdict(Event)  # of states by mail: sequence, depth
        self.bytes_sent = [0] * world_size
        self.bytes_received = [0] * world_size
        self.messages_sent = [0] * world_size

    @property
    def one_node(self) -> bool:
        return self.world_size <= self.profile.ranks_per_node

    def node(self, rank: int) -> int:
        return rank // self.profile.ranks_per_node

    # ---- point to point

    def exchange(self, rank: int, sends: Sequence[Message], receives: Sequence[Message]) -> list[Event]:
        """Post messages; between a pair of ranks they match in order.  One starts once both ends have posted it, as in
        NCCL, and an exchange is over with the last of its events.  To oneself: nothing."""
        events = [self._post(rank, peer, size, is_send=True) for peer, size in sends if peer != rank]
        return events + [self._post(peer, rank, size, is_send=False) for peer, size in receives if peer != rank]

    def _post(self, source: int, target: int, size: int, *, is_send: bool) -> Event:
        posted = self._posted[source, target]
        if not posted or posted[0][0] == is_send:
            posted.append((is_send, size, Event()))
            return posted[-1][2]
        _, other, event = posted.popleft()
        if other != size:
            raise RuntimeError(f"rank {source} and rank {target} disagree about a message: {other} and {size} bytes")
        near = self.node(source) == self.node(target)
        ports = self._near if near else self._far
        profile = self.profile
        rate, latency = (
            (profile.bytes_per_s, profile.message_s) if near else (profile.node_bytes_per_s, profile.node_message_s)
        )
        self.count(source, 1, size, 0)
        self.count(target, 0, 0, size)
        # each end at its own pace: what waits at one port keeps nothing from another
        stop = max(port.serve(size / rate) for port in (ports[source].out, ports[target].into))
        return self.engine.at(stop + latency, event)

    def mail(self, source: int, target: int, size: int, sequence: int, depth: int) -> None:
        """A state left for the link at `depth`, which waits for it in `arrivals`."""
        stop = self.engine.now
        if source != target:
            self.count(source, 1, size, 0)
            self.count(target, 0, 0, size)
            stop = self._near[source].out.serve(size / self.profile.bytes_per_s)
        self.engine.at(stop + self.profile.mail_s, self.arrivals[sequence, depth])

    def count(self, rank: int, messages: int, sent: int, received: int) -> None:
        self.messages_sent[rank] += messages
        self.bytes_sent[rank] += sent
        self.bytes_received[rank] += received

    # ---- collectives

    def meet(self, name: str, seconds: float) -> Event:
        """A collective that all ranks call under one name: it starts once the last has come, and ends for all."""
        meeting = self._meetings[name]
        meeting.joined += 1
        if meeting.joined == self.world_size:
            self.engine.at(self.engine.now + seconds, meeting.done)
        return meeting.done

    def all_gather_seconds(self, size: int) -> float:
        """`size` bytes a rank; a ring whose rails between nodes run side by side, at half their peak."""
        profile = self.profile
        rate = profile.bytes_per_s
        if not self.one_node:
            rate = min(rate, profile.node_bytes_per_s * max(profile.ranks_per_node / 2, 1))
        return profile.collective_s + profile.message_s + (self.world_size - 1) * size / rate

    def all_to_all_seconds(self, sent: Sequence[int], taken: Sequence[int]) -> float:
        """Rank r sends `sent[r] * taken[p]` bytes to rank p; the slowest rank's ports decide.

        Ports within and between nodes work side by side.  What the profile says of one more peer is for two of these.
        """
        profile, world = self.profile, self.world_size
        nodes = self.node(world - 1) + 1
        sent_of, taken_of, sending, taking = ([0] * nodes for _ in range(4))
        for rank in range(world):
            node = self.node(rank)
            sent_of[node] += sent[rank]
            taken_of[node] += taken[rank]
            sending[node] += sent[rank] > 0
            taking[node] += taken[rank] > 0
        all_taken, all_sent, all_taking, all_sending = map(sum, (taken_of, sent_of, taking, sending))
        slowest = 0.0
        for rank in range(world):
            node = self.node(rank)
            near = max(sent[rank] * (taken_of[node] - taken[rank]), taken[rank] * (sent_of[node] - sent[rank]))
            far = max(sent[rank] * (all_taken - taken_of[node]), taken[rank] * (all_sent - sent_of[node]))
            peers = max(
                (sent[rank] > 0) * (all_taking - taking[node]), (taken[rank] > 0) * (all_sending - sending[node])
            )
            slowest = max(
                slowest,
                near / profile.bytes_per_s,
                far / profile.node_bytes_per_s + peers * profile.node_peer_s / 2,
            )
        latency = profile.message_s if self.one_node else max(profile.message_s, profile.node_message_s)
        return profile.collective_s + latency + slowest
