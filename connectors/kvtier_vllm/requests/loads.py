"""Loads of requests' prefixes to device blocks: which are under way, and which have ended."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass

from kvtier.offload import Block, Directory, JobResult
from kvtier.system.logs import within_request
from kvtier_vllm.kv.device_blocks import DeviceBlocks
from kvtier_vllm.kv.groups import KVGroups
from kvtier_vllm.requests.traces import RequestTrace

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Load:
    request_id: str
    blocks: list[Block]
    device_blocks: list[int]
    epoch: int
    """The epoch of `DeviceBlocks` when the load began."""


class RequestLoads:
    """One load per request at a time. Scheduler thread only; nothing blocks."""

    def __init__(self, directory: Directory, groups: KVGroups, device: DeviceBlocks) -> None:
        """:param device: is told which device blocks loads have filled."""
        self._directory, self._groups, self._device = directory, groups, device
        self._loads: dict[int, _Load] = {}
        """Loads that are under way, by job."""
        self.ended: dict[str, list[int]] = {}
        """Device blocks that ended loads have not filled, by request, of the requests that nobody has taken."""

    def start(self, request_id: str, blocks: list[Block], trace: RequestTrace) -> None:
        """Begins to load these."""
        device_blocks = self._groups.device_blocks(slot for _, slot in blocks)
        load = _Load(request_id, blocks, device_blocks, self._device.epoch)
        with trace.within("fetch", blocks=len(blocks)), within_request(request_id):
            self._loads[self._directory.start_load(blocks)] = load

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
        is_wanted = load.epoch == self._device.epoch
        failed = result.failed if is_wanted else range(len(load.device_blocks))
        self.ended[load.request_id] = [load.device_blocks[index] for index in sorted(failed)]
        _log.debug(
            "request %s: %d of %d blocks were loaded",
            load.request_id,
            len(load.device_blocks) - len(failed),
            len(load.device_blocks),
            extra={"request_id": load.request_id},
        )
        filled = [block for index, block in enumerate(load.device_blocks) if index not in failed]
        self._device.fill(filled, load.epoch)
        return load.request_id

    def cancel_all(self) -> None:
        """`DeviceBlocks` has begun another epoch: whatever these loads bring, their requests have to do without it."""
        for job in self._loads:
            self._directory.cancel(job)

    def take_loaded(self) -> set[str]:
        """Requests whose loads have ended and filled all blocks. `take_ended` gives the others."""
        loaded = {request_id for request_id, missing in self.ended.items() if not missing}
        for request_id in loaded:
            del self.ended[request_id]
        return loaded

    def take_ended(self) -> dict[str, list[int]]:
        """Requests whose loads have ended, for `StepMetadata.ended`, and the device blocks that were not filled."""
        ended, self.ended = self.ended, {}
        return ended

    def blocks(self) -> Iterator[Block]:
        """The blocks that are being loaded."""
        return (block for load in self._loads.values() for block in load.blocks)
