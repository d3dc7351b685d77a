"""The pool tier: the cache pool service seen from an engine, by the best way to it that works.

tier             deadlines, breaker, a miss for whatever fails                       PoolTier
access           from addresses and credentials to a transport                       open_transport
paths            several addresses of one pool, the best first
local            a pool on this host: its memory, its socket for everything else
  memory         blocks copied out of the pool's memory and into it, under leases
  socket         the block protocol over TCP, TLS or a Unix socket
grpc             the public API, where nothing else gets through
"""

from kvtier.tiers.pool.access import PoolAccess, open_transport
from kvtier.tiers.pool.tier import PoolTier, PoolTransport

__all__ = ["PoolAccess", "PoolTier", "PoolTransport", "open_transport"]
