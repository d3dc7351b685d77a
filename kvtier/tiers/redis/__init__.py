"""The redis tier: blocks in a Redis or Valkey, one server, Sentinel or Cluster, that the pools of a site share.

tier           what a key is to the server, deadlines, breaker, verification       RedisTier
reader, writer pipelines of blocks, payloads between their memory and the socket
servers        a connection per server and exchange; layout and dialer find them
connection     commands and answers on one socket that redis-py has connected
"""

from kvtier.tiers.redis.tier import MAX_VALUE_BYTES, RedisTier

__all__ = ["MAX_VALUE_BYTES", "RedisTier"]
