"""Loads of blocks from the tiers below into the blocks of requests."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvtier.device.block_pool import BlockPool
from kvtier.identity.keys import BlockKey
from kvtier.offload import Block, Hierarchy, JobResult
from kvtier.system.logs import within_request
from kvtier_engine.events.kv_events import DEVICE
from kvtier_engine.scheduling.fetch_planning import FetchPlanning, within_stage
from kvtier_engine.scheduling.partial_reuse import PartialHit
from kvtier_engine.scheduling.request import Request, keys_of_groups


@dataclass(frozen=True, slots=True)
class _Load:
    request: Request
    prefix: range
    """Positions of the blocks of the prompt that it has if all arrives, and would not have without."""
    blocks: list[Block]
    """Blocks of the prompt, and then those that are only reused in part, if that has to be fetched."""
    positions: list[int]
    """The positions of the prompt's own blocks, one for each."""
    partial: PartialHit | None = None
    """What is reused behind the prompt's own blocks, if all of those arrive."""
    findable: bool = True
    """Whether what arrives gets its keys."""

    @property
    def own_blocks(self) -> list[Block]:
        """The blocks of the prompt itself."""
        return self.blocks[: len(self.positions)]


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
        self,
        request: Request,
        prefix: range,
        own: Sequence[tuple[int, Block]],
        partial: PartialHit | None,
        *,
        by_layer: bool,
    ) -> None:
        """Loads blocks of a request, and those behind its prefix that are reused in part.

        :param prefix: positions of what the request has of its prompt then, and would not have without.
        :param own: positions and blocks; where windowed layers have blocks of their own, not of all of the prefix.
        :param partial: what is reused behind it, on the device or below; None: nothing is.
        :param by_layer: whether the request may run while layers are still to come.
        """
        blocks = [block for _, block in own]
        if partial is not None and partial.is_below:
            tables = [request.block_ids, *request.windowed]
            keys = keys_of_groups(partial.key, len(request.windowed))
            blocks += [(key, table[prefix.stop]) for key, table in zip(keys, tables, strict=True)]
        if request.spans is not None:
            request.spans.enter("fetch", blocks=len(blocks))
        with within_stage(request), within_request(request.log_id):
            request.job_id = self._hierarchy.start_load(blocks, by_layer=by_layer)
        self._loads[request.job_id] = _Load(request, prefix, blocks, [position for position, _ in own], partial)
        self._loading.update(request.keys[prefix.start : prefix.stop])

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
        arrived = range(load.prefix.start, load.prefix.stop if num_own == len(own) else load.positions[num_own])
        usable = own[:num_own]
        if request.windowed and num_own < len(own):
            # A shorter prefix needs the blocks of another window. The request begins anew, and finds what has arrived.
            request.begins_anew, arrived = True, range(load.prefix.start, load.prefix.start)
            usable = [block for index, block in enumerate(own) if index not in result.failed]
        request.job_id = None
        request.num_published = arrived.stop
        request.num_computed = request.num_published * self._tokens_per_block
        if load.findable:
            for key, block_id in usable:
                self._block_pool.assign_key(block_id, key)
            self._loading.difference_update(request.keys[load.prefix.start : load.prefix.stop])
            self._note_full(request, arrived)
        if not request.counted:
            self._count(load, result.tiers, arrived)
        if partial is not None:
            request.num_computed += partial.num_tokens
            request.count_cached(result.tiers[-1] if partial.is_below else DEVICE, partial.num_tokens)
        request.counted = True
        return request

    def _count(self, load: _Load, tiers: Sequence[str], arrived: range) -> None:
        """Counts the tokens of the prefix by the tier that their block came from, that of its full layers if it did."""
        of_blocks = dict(zip(reversed(load.positions), reversed(tiers[: len(load.positions)]), strict=True))
        came_from = [of_blocks.get(position, DEVICE) for position in load.prefix]
        for tier in came_from[: len(arrived)]:
            load.request.count_cached(tier, self._tokens_per_block)
        fetched = [position for position in load.prefix if position in of_blocks]
        num_good = sum(1 for position in fetched if position in arrived)
        self._planning.count_loaded([of_blocks[position] for position in fetched], num_good)
