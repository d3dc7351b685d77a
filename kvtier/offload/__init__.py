"""All tiers below the device as one: lookups that are polled, loads and saves that run in the background.

    directory  (scheduler: tokens)   index, statuses, jobs, deadlines     -- messages -->   mover (worker: memory)
    mover      one per rank          arena, device copies, tier I/O       <-- answers ---

`Hierarchy` joins both in one process. `Cleaner` keeps the device's cold blocks copied ahead.
"""

from kvtier.offload.changes import ContentChanges, runs_of_chains
from kvtier.offload.cleaner import Cleaner
from kvtier.offload.directory import Directory
from kvtier.offload.hierarchy import Hierarchy
from kvtier.offload.inventory import InventoryLog
from kvtier.offload.jobs import Block, DirectorySettings, JobResult
from kvtier.offload.metrics import HierarchyMetrics
from kvtier.offload.mover import OTHER_COPIES, Mover, MoverTiers
from kvtier.offload.planner import AlwaysFetch, BlockStatus, FetchIfFaster, Planner
from kvtier.offload.prefix_tokens import PrefixTokens
from kvtier.offload.previous import PreviousKeys
from kvtier.offload.replica import ALONE, Replica

__all__ = [
    "ALONE",
    "OTHER_COPIES",
    "AlwaysFetch",
    "Block",
    "BlockStatus",
    "Cleaner",
    "ContentChanges",
    "Directory",
    "DirectorySettings",
    "FetchIfFaster",
    "Hierarchy",
    "HierarchyMetrics",
    "InventoryLog",
    "JobResult",
    "Mover",
    "MoverTiers",
    "Planner",
    "PrefixTokens",
    "PreviousKeys",
    "Replica",
    "runs_of_chains",
]
