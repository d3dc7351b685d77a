"""Tiers in a process of their own beside the engine, so that a busy interpreter cannot slow their I/O down.

    engine                                            tier process (`python -m kvtier.tiers.sidecar.process`)
    SidecarTier -- verb, keys, places in memory  -->  the tier of that name: disk, pool client
               <--  statuses, events, counts    --
               +------  one memory that both map: payloads never pass the socket  ------+
    DirectReads <- places of blocks in the memory of a tier that gives leases: copied from where they lie

A thread that gives up the GIL waits up to 5 ms to get it back from pure Python code. Reading a batch takes dozens of
system calls in the tier's own threads, and one round trip here.
"""

from kvtier.tiers.sidecar.child import SharedMemory
from kvtier.tiers.sidecar.direct_reads import DirectReads
from kvtier.tiers.sidecar.supervisor import ProcessSettings, TierProcess
from kvtier.tiers.sidecar.tier import SidecarTier

__all__ = ["DirectReads", "ProcessSettings", "SharedMemory", "SidecarTier", "TierProcess"]
