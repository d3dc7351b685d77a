"""Loads of blocks from the tiers below into the blocks of requests."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from kvtier.device.block_pool import BlockPool
from kvtier.identity.keys import BlockKey
from kvtier.offload import Block, Hierarchy, JobResult
from kvtier.system.logs import within_request
from kvtier_engine.events.kv_events import DEVICE
from kvtier_engine.scheduling.fetch_planning import FetchPlanning, within_stage
from kvtier_engine.scheduling.partial_reuse import PartialHit
from kvtier_engine.scheduling.request import Request


@dataclass(frozen=True, slots=True)
class _Load:
    request: Request
    first_block: int
    blocks: list[Block]
    """Blocks of the prompt, and then the one that is only reused in part, if that has to be fetched."""
    partial: PartialHit | None = None
    """What is reused behind the prompt's own blocks, if all of those arrive."""
    findable: bool = True
    """Whether what arrives gets its keys."""

    @property
    def own_blocks(self) -> list[Block]:
        """The blocks of the prompt itself."""
        return self.blocks[:-1] if self.partial is not None and self.partial.is_below else self.blocks


class Loads:
    """The loads under way. Scheduler thread only; nothing blocks."""

    def __init__(
        self,
        block_pool: BlockPool,
        hierarchy: Hierarchy,
        planning: FetchPlanning,
        tokens_per_block: int,
        note_full: Callable[[Request, range], None],
    ) -> None:
        """
        :param note_full: hears at which positions blocks of a request have arrived, when they have their keys.
        """
        self._block_pool, self._hierarchy, self._planning = block_pool, hierarchy, planning
        self._tokens_per_block, self._note_full = tokens_per_block, note_full
        self._loads: dict[int, _Load] = {}
        """The loads under way, by job."""
        self._loading: set[BlockKey] = set()
        """The blocks of `_loads` that will be findable."""

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._loading

    def start(
        self, request: Request, positions: range, fresh: list[int], partial: PartialHit | None, *, by_layer: bool
    ) -> None:
        """Loads the blocks of a request at these positions, and the one behind them that is reused in part.

        :param fresh: the device blocks of the request from the first of the positions on.
        :param partial: what is reused behind them, on the device or below; None: nothing is.
        :param by_layer: whether the request may run while layers are still to come.
        """
        own = request.keys[positions.start : positions.stop]
        keys = [*own, partial.key] if partial is not None and partial.is_below else own
        blocks = list(zip(keys, fresh, strict=False))
        if request.spans is not None:
            request.spans.enter("fetch", blocks=len(blocks))
        with within_stage(request), within_request(request.log_id):
            request.job_id = self._hierarchy.start_load(blocks, by_layer=by_layer)
        self._loads[request.job_id] = _Load(request, positions.start, blocks, partial)
        self._loading.update(own)

    def cancel(self, request: Request) -> None:
        """Asks for the end of a load, which ends as soon as its blocks are left alone."""
        if request.job_id is not None:
            self._hierarchy.cancel(request.job_id)

    def forget(self) -> None:
        """What arrives from now on gets no keys."""
        self._loads = {job_id: replace(load, findable=False) for job_id, load in self._loads.items()}
        self._loading.clear()

    def end(self, result: JobResult) -> Request:
        """Blocks before the first failed one are hits; the rest is computed, what arrived of it too."""
        load = self._loads.pop(result.job_id)
        request, own = load.request, load.own_blocks
        num_good = min(result.failed, default=len(load.blocks))
        partial = load.partial if num_good == len(load.blocks) else None
        num_own = min(num_good, len(own))
        request.job_id = None
        request.num_published = load.first_block + num_own
        request.num_computed = request.num_published * self._tokens_per_block
        if load.findable:
            for key, block_id in own[:num_own]:
                self._block_pool.assign_key(block_id, key)
            self._loading.difference_update(key for key, _ in own)
            self._note_full(request, range(load.first_block, request.num_published))
        if not request.counted:
            self._planning.count_loaded(result.tiers[: len(own)], num_own)
            for tier in result.tiers[:num_own]:
                request.count_cached(tier, self._tokens_per_block)
        if partial is not None:
            request.num_computed += partial.num_tokens
            request.count_cached(result.tiers[-1] if partial.is_below else DEVICE, partial.num_tokens)
        request.counted = True
        return request
