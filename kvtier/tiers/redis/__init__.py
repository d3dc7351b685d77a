"""The redis tier: blocks in a Redis or Valkey, one server, Sentinel or Cluster, that the pools of a site share.

tier             the verbs, and what is done before and after each                    RedisTier
reader, writer   blocks, whole or in parts, between the caller's memory and servers
discards, undone blocks to be forgotten, and those whose server has not heard of it
caps, cap_script how much tenants may have: books in the servers, kept by whoever writes
settings         logins, deadlines and sizes                                          RedisSettings
servers          one call to all servers that have its keys, each on its own thread
exchange         one server's part of it, cut off at the deadline
topology         which server has which keys, and whether one that is left alone is back
clients          redis-py's clients, which do the rest: connections, TLS, logins, Sentinel, the Cluster's map
"""

from kvtier.tiers.redis.settings import RedisSettings
from kvtier.tiers.redis.tier import RedisTier

__all__ = ["RedisSettings", "RedisTier"]
