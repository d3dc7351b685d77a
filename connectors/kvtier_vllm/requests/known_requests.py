"""Requests that vLLM has not finished with: what is known of each, and its blocks as the directory knows them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from vllm.v1.request import Request

from kvtier.identity.keys import BlockKey
from kvtier.offload import Block, JobResult
from kvtier_vllm.kv.groups import KVGroups
from kvtier_vllm.observe.kv_events import KVEvents
from kvtier_vllm.requests.keys import RequestKeys
from kvtier_vllm.requests.params import RequestParams
from kvtier_vllm.requests.traces import RequestTrace


@dataclass(slots=True)
class PrefixLookup:
    """What was asked and heard of a request's prefix. `RequestLookups` has it."""

    asked: range = range(0)
    """Blocks that the last lookup is about."""
    ticket: int | None = None
    """The ticket of the last lookup, while it has no answer."""
    tiers: list[str] | None = None
    """The answer to the last lookup: where each block is that is worth loading, from the first one on."""
    found: list[str] = field(default_factory=list)
    """The tiers of all blocks that were found, those that are not worth loading included."""
    ask_at: float = 0.0
    """When the next lookup may be asked for."""
    pending_since: float | None = None
    """When blocks that it wants were first found to be on their way."""


@dataclass(slots=True)
class KnownRequest:
    """Scheduler thread only."""

    request: Request
    keys: RequestKeys
    params: RequestParams
    trace: RequestTrace
    lookup: PrefixLookup = field(default_factory=PrefixLookup)
    num_saved: int = 0
    """Leading blocks whose KV was offered to the directory."""
    sources: list[str] = field(default_factory=list)
    """Tiers of the load that was started last."""
    loaded: Counter[str] = field(default_factory=Counter)
    """Blocks that loads have brought, by tier."""
    is_tombstoned: bool = False
    """A load has failed: what is offered again would fail again, for ever."""

    def note_load(self, result: JobResult) -> None:
        """A load of it has ended."""
        self.trace.end(failed=len(result.failed))
        self.loaded.update(tier for tier in result.tiers if tier)
        self.is_tombstoned |= bool(result.failed)


class RequestBlocks:
    """Blocks of requests for the directory. Scheduler thread only."""

    def __init__(self, groups: KVGroups, events: KVEvents | None) -> None:
        """:param events: told of the blocks, if anybody listens."""
        self._groups, self._events = groups, events

    def of(self, known: KnownRequest, tables: Sequence[Sequence[int]], span: range) -> list[Block]:
        """Returns the request's blocks at these positions, to be loaded or saved.

        :param tables: the request's device blocks, by group.
        """
        return self._groups.blocks(self._keys(known, span), tables, span)

    def of_state(self, known: KnownRequest, group: int, position: int, device_block: int) -> list[Block]:
        """The one that holds a group's state at the end of the block at this position; none if that is not known."""
        keys = self._keys(known, range(position, position + 1))
        return [self._groups.block(key, group, device_block) for key in keys[position:]]

    def _keys(self, known: KnownRequest, span: range) -> list[BlockKey]:
        """Returns the keys of the request's blocks, up to the end of `span`."""
        keys = known.keys.first(span.stop)
        if self._events is not None:
            self._events.describe(known.request, self._groups.keys(keys[span.start :]), span)
        return keys
