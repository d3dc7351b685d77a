"""What one call may ask of a pool, and what a client may hold of it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLimits:
    """What one call may ask for. Above: an error that names the limit, before any work.

    No configuration changes them: clients rely on them. Tests have smaller ones.
    """

    max_batch_blocks: int = 65_536
    """Hashes in one request, blocks in one write stream. Lower: more round trips. Higher: longer calls."""
    max_batch_bytes: int = 256 << 20
    """Payload bytes of one read or write. Bounds how long a call may keep a thread."""
    max_block_bytes: int = 64 << 20
    """Payload bytes of one block."""
    max_large_bytes: int = 8 << 20
    """Block protocol: headers of requests, of those above 16 KiB, that all connections of a tenant have under way. As
    large as one header may be; each takes up to four times its length of the pool's memory. Small lets large requests
    wait for each other, large lets a tenant take as much memory beside `memory_bytes`."""
    max_call_s: float = 60.0
    """Longest deadline of a read or write: bounds how long a stalled client may keep a thread and a slot."""
    max_stall_s: float = 10.0
    """Block protocol: how long a peer may take to send or to receive one piece of about 8 MiB. Blocks are held
    in place meanwhile. Small cuts off slow links, large lets a stopped client hold memory."""
    lease_s: float = 10.0
    """How long a client on this host may read a block in shared memory. Small sends slow clients to the socket, large
    lets a stopped one keep memory from others."""
    max_held_bytes: int | None = None
    """Payload bytes that one such client may hold at a time, to read and to write. None: a quarter of the memory. All
    clients of a tenant together may hold half of what the tenant is owed of memory."""
    max_prepared_s: float = 60.0
    """How long such a client may take to write to the slots that it was given. Then they are taken from it, and no
    other block ever gets their memory while it may still write there. Small fails writes of clients that wait for a
    busy device, large lets a stopped one keep memory from others."""
    max_event_streams: int = 4
    """Streams of all tenants; every tenant has one at least. Each keeps a thread, beside `num_threads`."""
    event_buffer: int = 4096
    """Keys buffered per event stream before the oldest are lost."""
