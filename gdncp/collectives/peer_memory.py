"""Mailboxes: memory of each rank that its peers have mapped, where one kernel leaves a state for a peer's kernel.

A transport of chains, between GPUs of one host that reach each other's memory: nothing is exchanged between launches;
the fold of one rank writes what it hands on, and the fold of the next waits for it.

A message is one state [H, V, K] fp32.  It is cut into channels, CHANNEL_ROWS rows of one head each, which need nothing
of one another, however many of them a program takes.  Between an ordered pair of ranks channel c is a queue with two
places, whatever plan uses it: the e-th to be sent lies in place e mod 2.  Four counts a channel say how far it is:

    at the sender    SENT      what it has sent; only its own programs look
                     READ      what the receiver has read; the receiver writes it
    at the receiver  WRITTEN   what has arrived; the sender writes it
                     RECEIVED  what it has received; only its own programs look

The sender's program takes e = SENT + 1, waits until READ >= e − 2 (nobody reads place e mod 2 any more), writes the
rows, then WRITTEN = e at the receiver.  The receiver's takes e = RECEIVED + 1, waits until WRITTEN >= e, reads the
rows, then writes READ = e at the sender.  Counts lie in device memory, so that a CUDA graph can be replayed.  They have
32 bits and wrap: they are compared by the sign of their difference, and 2³² is even, so places go on alternating.

Nothing waits for ever.  Number each launch of a rank by (call, round of `schedule.chain_rounds`).  A rank enqueues its
launches in this order on one stream, and all ranks make the same calls over a group in the same order.  A program waits
for WRITTEN, which a launch of an earlier round of the same call writes, and for READ of two messages before on its
channel, which a launch of an earlier call writes, since a call uses a channel once.  So it waits for launches with
smaller numbers only, never for its own: by induction all launches end, in whatever order their programs get SMs.
`in_order` sees to the order of calls on several streams; that of a graph's replays among calls and other replays is up
to who replays them.  Kernels
that wait may hold all SMs, so two groups that share GPUs must not have calls under way at once, as with NCCL.

A peer that is gone: who waits for longer than the group's timeout ends its kernel by a device-side assertion.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from gdncp.collectives.agreement import agree, timeout_of
from gdncp.collectives.schedule import most_messages
from gdncp.collectives.wire import backend_of, is_capturing
from gdncp.plan import PrefillPlan

NAME = "peer memory"  # of the transport, in reports
VARIABLE = "GDNCP_PEER_MEMORY"
SETTINGS = {"auto": "between GPUs of one host over NCCL", "0": "never", "1": "or raise"}
MOST_BYTES = 1 << 28  # of a rank's mailboxes; plans with so many messages that they need more send them by NCCL

CHANNEL_ROWS = 8  # what the fold cuts V at
PLACE_BYTES = CHANNEL_ROWS * 128 * 4  # of rows of up to 128 fp32: the same for every plan, which may alternate
PLACES = 2


class Count:
    """Rows of [COUNTS, channels] int32, WORDS_BYTES into a rank's memory; [channels, PLACES] places follow."""

    WRITTEN, READ, SENT, RECEIVED = range(4)


COUNTS = 4
WORDS_BYTES = 128  # the first word: whether a program has given up waiting


class Table:
    """What kernels are told: one int64 each, then the address of every rank's memory as it is mapped here."""

    NUM_CHANNELS, CAPACITY, OWN_RANK, TIMEOUT, OWN, BASES = range(6)


def table_of(rank: int, capacity: int, timeout_ns: int, addresses: Sequence[int]) -> list[int]:
    """For rank `rank`; addresses: of every rank's memory, as this one sees them."""
    numbers = [0] * Table.BASES
    numbers[Table.NUM_CHANNELS] = len(addresses) * capacity
    numbers[Table.CAPACITY] = capacity
    numbers[Table.OWN_RANK] = rank
    numbers[Table.TIMEOUT] = timeout_ns
    numbers[Table.OWN] = addresses[rank]
    return [*numbers, *addresses]


class Mailboxes:
    """A group's, as one rank sees them.  Channel c to or from rank r is number r · capacity + c in its memory."""

    def __init__(self, capacity: int, table: torch.Tensor, memory: tuple[Any, ...] = ()):
        """table: [Table.BASES + world size] int64 on the device; memory: kept, ours and the peers' as mapped here."""
        self.capacity = capacity  # channels between an ordered pair of ranks
        self.address = table.data_ptr()  # what kernels get
        self._keep = (table, *memory)


def memory_bytes(world_size: int, capacity: int) -> int:
    """Of one rank."""
    return WORDS_BYTES + world_size * capacity * (4 * COUNTS + PLACES * PLACE_BYTES)


@lru_cache(256)  # plans are compared by their digest
def channels_of(plan: PrefillPlan, num_heads: int, v_dim: int) -> int:
    """Between a pair of ranks, of a plan whose chain can leave states in mailboxes; 0: of one whose chain cannot.

    Not where heads are divided among lanes, whose chains run side by side; nor where stage 4 begins beside the
    exchange: programs that wait would keep it from the SMs.
    """
    if plan.fixup != "chain" or plan.finish != "entry_first" or len(plan.head_groups) > 1:
        return 0
    return most_messages(plan) * num_heads * (v_dim // CHANNEL_ROWS)


def setting() -> str:
    """What GDNCP_PEER_MEMORY says; ValueError for what it may not say."""
    value = os.environ.get(VARIABLE) or "auto"
    if value not in SETTINGS:
        raise ValueError(f"{VARIABLE} must be one of {', '.join(SETTINGS)}, got {value!r}")
    return value


def mailboxes_of(group: dist.ProcessGroup, device: torch.device, num_channels: int) -> Mailboxes | None:
    """With at least so many channels between a pair of ranks; None: states go by messages.

    All ranks call it before each exchange, with the same number.  The first time, and where a plan needs more than
    there are, they agree on what they can, and make them; on the host, and never while a CUDA graph is captured.

    Raises:
        RuntimeError: there are none yet and a CUDA graph is captured; GDNCP_PEER_MEMORY=1 and they cannot be had, on
            every rank; a peer failed meanwhile.
        ValueError: GDNCP_PEER_MEMORY is not in `SETTINGS`, or not the same on every rank.
    """
    peers = _peers.get(group)
    if peers is None or peers.device != device:
        peers = _peers[group] = _Peers(device)
    boxes = peers.boxes
    if boxes is None or boxes.capacity < num_channels:
        boxes = peers.more(group, num_channels)
    if boxes is not None:
        peers.in_order()
    return boxes


class _Peers:
    """What a group can do on one device, and its mailboxes."""

    def __init__(self, device: torch.device):
        self.device = device
        self.boxes: Mailboxes | None = None
        self._former: list[Mailboxes] = []  # which CUDA graphs go on using
        self._refused: float = float("inf")  # so many channels cannot be had, nor more
        self._raw: int | None = None  # the stream of the last call; None: to be looked at
        self._stream: torch.cuda.Stream | None = None
        self._captured: torch.cuda.Stream | None = None  # of the last call that was captured

    def more(self, group: dist.ProcessGroup, num_channels: int) -> Mailboxes | None:
        """Mailboxes of at least so many channels.  What is decided here, all ranks decide alike."""
        if num_channels >= self._refused:
            return None
        wish, capacity = setting(), 1 << (num_channels - 1).bit_length()
        if wish == "0" or (wish == "auto" and backend_of(group, self.device.type) != "nccl"):
            self._refused = 0
            return None
        if wish == "auto" and memory_bytes(group.size(), capacity) > MOST_BYTES:
            return None
        if is_capturing():
            raise RuntimeError(
                "the group has no mailboxes for this plan yet: run it once, or call gdncp.warmup with dtype, before a "
                f"capture (or set {VARIABLE}=0)"
            )
        boxes, reason = _make(group, self.device, capacity)
        if boxes is None:
            if wish == "1":
                raise RuntimeError(f"{VARIABLE}=1, but mailboxes in peer memory cannot be had: {reason}")
            self._refused = num_channels if self.boxes else 0
            return None
        if self.boxes is not None:
            self._former.append(self.boxes)
        self.boxes = boxes
        return boxes

    def in_order(self) -> None:
        """Calls over one group follow each other on the device, whatever streams they are enqueued on.

        Captured ones those before them in the capture: when the graph is replayed is not known here.
        """
        raw = torch._C._cuda_getCurrentRawStream(self.device.index)
        if raw == self._raw:
            return
        stream = torch.cuda.current_stream(self.device)
        if is_capturing():
            for before in {self._stream, self._captured}:
                if before is not None and before != stream and _captures(before):
                    stream.wait_stream(before)
            self._raw, self._captured = None, stream
            return
        if self._stream is not None:
            stream.wait_stream(self._stream)
        self._raw, self._stream = raw, stream


def _captures(stream: torch.cuda.Stream) -> bool:
    """Whether the stream is in a capture that has not ended."""
    if not stream.cuda_stream:  # the default one, which never is, and must not be asked while another is
        return False
    with torch.cuda.stream(stream):
        return is_capturing()


# with a group goes what it has here
_peers: WeakKeyDictionary[dist.ProcessGroup, _Peers] = WeakKeyDictionary()


def _make(group: dist.ProcessGroup, device: torch.device, capacity: int) -> tuple[Mailboxes | None, str | None]:
    """Mailboxes, or why not, the same on every rank: none goes on before all have said that they can."""
    places = agree(group, (_host(), _uuid(device)))
    if len({host for host, _ in places}) > 1:
        return None, "ranks are on several hosts, or in containers that cannot share memory"
    memory = boxes = None
    error = _unreachable(device, [uuid for _, uuid in places])
    if error is None:
        try:
            memory = _allocate(memory_bytes(group.size(), capacity), device)
        except Exception as failure:  # of any kind: peers wait for this rank's answer
            error = f"{type(failure).__name__}: {failure}"
    if (reason := _first(agree(group, error))) is not None:
        return None, reason
    assert memory is not None
    try:
        boxes = _map(group, device, memory, capacity)
    except Exception as failure:
        error = f"{type(failure).__name__}: {failure}"
    reason = _first(agree(group, error))  # and none writes into a peer's memory before its counts are zero
    return (boxes, None) if reason is None else (None, reason)


def _allocate(num_bytes: int, device: torch.device) -> torch.Tensor:
    from torch.distributed import _symmetric_memory

    return _symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=device)


def _map(group: dist.ProcessGroup, device: torch.device, memory: torch.Tensor, capacity: int) -> Mailboxes:
    """With counts of zero, once the device has come to that."""
    from torch.distributed import _symmetric_memory

    handle = _symmetric_memory.rendezvous(memory, group)
    size, rank = group.size(), group.rank()
    peers = [memory if r == rank else handle.get_buffer(r, memory.shape, memory.dtype) for r in range(size)]
    timeout = timeout_of(group) or dist.default_pg_timeout
    numbers = table_of(rank, capacity, int(timeout.total_seconds() * 1e9), [peer.data_ptr() for peer in peers])
    table = torch.tensor(numbers, dtype=torch.int64, device="cpu").pin_memory()
    stream = torch.cuda.Stream(device)
    with torch.cuda.device(device), torch.cuda.stream(stream):
        memory[: WORDS_BYTES + 4 * COUNTS * size * capacity].zero_()
        there = table.to(device, non_blocking=True)
    stream.record_event().synchronize()
    return Mailboxes(capacity, there, (handle, memory, *peers))


def _first(errors: list[str | None]) -> str | None:
    return next((f"rank {rank}: {error}" for rank, error in enumerate(errors) if error is not None), None)


def _unreachable(device: torch.device, uuids: list[str]) -> str | None:
    """Why this device does not reach one of those that this process sees; mapping the memory tells of others."""
    for other in range(torch.cuda.device_count()):
        theirs = other != device.index and _uuid(torch.device("cuda", other)) in uuids
        if theirs and not torch.cuda.can_device_access_peer(device, other):
            return f"{device} cannot access the memory of cuda:{other}"
    return None


def _uuid(device: torch.device) -> str:
    return str(getattr(torch.cuda.get_device_properties(device), "uuid", device))


def _host() -> tuple[str, ...]:
    """Of processes that can hand each other memory: one kernel, and one view of processes and files."""
    found = []
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid", "/proc/self/ns/mnt"):
        try:
            found.append(os.readlink(path) if "/ns/" in path else Path(path).read_text().strip())
        except OSError as error:
            found.append(type(error).__name__)
    return (*found, socket.gethostname())
