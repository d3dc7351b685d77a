"""The connector in vLLM's scheduler: the directory, which requests are looking, loading or saving, and which device
blocks are being copied."""

import contextlib
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from prometheus_client import CollectorRegistry
from vllm.distributed.kv_events import KVCacheEvent
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.request import Request

from kvtier.build import DirectoryHalf, directory_half, planner
from kvtier.build_tiers import shared_tier
from kvtier.clock import MONOTONIC, Clock
from kvtier.config import Config
from kvtier.errors import ConfigError
from kvtier.hierarchy import Directory
from kvtier.hierarchy.jobs import Block
from kvtier.hierarchy.planner import PENDING, AlwaysFetch, Planner
from kvtier.keys import BlockKey, NamespaceId
from kvtier.metrics import Metrics
from kvtier_vllm import compat
from kvtier_vllm.adapters import Adapters
from kvtier_vllm.copies import CopiesUnderWay
from kvtier_vllm.groups import KVGroups
from kvtier_vllm.identity import DIGESTS
from kvtier_vllm.kv_events import KVEvents
from kvtier_vllm.media import AwaitedMedia, Media
from kvtier_vllm.messages import StepMetadata, WorkerIdentity, WorkerMetadata
from kvtier_vllm.pins import Pins
from kvtier_vllm.request_keys import RequestKeys
from kvtier_vllm.request_params import RequestParams, answer_to, params_of
from kvtier_vllm.stats import KvtierStats, sources_of
from kvtier_vllm.step_times import StepTimes
from kvtier_vllm.tenants import Tenants

_log = logging.getLogger(__name__)
_PATIENCE_S = 5.0
"""How long an engine without requests goes on for blocks that no tier takes."""
_ASK_EVERY_S = 0.005


@dataclass(slots=True)
class _Request:
    """What is known of a request that vLLM has not finished with."""

    request: Request
    keys: RequestKeys
    params: RequestParams
    num_saved: int = 0
    """Leading blocks whose KV was offered to the directory."""
    asked: range = range(0)
    """Blocks that the last lookup is about."""
    ticket: int | None = None
    """Of that lookup, while it has no answer."""
    tiers: list[str] | None = None
    """Its answer: where each block is that is worth loading, from the first one on."""
    ask_at: float = 0.0
    """When the next lookup may be asked for."""
    pending_since: float | None = None
    """When blocks that it wants were first found to be on their way, or its media to be unknown."""
    sources: list[str] = field(default_factory=list)
    """Tiers of the load that was started last."""
    loaded: Counter[str] = field(default_factory=Counter)
    """Blocks that loads have brought, by tier."""
    is_tombstoned: bool = False
    """A load has failed: what is offered again would fail again, for ever."""


@dataclass(slots=True)
class _Load:
    request_id: str
    blocks: list[Block]
    device_blocks: list[int]


class SchedulerSide:
    """Scheduler thread only. Nothing blocks."""

    def __init__(
        self,
        config: Config,
        tokens_per_block: int,
        groups: KVGroups,
        *,
        media: Media,
        events: KVEvents | None = None,
        clock: Clock = MONOTONIC,
    ) -> None:
        """
        :param media: taken over, and closed with this.
        :param events: None when nobody listens.
        """
        self._config, self._events = config, events
        self._size, self._groups = tokens_per_block, groups
        self._tenants = Tenants(config)
        self._planner: Planner = AlwaysFetch()
        self._clock, self._times = clock, StepTimes(tokens_per_block, clock)
        self._stack = contextlib.ExitStack()
        self._half: DirectoryHalf | None = None
        """None until the workers have said what their KV is."""
        self._is_warned = False
        self._kv: KVCacheManager | None = None
        self._requests: dict[str, _Request] = {}
        self._loads: dict[int, _Load] = {}
        """By job."""
        self._ended: dict[str, list[int]] = {}
        """For the next step: see `StepMetadata.ended`."""
        self._adapters = Adapters(DIGESTS)
        self._stack.callback(self._adapters.close)
        self._media = media
        self._stack.callback(media.close)
        self._unnamed: dict[str, tuple[_Request, AwaitedMedia]] = {}
        """Requests whose media are being hashed: nothing of theirs is loaded or saved, and none has begun."""
        self._copies = CopiesUnderWay(groups)
        self._pins: Pins | None = None
        """Where there is a pool."""
        self._stats = KvtierStats()
        self._allocated: set[int] = set()
        """Device blocks allocated since the last step for requests that are not in it."""
        self._unsaved: list[Block] = []
        """Blocks of requests that have ended: saved by a step with room for them, unless one writes to them before."""
        self._last_saved_at = clock()
        """Or when nothing was left to save."""

    @property
    def _directory(self) -> Directory | None:
        return self._half.directory if self._half is not None else None

    def connect(self, identities: Sequence[WorkerIdentity]) -> None:
        """Takes up work with these workers, in rank order. Raises `ConfigError`."""
        sizes = {identity.block_bytes for identity in identities}
        if len(sizes) != 1:
            raise ConfigError(f"blocks of {sorted(sizes)} bytes in the ranks of one engine: they must be equal")
        namespaces = [NamespaceId(identity.namespace) for identity in identities]
        registry = CollectorRegistry()
        shared = self._stack.enter_context(shared_tier(self._config, namespaces, Metrics(registry)))
        self._half = directory_half(
            self._config,
            namespaces=namespaces,
            block_bytes=sizes.pop(),
            shared=shared.tier if shared is not None else None,
            registry=registry,
        )
        if shared is not None:
            self._pins = Pins(shared.pin, list(dict.fromkeys(namespaces)))
            self._stack.callback(self._pins.close)
        self._planner = planner(self._config, self._half.directory)
        self._stack.callback(self._half.directory.close)
        self._copies.num_ranks = len(identities)
        for rank, identity in enumerate(identities):
            self._half.directory.deliver(rank, identity.messages)
        if self._events is not None:
            self._events.watch(self._half.directory, self._awaited)

    def bind(self, kv: KVCacheManager) -> None:
        self._kv = kv
        if self._events is not None:
            self._events.bind(kv)

    def add(self, request: Request) -> None:
        """A new request."""
        params = params_of(request, has_pool=bool(self._config.pool.address))
        # Before all else: vLLM's own cache must know it in any case.
        tenant, salt = self._tenants.of(request, params.tenant)
        if self._half is None:
            self._warn_of_silence()
            return
        if tenant is None or not RequestKeys.cover(request):
            return
        adapter = None
        if request.lora_request is not None:
            adapter = self._adapters.digest(request.lora_request)
            if adapter is None:
                return
        keys = RequestKeys(request, self._half.hashers[tenant], salt=salt, adapter=adapter)
        media = self._media.digests(request)
        if media is not None:
            self._unnamed[request.request_id] = _Request(request, keys, params), media
            self._name_media(request.request_id)

    def match(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens beyond the computed ones that can be loaded, which happens between steps; None: ask again."""
        if request.request_id in self._unnamed and self._is_worth_naming(request):
            return None, False
        known = self._requests.get(request.request_id)
        if known is None or self._directory is None or known.is_tombstoned or num_computed_tokens % self._size:
            return 0, False
        # The last token is computed in any case: its logits are wanted.
        wanted = range(num_computed_tokens // self._size, (request.num_tokens - 1) // self._size)
        if not wanted:
            return 0, False
        if known.asked != wanted:
            if self._clock() < known.ask_at:
                return None, False
            self._forget_lookup(known)
            known.asked = wanted
            keys = self._groups.keys(known.keys.first(wanted.stop)[wanted.start :])
            known.ticket = self._directory.start_lookup(keys)
        if known.ticket is not None:
            statuses = self._directory.poll_lookup(known.ticket)
            if statuses is None:
                return None, False
            known.ticket = None
            num_hits = self._planner.blocks_to_fetch(statuses)
            if PENDING in statuses[num_hits : num_hits + 1] and self._is_worth_waiting(known):
                known.asked = range(0)
                return None, False
            # A hit is what all groups have.
            num_hits //= self._groups.num_groups
            known.tiers = [status.tier for status in statuses[:: self._groups.num_groups][:num_hits]]
        num_hits = len(known.tiers or ())
        return num_hits * self._size, num_hits > 0

    def allocate(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """The request has device blocks; starts its load if there is one."""
        known = self._requests.get(request.request_id)
        if known is None or self._directory is None:
            return
        if not num_external_tokens:
            self._forget_lookup(known)  # should it be asked again, e.g. after a preemption, all may have changed
            return
        first, count = known.asked.start, num_external_tokens // self._size
        span = range(first, first + count)
        to_load = self._blocks(known, blocks.get_block_ids(), span)
        device_blocks = self._groups.device_blocks(slot for _, slot in to_load)
        self._allocated.update(device_blocks)
        job = self._directory.start_load(to_load)
        self._loads[job] = _Load(request.request_id, to_load, device_blocks)
        known.sources = (known.tiers or [])[:count]
        self._forget_lookup(known)

    def sources(self, request: Request) -> dict[CacheHitSource, int]:
        """Tokens that the request's load brings, by where they come from."""
        known = self._requests.get(request.request_id)
        return sources_of(known.sources, self._size) if known is not None else {}

    def take_stats(self) -> KvtierStats | None:
        """What happened since the last call; None: nothing. vLLM asks when a step has its results."""
        num_blocks, seconds = self._times.end()
        if self._directory is not None:
            self._directory.speeds.note_computed(num_blocks * self._groups.num_groups, seconds)
        if self._stats.is_empty():
            return None
        stats, self._stats = self._stats, KvtierStats()
        return stats

    def take_events(self) -> list[KVCacheEvent]:
        """What has come to this engine's host memory and disk, or gone from there, since the last call."""
        return self._events.take() if self._events is not None else []

    def step(self, output: SchedulerOutput) -> StepMetadata:
        """What the workers have to do with this step."""
        step = StepMetadata(is_empty=not output.total_num_scheduled_tokens)
        self._times.begin(output)
        if self._directory is None:
            return step
        written = self._allocated | _written_blocks(output, self._size)
        self._allocated = set()
        step.flush = self._copies.of(written)
        blocks = self._to_save(output, written)
        if blocks:
            self._directory.save_full(blocks)
        self._note_results()
        step.messages = self._directory.take_messages()
        self._copies.begin(step.messages)
        step.ended, self._ended = self._ended, {}
        return step

    def deliver(self, answers: WorkerMetadata) -> None:
        """The workers' answers."""
        if self._directory is None:
            return
        for rank, messages in answers.messages.items():
            self._copies.end(rank, messages)
            self._directory.deliver(rank, messages)
        self._note_results()

    def finish(self, request: Request, tables: Sequence[Sequence[int]]) -> tuple[bool, dict[str, Any] | None]:
        """The request has ended; its device blocks, by KV group, are vLLM's at once.

        Gives False, for that, and what its answer says of us, if it was asked for.
        """
        self._unnamed.pop(request.request_id, None)
        known = self._requests.pop(request.request_id, None)
        if known is None or self._directory is None:
            return False, answer_to(params_of(request, has_pool=bool(self._config.pool.address)), {})
        self._forget_lookup(known)
        told = answer_to(known.params, known.loaded)
        for job, load in self._loads.items():
            if load.request_id == request.request_id:
                self._directory.cancel(job)
                return False, told
        if known.params.pin_s and self._pins is not None:
            num_computed = min(request.num_prompt_tokens, request.num_computed_tokens)
            self._pins.ask(self._groups.keys(known.keys.first(num_computed // self._size)), known.params.pin_s)
        # vLLM may not have heard yet that its load has failed.
        if not known.params.no_store and not known.is_tombstoned:
            # Tokens whose KV is there: all but the last one, which was not put into the model.
            num_full = self._num_to_keep(request, min(request.num_computed_tokens, request.num_tokens - 1))
            self._unsaved += self._blocks(known, tables, range(known.num_saved, num_full))
        return False, told

    def reset(self) -> bool:
        """Forgets what this engine holds; the pool keeps what it has."""
        if self._directory is not None:
            self._directory.reset()
        return True

    @property
    def has_work(self) -> bool:
        """Whether a step is wanted even without requests."""
        is_telling = self._directory is not None and self._directory.is_telling
        is_telling |= self._events is not None and self._events.has_news
        # A tier that hangs must not keep an idle engine busy.
        is_saving = bool(self._unsaved) and self._clock() < self._last_saved_at + _PATIENCE_S
        return bool(is_saving or self._ended or self._copies or is_telling)

    def close(self) -> None:
        self._half = None
        self._stack.close()

    def _to_save(self, output: SchedulerOutput, written: set[int]) -> list[Block]:
        """As many blocks as there is room for. The others wait on the device: no better place, as long as they last."""
        assert self._directory is not None
        room = self._directory.room_for_saves
        unsaved = [block for block in self._unsaved if block[1] % self._groups.num_blocks not in written]
        blocks, self._unsaved = unsaved[:room], unsaved[room:]
        for request_id, num_tokens in _computed_tokens(output):
            blocks += self._newly_full(request_id, num_tokens, (room - len(blocks)) // self._groups.num_groups)
        if blocks or not self._unsaved:
            self._last_saved_at = self._clock()
        return blocks

    def _num_to_keep(self, request: Request, num_tokens: int) -> int:
        """Full blocks among so many tokens that are to be saved."""
        kept = num_tokens if self._config.cache.save_answers else min(num_tokens, request.num_prompt_tokens)
        return kept // self._size

    def _newly_full(self, request_id: str, num_tokens: int, limit: int) -> list[Block]:
        """Blocks of a request that have all their KV once the first `num_tokens` tokens are computed, the next few."""
        known = self._requests.get(request_id)
        if known is None or known.params.no_store or self._kv is None:
            return []
        # Under asynchronous scheduling, tokens are computed before anybody here knows them.
        num_full = self._num_to_keep(known.request, min(num_tokens, known.request.num_tokens))
        num_full = min(num_full, known.num_saved + limit)
        if num_full <= known.num_saved:
            return []
        span, known.num_saved = range(known.num_saved, num_full), num_full
        return self._blocks(known, self._kv.get_block_ids(request_id), span)

    def _blocks(self, known: _Request, tables: Sequence[Sequence[int]], span: range) -> list[Block]:
        """Of a request, to be loaded or saved."""
        keys = known.keys.first(span.stop)
        if self._events is not None:
            self._events.describe(known.request, self._groups.keys(keys[span.start :]), span)
        return self._groups.blocks(keys, tables, span)

    def _awaited(self) -> set[BlockKey]:
        """Blocks that are not with the directory yet, or wait there for a place."""
        loading = (block for load in self._loads.values() for block in load.blocks)
        return {key for key, _ in chain(self._unsaved, loading)}

    def _note_results(self) -> None:
        assert self._directory is not None
        for result in self._directory.poll():
            self._stats.note(result)
            load = self._loads.pop(result.job_id, None)
            if load is None:
                continue
            self._ended[load.request_id] = [load.device_blocks[index] for index in sorted(result.failed)]
            known = self._requests.get(load.request_id)
            if known is not None:
                known.loaded.update(tier for tier in result.tiers if tier)
                known.is_tombstoned |= bool(result.failed)

    def _name_media(self, request_id: str) -> bool:
        """Takes a request up when its media are known; False: not yet.

        Also vLLM calls them by their content from now on. By the names that clients give, it may take what its encoder
        made of one for the other, and that would be saved.
        """
        known, media = self._unnamed[request_id]
        if not media.is_ready:
            return False
        del self._unnamed[request_id]
        told = self._media.take(media)
        if told is None:
            return True
        if told:
            compat.name_media(known.request, known.keys.depend_on(told))
        known.ask_at, known.pending_since = 0.0, None
        self._requests[request_id] = known
        return True

    def _is_worth_naming(self, request: Request) -> bool:
        """Whether to wait for what its media are. If not, it goes on by itself."""
        if self._name_media(request.request_id):
            return False
        known, _ = self._unnamed[request.request_id]
        # vLLM does not wait with those that want nothing from caches.
        if not request.skip_reading_prefix_cache and self._is_worth_waiting(known):
            return True
        del self._unnamed[request.request_id]
        return False

    def _warn_of_silence(self) -> None:
        if not self._is_warned:
            self._is_warned = True
            _log.error(
                "kvtier keeps nothing: no worker has said what its KV is. MultiConnector hands on what its first "
                "connector's workers say, and no more: name KvtierConnector first"
            )

    def _is_worth_waiting(self, known: _Request) -> bool:
        """For a block that is on its way to a tier, e.g. because another request has begun to load it, or for the
        request's media."""
        now = self._clock()
        known.pending_since = known.pending_since if known.pending_since is not None else now
        known.ask_at = now + _ASK_EVERY_S
        return now < known.pending_since + self._config.cache.lookup_deadline_s

    def _forget_lookup(self, known: _Request) -> None:
        if known.ticket is not None and self._directory is not None:
            self._directory.cancel_lookup(known.ticket)
        known.asked, known.ticket, known.tiers = range(0), None, None


def _computed_tokens(output: SchedulerOutput) -> Iterator[tuple[str, int]]:
    """Requests of this step, and how many of their tokens are computed after it."""
    for new in output.scheduled_new_reqs:
        yield new.req_id, new.num_computed_tokens + output.num_scheduled_tokens[new.req_id]
    cached = output.scheduled_cached_reqs
    for request_id, num_computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
        drafts = len(output.scheduled_spec_decode_tokens.get(request_id, ()))
        yield request_id, num_computed + output.num_scheduled_tokens[request_id] - drafts


def _written_blocks(output: SchedulerOutput, tokens_per_block: int) -> set[int]:
    """Device blocks that were allocated for this step."""
    written: set[int] = set()
    for new in output.scheduled_new_reqs:
        for table in new.block_ids:
            written.update(table[new.num_computed_tokens // tokens_per_block :])
    cached = output.scheduled_cached_reqs
    for request_id, fresh, num_computed in zip(
        cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
    ):
        if fresh is not None:
            start = num_computed // tokens_per_block if request_id in cached.resumed_req_ids else 0
            for table in fresh:
                written.update(table[start:])
    return written
