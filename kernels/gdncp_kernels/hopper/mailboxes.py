"""States handed from rank to rank by the kernel that folds them, through memory that both ranks have mapped.

`gdncp.collectives.peer_memory` lays that memory out, and has the protocol and why nothing waits for ever.

Who writes: all threads store the rows, the CTA's barrier orders that before fences at system scope of a thread per
channel, and each of these then stores its count.  Who reads: a thread per channel sees the count (acquire at system
scope), and the barrier orders that before all threads' loads.  Both chains are transitive in PTX's memory model.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate  # `triton.aggregate` in later versions

from gdncp.collectives import peer_memory
from gdncp_kernels.hopper.common import barrier

_CHANNEL_ROWS = gl.constexpr(peer_memory.CHANNEL_ROWS)
_PLACE_BYTES = gl.constexpr(peer_memory.PLACE_BYTES)
_PLACE_FLOATS = gl.constexpr(peer_memory.PLACE_BYTES // 4)
_WORDS_BYTES = gl.constexpr(peer_memory.WORDS_BYTES)
_PLACES = gl.constexpr(peer_memory.PLACES)
_COUNTS = gl.constexpr(peer_memory.COUNTS)
_WRITTEN = gl.constexpr(peer_memory.Count.WRITTEN)
_READ = gl.constexpr(peer_memory.Count.READ)
_SENT = gl.constexpr(peer_memory.Count.SENT)
_RECEIVED = gl.constexpr(peer_memory.Count.RECEIVED)
_NUM_CHANNELS = gl.constexpr(peer_memory.Table.NUM_CHANNELS)
_CAPACITY = gl.constexpr(peer_memory.Table.CAPACITY)
_OWN_RANK = gl.constexpr(peer_memory.Table.OWN_RANK)
_TIMEOUT = gl.constexpr(peer_memory.Table.TIMEOUT)
_OWN = gl.constexpr(peer_memory.Table.OWN)
_BASES = gl.constexpr(peer_memory.Table.BASES)


@gluon.constexpr_function
def _await_text(num_counts):
    """Of so many threads each looks until its count, from $1 on, has come to $2, for $3 ns.

    Of those that give up, the first of all programs to take the word at $4 returns 0, which ends the kernel; the others
    look on until it has.
    """
    return f"""{{
    .reg .pred p;
    .reg .b32 thread, count, taken;
    .reg .b64 at, begun, now;
    mov.b32 $0, 1;
    mov.u32 thread, %tid.x;
    setp.ge.u32 p, thread, {num_counts};
    @p bra DONE;
    mad.wide.u32 at, thread, 4, $1;
    mov.u64 begun, %globaltimer;
LOOK:
    ld.acquire.sys.global.b32 count, [at];
    sub.s32 count, count, $2;
    setp.ge.s32 p, count, 0;
    @p bra DONE;
    mov.u64 now, %globaltimer;
    sub.u64 now, now, begun;
    setp.lt.u64 p, now, $3;
    @p bra LOOK;
    atom.global.exch.b32 taken, [$4], 1;
    setp.ne.b32 p, taken, 0;
    @p bra LOOK;
    mov.b32 $0, 0;
DONE:
}}"""


@gluon.constexpr_function
def _fence_text(num_counts):
    return f"""{{
    .reg .pred p;
    .reg .b32 thread;
    mov.b32 $0, 0;
    mov.u32 thread, %tid.x;
    setp.lt.u32 p, thread, {num_counts};
    @p fence.acq_rel.sys;
}}"""


@gluon.constexpr_function
def _set_text(num_counts):
    """So many threads set a count each, from $1 on, to $2."""
    return f"""{{
    .reg .pred p;
    .reg .b32 thread;
    .reg .b64 at;
    mov.b32 $0, 0;
    mov.u32 thread, %tid.x;
    setp.lt.u32 p, thread, {num_counts};
    mad.wide.u32 at, thread, 4, $1;
    @p st.relaxed.sys.global.b32 [at], $2;
}}"""


@aggregate
class Channel:
    rank: gl.tensor  # to or from which; -1: none, and nobody uses the rest
    memory: gl.tensor  # where its memory is mapped
    number: gl.tensor  # the first channel's in ours
    number_there: gl.tensor  # its number in the rank's

    @gluon.constexpr_function
    def __init__(self, rank, memory, number, number_there):
        self.rank = rank
        self.memory = memory
        self.number = number
        self.number_there = number_there


@gluon.jit
def channel(peers, rank, message, H, head, block, ROWS: gl.constexpr, DIM: gl.constexpr):
    """Of block `block` of ROWS rows of a head of a message to or from a rank; -1: none, and nobody uses the rest.

    A message is of a multiple of eight channels that count together, so those of a block of 32 rows count alike.
    """
    capacity = gl.load(peers + _CAPACITY)
    first = ((message * H + head) * (DIM // ROWS) + block) * (ROWS // _CHANNEL_ROWS)
    memory = gl.load(peers + _BASES + rank)  # of rank -1: a word before
    return Channel(rank, memory, rank * capacity + first, gl.load(peers + _OWN_RANK) * capacity + first)


@gluon.jit
def next_out(peers, outbox, ROWS: gl.constexpr):
    """The number of the message that is to leave, once there is room for it; for all threads behind a barrier."""
    e = 0
    if outbox.rank >= 0:
        e = gl.load(_own_count(peers, _SENT, outbox.number)) + 1
        _await(peers, _READ, outbox.number, e - _PLACES, ROWS)
    return e


@gluon.jit
def next_in(peers, inbox, ROWS: gl.constexpr):
    """The number of the message that has arrived, once it has; for all threads."""
    e = gl.load(_own_count(peers, _RECEIVED, inbox.number)) + 1
    _await(peers, _WRITTEN, inbox.number, e, ROWS)
    barrier()
    return e


@gluon.jit
def arrived(peers, inbox, e, row, column, DIM: gl.constexpr):
    """Pointers to rows [ROWS, 1] and columns [1, DIM] of message e, in our memory."""
    return _rows(peers, gl.load(peers + _OWN), inbox.number, e, row, column, DIM)


@gluon.jit
def leaving(peers, outbox, e, row, column, DIM: gl.constexpr):
    """The same in the memory of the rank that it goes to."""
    return _rows(peers, outbox.memory, outbox.number_there, e, row, column, DIM)


@gluon.jit
def post(peers, inbox, received, outbox, sent, ROWS: gl.constexpr):
    """Tell both ranks what this program has written and read."""
    barrier()
    gl.inline_asm_elementwise(_fence_text(ROWS // _CHANNEL_ROWS), "=&r", [], gl.int32, is_pure=False, pack=1)
    if outbox.rank >= 0:
        _set(peers, outbox.memory, _WRITTEN, outbox.number_there, sent, ROWS)
        _keep(peers, _SENT, outbox.number, sent, ROWS)
    if inbox.rank >= 0:
        _set(peers, inbox.memory, _READ, inbox.number_there, received, ROWS)
        _keep(peers, _RECEIVED, inbox.number, received, ROWS)


@gluon.jit
def _rows(peers, memory, number, e, row, column, DIM: gl.constexpr):
    mail = memory + _WORDS_BYTES + 4 * _COUNTS * gl.load(peers + _NUM_CHANNELS)
    address = mail + (_PLACES * number + (e & (_PLACES - 1))) * _PLACE_BYTES
    start = gl.multiple_of(address.to(gl.pointer_type(gl.float32)), 16)
    # the next channel's places follow
    at = row // _CHANNEL_ROWS * (_PLACES * _PLACE_FLOATS) + row % _CHANNEL_ROWS * DIM
    return start + at + column


@gluon.jit
def _count(peers, memory, which, number):
    """Address of a channel's count."""
    return memory + _WORDS_BYTES + 4 * (which * gl.load(peers + _NUM_CHANNELS) + number)


@gluon.jit
def _own_count(peers, which, number):
    return _count(peers, gl.load(peers + _OWN), which, number).to(gl.pointer_type(gl.int32))


@gluon.jit
def _keep(peers, which, number, e, ROWS: gl.constexpr):
    at = _own_count(peers, which, number)
    for u in gl.static_range(ROWS // _CHANNEL_ROWS):
        gl.store(at + u, e)


@gluon.jit
def _await(peers, which, number, least, ROWS: gl.constexpr):
    own = gl.load(peers + _OWN)
    timeout = gl.load(peers + _TIMEOUT)
    at = _count(peers, own, which, number)
    text: gl.constexpr = _await_text(ROWS // _CHANNEL_ROWS)
    come = gl.inline_asm_elementwise(text, "=&r,l,r,l,l", [at, least, timeout, own], gl.int32, is_pure=False, pack=1)
    gl.device_assert(come != 0, "state_fixup by chain: a peer failed, or did not arrive within the group's timeout")


@gluon.jit
def _set(peers, memory, which, number, e, ROWS: gl.constexpr):
    at = _count(peers, memory, which, number)
    text: gl.constexpr = _set_text(ROWS // _CHANNEL_ROWS)
    gl.inline_asm_elementwise(text, "=&r,l,r", [at, e], gl.int32, is_pure=False, pack=1)
