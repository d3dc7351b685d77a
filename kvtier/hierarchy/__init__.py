"""All tiers below the device as one: lookups that are polled, loads and saves that run in the background.

    directory  (scheduler: tokens)   index, statuses, jobs, deadlines     -- messages -->   mover (worker: memory)
    mover      one per rank          arena, device copies, tier I/O       <-- answers ---

`Hierarchy` joins both in one process. `Cleaner` keeps the device's cold blocks copied ahead.
"""

from kvtier.hierarchy.changes import ContentChanges
from kvtier.hierarchy.cleaner import Cleaner
from kvtier.hierarchy.directory import Directory
from kvtier.hierarchy.hierarchy import Hierarchy
from kvtier.hierarchy.inventory import InventoryLog
from kvtier.hierarchy.jobs import Block, DirectorySettings, JobResult
from kvtier.hierarchy.metrics import HierarchyMetrics
from kvtier.hierarchy.mover import OTHER_COPIES, Mover
from kvtier.hierarchy.planner import AlwaysFetch, BlockStatus, FetchIfFaster, Planner
from kvtier.hierarchy.replica import ALONE, Replica

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
    "Planner",
    "Replica",
]
