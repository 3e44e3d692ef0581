"""The wire: the few exchanges that collectives are made of, over any process group, counted as they go.

Three transports: gloo between CPU tensors, NCCL between CUDA tensors, and gloo between CUDA tensors (several ranks
that share a GPU), which is staged through pinned CPU copies here and nowhere else.  Only that one waits for the device;
under NCCL an exchange is enqueued and `wait` makes the current stream wait, so that a CUDA graph can capture it.

Ranks are group ranks; they are translated to global ones at the call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist

# NCCL groups whose communicator exists: their first exchange may then be one that not all ranks take part in
_connected: WeakSet[dist.ProcessGroup] = WeakSet()

Message = tuple[int, torch.Tensor]  # peer, contiguous tensor


def world_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The group, or the default one; ValueError without either."""
    if group is None and dist.is_available() and dist.is_initialized():
        group = dist.group.WORLD
    if group is None:
        raise ValueError("group is None and there is no default process group; call init_process_group or pass a group")
    return group


def backend_of(group: dist.ProcessGroup, device_type: str) -> str | None:
    """Which backend the group uses for tensors of a device type: its configuration reads "cpu:gloo,cuda:nccl"."""
    config = _configs.get(group)
    if config is None:
        config = _configs[group] = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
    return config.get(device_type)


_configs: WeakKeyDictionary[dist.ProcessGroup, dict[str, str]] = WeakKeyDictionary()  # asking takes microseconds


def is_capturing() -> bool:
    """Whether a CUDA graph is being captured on the current stream; never creates a CUDA context to find out."""
    return torch.cuda.is_available() and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


@contextmanager
def naming(stage: str, group: dist.ProcessGroup) -> Iterator[None]:
    """Say which stage was under way when an exchange failed: a rank that died, or one that never arrived."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            f"{stage} broke off on rank {group.rank()} of {group.size()}: a peer failed, or did not arrive within the "
            f"group's timeout ({error})"
        ) from error


class Pending:
    """An exchange under way."""

    def __init__(
        self,
        wire: Wire,
        works: Sequence[dist.Work],
        result: torch.Tensor,
        landings: Sequence[tuple[torch.Tensor, torch.Tensor]] = (),
        keep: Sequence[torch.Tensor] = (),
    ):
        self._wire, self._works, self._result, self._landings, self._keep = wire, works, result, landings, keep

    def wait(self) -> torch.Tensor:
        """Wait (NCCL: make the current stream wait) and return what was received, where there is one result."""
        with naming(self._wire.stage, self._wire.group):
            for work in self._works:
                work.wait()
        for target, landed in self._landings:
            target.copy_(landed, non_blocking=True)
        self._keep = ()
        return self._result


class Wire:
    """Exchanges of one stage over one group between tensors on one device."""

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device, stage: str):
        self.group = world_group(group)
        self.stage = stage
        self.rank, self.size = self.group.rank(), self.group.size()
        self.messages_sent = self.messages_received = self.bytes_sent = self.bytes_received = 0
        self._device = device
        self._backend = backend_of(self.group, device.type)
        if self._backend is None:
            raise ValueError(
                f"group: it has no backend for {device.type} tensors, only {dist.get_backend_config(self.group)}"
            )
        self.transport = self._backend  # what carries the data
        self._staged = self._backend == "gloo" and device.type != "cpu"
        self._sending: list[dist.Work] = []
        self._keep: list[torch.Tensor] = []  # what is being sent

    def count(self, sent: list[int], received: list[int]) -> None:
        """Bytes of each message, also of those that kernels leave in peers' memory."""
        self.messages_sent += len(sent)
        self.messages_received += len(received)
        self.bytes_sent += sum(sent)
        self.bytes_received += sum(received)

    # ---- collectives: all ranks of the group call them

    def all_gather(self, local: torch.Tensor) -> Pending:
        """local [n], the same n on every rank -> [size, n]."""
        self.count(sent=[local.nbytes] * (self.size - 1), received=[local.nbytes] * (self.size - 1))
        gathered = local.new_empty(self.size * local.numel())
        (outgoing,) = self._outgoing([local])
        landing = self._landing(gathered)
        with naming(self.stage, self.group):
            # torch 2.13 renamed it and warns at the old name
            all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
            work = all_gather(landing, outgoing, group=self.group, async_op=True)
        return self._pending([work], gathered.view(self.size, -1), [(gathered, landing)], [outgoing])

    def all_to_all(self, local: torch.Tensor, in_splits: Sequence[int], out_splits: Sequence[int]) -> Pending:
        """local: pieces of `in_splits` elements for rank 0, 1, ... -> pieces of `out_splits` elements from them."""
        others = [r for r in range(self.size) if r != self.rank]
        self.count(
            sent=[in_splits[r] * local.element_size() for r in others if in_splits[r]],
            received=[out_splits[r] * local.element_size() for r in others if out_splits[r]],
        )
        received = local.new_empty(sum(out_splits))
        (outgoing,) = self._outgoing([local])
        landing = self._landing(received)
        with naming(self.stage, self.group):
            work = dist.all_to_all_single(
                landing, outgoing, list(out_splits), list(in_splits), group=self.group, async_op=True
            )
        assert work is not None
        return self._pending([work], received, [(received, landing)], [outgoing])

    # ---- point to point: only those who have something to say

    def open_point_to_point(self) -> None:
        """Called by every rank of the group before its first `exchange`.

        NCCL connects a group in its first call, which all ranks have to join; this is that call, once per group.
        """
        if self._backend == "gloo" or self.group in _connected or is_capturing():
            return
        with naming(self.stage, self.group):
            dist.all_reduce(torch.zeros(1, device=self._device), group=self.group)
        _connected.add(self.group)

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        """Send and receive at once; between a pair of ranks, messages match in order.  To oneself: a copy.

        `wait` waits for what is received; what is sent must stay as it is until `finish`.
        """
        to_self = [tensor for peer, tensor in sends if peer == self.rank]
        from_self = [tensor for peer, tensor in receives if peer == self.rank]
        for target, source in zip(from_self, to_self, strict=True):
            target.copy_(source)
        sends = [message for message in sends if message[0] != self.rank]
        receives = [message for message in receives if message[0] != self.rank]
        self.count(sent=[t.nbytes for _, t in sends], received=[t.nbytes for _, t in receives])

        outgoing = self._outgoing([tensor for _, tensor in sends])
        landing = [self._landing(tensor) for _, tensor in receives]
        operations = [
            dist.P2POp(op, tensor, dist.get_global_rank(self.group, peer), self.group)
            for op, peers, tensors in ((dist.irecv, receives, landing), (dist.isend, sends, outgoing))
            for (peer, _), tensor in zip(peers, tensors, strict=True)
        ]
        works: list[dist.Work] = []
        if operations:
            with naming(self.stage, self.group):
                works = dist.batch_isend_irecv(operations)
        if len(works) == len(operations):  # gloo: one work per message; NCCL: one for all
            self._sending += works[len(receives) :]
            works = works[: len(receives)]
        self._keep += outgoing
        landings = [(tensor, landed) for (_, tensor), landed in zip(receives, landing, strict=True)]
        return self._pending(works, torch.empty(0, device="cpu"), landings, [])

    def finish(self) -> None:
        """Wait until everything sent has left."""
        with naming(self.stage, self.group):
            for work in self._sending:
                work.wait()
        self._sending, self._keep = [], []

    # ---- private

    def _outgoing(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        if not self._staged or not tensors:
            return tensors
        copies = [torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True) for tensor in tensors]
        for copy, tensor in zip(copies, tensors, strict=True):
            copy.copy_(tensor, non_blocking=True)
        torch.cuda.current_stream(self._device).synchronize()
        return copies

    def _landing(self, target: torch.Tensor) -> torch.Tensor:
        """Where to receive what is meant for `target`."""
        return torch.empty(target.shape, dtype=target.dtype, device="cpu", pin_memory=True) if self._staged else target

    def _pending(
        self,
        works: Sequence[dist.Work],
        result: torch.Tensor,
        landings: Sequence[tuple[torch.Tensor, torch.Tensor]],
        keep: Sequence[torch.Tensor],
    ) -> Pending:
        return Pending(self, works, result, landings if self._staged else (), keep)
