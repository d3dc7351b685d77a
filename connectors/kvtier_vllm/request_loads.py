"""Loads of requests' prefixes to device blocks: which are under way, and which have ended."""

from collections.abc import Iterator
from dataclasses import dataclass

from kvtier.hierarchy import Block, Directory, JobResult
from kvtier_vllm.groups import KVGroups


@dataclass(frozen=True, slots=True)
class _Load:
    request_id: str
    blocks: list[Block]
    device_blocks: list[int]


class RequestLoads:
    """One load per request at a time. Scheduler thread only; nothing blocks."""

    def __init__(self, directory: Directory, groups: KVGroups) -> None:
        self._directory, self._groups = directory, groups
        self._loads: dict[int, _Load] = {}
        """Under way, by job."""
        self.ended: dict[str, list[int]] = {}
        """Since the last `take_ended`: see `StepMetadata.ended`."""

    def start(self, request_id: str, blocks: list[Block]) -> list[int]:
        """Begins to load these; returns the device blocks that it writes to."""
        device_blocks = self._groups.device_blocks(slot for _, slot in blocks)
        self._loads[self._directory.start_load(blocks)] = _Load(request_id, blocks, device_blocks)
        return device_blocks

    def cancel(self, request_id: str) -> bool:
        """Asks for the end of the request's load; False when it has none."""
        for job, load in self._loads.items():
            if load.request_id == request_id:
                self._directory.cancel(job)
                return True
        return False

    def end(self, result: JobResult) -> str | None:
        """Takes in the end of a job; returns the request whose load it was, None when it was no load."""
        load = self._loads.pop(result.job_id, None)
        if load is None:
            return None
        self.ended[load.request_id] = [load.device_blocks[index] for index in sorted(result.failed)]
        return load.request_id

    def take_ended(self) -> dict[str, list[int]]:
        """Requests whose loads have ended, for the next step, and the device blocks that were not filled."""
        ended, self.ended = self.ended, {}
        return ended

    def blocks(self) -> Iterator[Block]:
        """All that are being loaded."""
        return (block for load in self._loads.values() for block in load.blocks)
