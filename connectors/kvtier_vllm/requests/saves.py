"""Which blocks of requests are saved, and with which step: as they become full, and what is left when requests end."""

from collections.abc import Iterable, Iterator, Sequence

from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.request import Request

from kvtier.clock import Clock
from kvtier.identity.keys import BlockKey
from kvtier.offload import Block
from kvtier_vllm.compat import BoundaryState
from kvtier_vllm.kv.device_blocks import DeviceBlocks
from kvtier_vllm.kv.groups import KVGroups
from kvtier_vllm.requests.known_requests import KnownRequest, RequestBlocks
from kvtier_vllm.steps.step_plan import ComputedSpan

_PATIENCE_S = 5.0
"""How long an engine without requests goes on for blocks that no tier takes."""


class RequestSaves:
    """Chooses blocks; the directory saves them. Scheduler thread only; nothing blocks.

    Only device blocks that were seen to get their KV are saved: `DeviceBlocks` must know of a step before blocks are
    chosen for it here.
    """

    def __init__(
        self,
        blocks: RequestBlocks,
        groups: KVGroups,
        device: DeviceBlocks,
        *,
        tokens_per_block: int,
        save_answers: bool,
        clock: Clock,
    ) -> None:
        """:param save_answers: also blocks with generated tokens."""
        self._blocks, self._groups, self._device, self._size = blocks, groups, device, tokens_per_block
        self._save_answers, self._clock = save_answers, clock
        self._kv: KVCacheManager | None = None
        self.unsaved: dict[int, BlockKey] = {}
        """Blocks of requests that have ended, and states, by device slot. A step with room for them saves them, unless
        one writes to them before. Never more than there are slots, however often the same blocks are computed and
        hit."""
        self._last_saved_at = clock()
        """When a block was last saved, or nothing was left to save."""

    def bind(self, kv: KVCacheManager) -> None:
        """Nothing is saved while requests run until it is known which device blocks they have."""
        self._kv = kv

    @property
    def is_worth_a_step(self) -> bool:
        """Whether to go on for what is unsaved: a tier that hangs must not keep an idle engine busy."""
        return bool(self.unsaved) and self._clock() < self._last_saved_at + _PATIENCE_S

    def choose(
        self,
        computed: Iterable[tuple[KnownRequest, ComputedSpan]],
        states: Iterable[tuple[KnownRequest, Iterable[BoundaryState]]],
        written: set[int],
        room: int,
    ) -> list[Block]:
        """Returns as many blocks as there is room for. The others stay on the device as long as vLLM keeps them there.

        :param computed: requests of the step, and which of their tokens it computes.
        :param states: that are on the device after it, to stay there until vLLM gives their device blocks to others.
        :param written: device blocks that it writes to.
        """
        if self.unsaved:
            for slot in self._groups.slots(written):
                self.unsaved.pop(slot, None)
        for known, of_request in states:
            self._keep(self._states(known, of_request))
        blocks = self._take_unsaved(room)
        for known, span in computed:
            # vLLM goes back: behind a load of somebody that has failed, or to fresh blocks after a preemption.
            known.num_saved = min(known.num_saved, span.start // self._size)
            blocks += self._newly_full(known, span.stop, (room - len(blocks)) // self._groups.num_groups)
        if blocks or not self.unsaved:
            self._last_saved_at = self._clock()
        return blocks

    def leave(self, known: KnownRequest, tables: Sequence[Sequence[int]]) -> None:
        """The request has ended; its device blocks, by KV group, are vLLM's, but hold its KV until they are reused."""
        # Tokens whose KV is there: all but the last one, which was not put into the model.
        request = known.request
        num_full = self._num_to_keep(request, min(request.num_computed_tokens, request.num_tokens - 1))
        span = range(known.num_saved, num_full)
        self._keep(self._blocks.of(known, self._groups.without_states(tables), span))

    def forget(self) -> None:
        """Saves nothing of requests that have ended."""
        self.unsaved.clear()

    def _keep(self, blocks: Iterable[Block]) -> None:
        """Some later step saves these blocks, except any that are not seen and will not soon be."""
        for key, slot in blocks:
            if self._is_seen(slot) or self._is_awaited(slot):
                self.unsaved[slot] = key

    def _take_unsaved(self, room: int) -> list[Block]:
        """The next blocks of `unsaved`. Drops those that have turned out not to be seen."""
        taken: list[Block] = []
        dropped: list[int] = []
        for slot, key in self.unsaved.items():
            if len(taken) == room:
                break
            if self._is_seen(slot):
                taken.append((key, slot))
            elif not self._is_awaited(slot):
                dropped.append(slot)
        for slot in [*(slot for _, slot in taken), *dropped]:
            del self.unsaved[slot]
        return taken

    def _is_seen(self, slot: int) -> bool:
        return self._device.is_seen(self._groups.device_block(slot))

    def _is_awaited(self, slot: int) -> bool:
        return self._device.is_awaited(self._groups.device_block(slot))

    def _num_to_keep(self, request: Request, num_tokens: int) -> int:
        """Full blocks among so many tokens that are to be saved."""
        kept = num_tokens if self._save_answers else min(num_tokens, request.num_prompt_tokens)
        return kept // self._size

    def _newly_full(self, known: KnownRequest, num_tokens: int, limit: int) -> list[Block]:
        """Blocks of a request that have all their KV once the first `num_tokens` tokens are computed, the next few."""
        if known.params.no_store or self._kv is None:
            return []
        # Under asynchronous scheduling, tokens are computed before anybody here knows them; drafted ones may not stay.
        num_full = self._num_to_keep(known.request, min(num_tokens, known.request.num_tokens))
        num_full = min(num_full, known.num_saved + limit)
        if num_full <= known.num_saved:
            return []
        tables = self._groups.without_states(self._kv.get_block_ids(known.request.request_id))
        span = self._decided(tables, range(known.num_saved, num_full))
        known.num_saved = span.stop
        return [block for block in self._blocks.of(known, tables, span) if self._is_seen(block[1])]

    def _decided(self, tables: Sequence[Sequence[int]], span: range) -> range:
        """The part of `span` before the first position whose blocks may yet be seen."""
        for position in span:
            blocks = [table[position] for table in tables if position < len(table)]
            if any(self._device.is_awaited(block) for block in blocks):
                return range(span.start, position)
        return span

    def _states(self, known: KnownRequest, states: Iterable[BoundaryState]) -> Iterator[Block]:
        """The states at the end of a block that is to be saved."""
        if known.params.no_store:
            return
        for state in states:
            num_blocks, rest = divmod(state.num_tokens, self._size)
            if not rest and num_blocks <= self._num_to_keep(known.request, state.num_tokens):
                yield from self._blocks.of_state(known, state.group, num_blocks - 1, state.device_block)
