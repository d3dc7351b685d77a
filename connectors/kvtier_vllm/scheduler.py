"""The connector in vLLM's scheduler: vLLM's calls, handed on to the directory and to the keepers of requests."""

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_events import KVCacheEvent
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from kvtier.build.engine_cache import planner
from kvtier.build.span_export import exporting_spans
from kvtier.clock import MONOTONIC, Clock
from kvtier.config import Config
from kvtier.identity.keys import BlockKey
from kvtier.metrics import Metrics
from kvtier.offload import Block, Directory, JobResult
from kvtier.offload.messages import decode, encode
from kvtier.system.logs import log_fields
from kvtier.system.tracing import tracing
from kvtier_vllm.compat import boundary_states, frees_late
from kvtier_vllm.content.contents import Contents
from kvtier_vllm.kv.copies import CopiesUnderWay
from kvtier_vllm.kv.device_blocks import DeviceBlocks
from kvtier_vllm.kv.groups import KVGroups
from kvtier_vllm.messages import StepMetadata, WorkerIdentity, WorkerMetadata
from kvtier_vllm.observe.kv_events import KVEvents
from kvtier_vllm.observe.relay import Relay
from kvtier_vllm.observe.stats import KvtierStats, sources_of, weight_changes
from kvtier_vllm.opened_cache import OpenedCache, open_cache
from kvtier_vllm.requests.admission import Admission
from kvtier_vllm.requests.known_requests import KnownRequest, RequestBlocks
from kvtier_vllm.requests.loads import RequestLoads
from kvtier_vllm.requests.lookups import RequestLookups
from kvtier_vllm.requests.params import answer_to
from kvtier_vllm.requests.saves import RequestSaves
from kvtier_vllm.requests.traces import by_trace
from kvtier_vllm.steps.step_plan import HandedOut, computed_spans
from kvtier_vllm.steps.step_starts import StepNumbers
from kvtier_vllm.steps.step_times import StepTimes


@dataclass(frozen=True, slots=True)
class _Work:
    """What there is once the workers have said what their KV is."""

    cache: OpenedCache
    lookups: RequestLookups
    loads: RequestLoads


class SchedulerSide:
    """Scheduler thread only. Nothing blocks."""

    def __init__(  # noqa: PLR0913 - the parts that it is put together from
        self,
        config: Config,
        tokens_per_block: int,
        groups: KVGroups,
        *,
        num_volatile_blocks: int,
        contents: Contents,
        events: KVEvents | None = None,
        clock: Clock = MONOTONIC,
    ) -> None:
        """
        :param num_volatile_blocks: at the end of a hit, which are computed again.
        :param contents: taken over, and closed with this.
        :param events: None when nobody listens.
        """
        self._config, self._events = config, events
        self._size, self._groups, self._num_volatile = tokens_per_block, groups, num_volatile_blocks
        self._clock, self._times = clock, StepTimes(tokens_per_block, clock)
        self._steps = StepNumbers()
        self._stack = contextlib.ExitStack()
        self._stack.enter_context(exporting_spans(config, "kvtier-vllm"))
        self._work: _Work | None = None
        """None until `connect`."""
        self._admission = Admission(config, contents, clock)
        self._blocks = RequestBlocks(groups, events)
        self.device = DeviceBlocks(groups, tokens_per_block)
        """What of the device may be saved."""
        self._saves = RequestSaves(
            self._blocks,
            groups,
            self.device,
            tokens_per_block=tokens_per_block,
            save_answers=config.cache.save_answers,
            clock=clock,
        )
        self._adapters = contents.adapters
        self._stack.callback(contents.close)
        self._copies = CopiesUnderWay(groups)
        self._metrics = Metrics()
        self._weight_changes = weight_changes(self._metrics.registry)
        self._relay = Relay(self._metrics.registry)
        self._handed_out = HandedOut(tokens_per_block)

    def connect(self, identities: Sequence[WorkerIdentity]) -> None:
        """Takes up work with these workers, in rank order. Raises `ConfigError`. vLLM 0.33 calls it again when the
        workers have got their KV's memory back after a sleep, which changes nothing here."""
        if self._work is not None:
            return
        cache = open_cache(self._config, identities, self._metrics, self._stack)
        lookups = RequestLookups(
            cache.directory,
            planner(self._config, cache.directory),
            self._groups,
            tokens_per_block=self._size,
            num_volatile_blocks=self._num_volatile,
            patience_s=self._config.cache.lookup_deadline_s,
            clock=self._clock,
        )
        loads = RequestLoads(cache.directory, self._groups, self.device)
        self._work = _Work(cache, lookups, loads)
        self._copies.num_ranks = len(identities)
        if self._events is not None:
            self._events.watch(cache.directory, self._awaited)

    def bind(self, kv: KVCacheManager) -> None:
        self._saves.bind(kv)
        self.device.bind(kv)
        if self._events is not None:
            self._events.bind(kv)

    def add(self, request: Request) -> None:
        """A new request."""
        with log_fields(request_id=request.request_id):
            if self._work is None:
                self._admission.pass_over(request)
            else:
                self._admission.add(request, self._work.cache.hashers, self._work.cache.weights.digest)

    def match(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens beyond the computed ones that can be loaded, which happens between steps; None: ask again."""
        self._handed_out.note_hit(request.request_id, num_computed_tokens)
        if self._admission.is_pending(request):
            return None, False
        known = self._admission.known.get(request.request_id)
        if known is None or self._work is None or not self._work.cache.weights.are_known:
            return 0, False
        num_blocks = self._work.lookups.match(known, num_computed_tokens)
        return (None, False) if num_blocks is None else (num_blocks * self._size, num_blocks > 0)

    def allocate(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """The request has device blocks; starts its load if there is one.

        :param num_external_tokens: that are to be loaded by kvtier. Another connector may load at 0.
        """
        tables = blocks.get_block_ids()
        self._handed_out.note_allocation(request.request_id, tables)
        known = self._admission.known.get(request.request_id)
        if known is None or self._work is None:
            return
        if num_external_tokens:
            first, count = known.lookup.asked.start, num_external_tokens // self._size
            blocks_to_load = self._blocks.of(known, tables, range(first, first + count))
            self._work.loads.start(request.request_id, blocks_to_load, known.trace)
            known.sources = (known.lookup.tiers or [])[:count]
        lookup = known.lookup
        self._work.cache.tokens.note_lookup(
            len(lookup.asked), lookup.found, num_external_tokens // self._size, self._size
        )
        self._work.lookups.forget(known)  # should it be asked again, e.g. after a preemption, all may have changed

    def sources(self, request: Request) -> dict[CacheHitSource, int]:
        """Tokens that the request's load brings, by where they come from."""
        known = self._admission.known.get(request.request_id)
        return sources_of(known.sources, self._size) if known is not None else {}

    def take_stats(self) -> KvtierStats | None:
        """What happened since the last call; None: nothing. vLLM asks when a step has its results."""
        num_blocks, seconds = self._times.end()
        self.device.end_step()
        if self._work is not None:
            self._work.cache.directory.speeds.note_computed(num_blocks * len(self._groups.of_tokens), seconds)
        gains = self._relay.take()
        return KvtierStats(gains) if gains else None

    def take_events(self) -> list[KVCacheEvent]:
        """What has come to this engine's host memory and disk, or gone from there, since the last call."""
        return self._events.take() if self._events is not None else []

    def step(self, output: SchedulerOutput) -> StepMetadata:
        """What the workers have to do with this step."""
        number, loads_after = self._steps.begin(output)
        step = StepMetadata(is_empty=not number, number=number, loads_after=loads_after)
        self._times.begin(output)
        written, states = self._handed_out.take(output), boundary_states(output)
        self.device.begin_step(output, written, self._admission.known, states, number)
        if self._work is None:
            return step
        directory = self._work.cache.directory
        step.flush = self._copies.of(written)
        computed = [
            (self._admission.known[span.request_id], span)
            for span in computed_spans(output)
            if span.request_id in self._admission.known
        ]
        of_known = [
            (self._admission.known[request_id], of_request)
            for request_id, of_request in states.items()
            if request_id in self._admission.known
        ]
        room = directory.room_for_saves if self._work.cache.weights.are_known else 0
        blocks = self._saves.choose(computed, of_known, written, room)
        if blocks:
            self._save(directory, blocks, [known for known, _ in computed])
        self._note_results()
        step.generations, step.adapters = self._work.cache.weights.generations, self._adapters.take_unsent()
        messages = directory.take_messages()
        self._copies.begin(messages)
        step.messages = [encode(message) for message in messages]
        step.ended = self._work.loads.take_ended()
        return step

    def deliver(self, results: KVConnectorOutput) -> None:
        """The results of a step that vLLM processes, with the workers' answers, before it looks which loads are over.

        Adds the requests whose loads have just ended well: they are scheduled again with the very next step. Where
        blocks are missing, vLLM has already looked which ones: these loads end with the results of a later step.
        """
        self.device.note_invalid(results.invalid_block_ids)
        answers = results.kv_connector_worker_meta
        if not isinstance(answers, WorkerMetadata):
            return
        self._steps.hear(answers.step)
        if self._work is None:
            return
        self._adapters.note_loaded(answers.adapters)
        if answers.weights:
            self._work.cache.weights.note(answers.weights)
            starts = [state.first_step for state in answers.weights.values()]
            self._begin_generation(self._work, since=max(starts) if all(starts) else 0)
        for rank, encoded in answers.messages.items():
            messages = [decode(data) for data in encoded]
            self._copies.end(rank, messages)
            self._work.cache.directory.deliver(rank, messages)
        self._note_results()
        if loaded := self._work.loads.take_loaded():
            results.finished_recving = loaded.union(results.finished_recving or ())

    def finish(self, request: Request, tables: Sequence[Sequence[int]]) -> tuple[bool, dict[str, Any] | None]:
        """The request has ended; its device blocks, by KV group, are vLLM's at once.

        Gives False, for that, and what its answer says of us, if it was asked for.
        """
        self._steps.frees_late |= frees_late(request)
        known = self._admission.drop(request.request_id)
        if known is None or self._work is None:
            return False, answer_to(self._admission.params_of(request), {})
        self._work.lookups.forget(known)
        known.trace.end()
        told = answer_to(known.params, known.loaded)
        if self._work.loads.cancel(request.request_id):
            return False, told
        if not self._work.cache.weights.are_known:
            return False, told
        if known.params.pin_s and self._work.cache.pins is not None:
            num_computed = min(request.num_prompt_tokens, request.num_computed_tokens)
            self._work.cache.pins.ask(
                self._groups.keys(known.keys.first(num_computed // self._size)), known.params.pin_s
            )
        if not known.params.no_store:
            self._saves.leave(known, tables)
        return False, told

    def reset(self) -> bool:
        """Forgets what this engine holds; the pool keeps what it has."""
        self._saves.forget()
        if self._work is not None:
            self._work.cache.directory.reset()
        return True

    @property
    def has_work(self) -> bool:
        """Whether a step is wanted even without requests."""
        if self._saves.is_worth_a_step or self._copies or (self._events is not None and self._events.has_news):
            return True
        return self._work is not None and (self._work.cache.directory.is_telling or bool(self._work.loads.ended))

    def close(self) -> None:
        self._work = None
        self._stack.close()

    def _begin_generation(self, work: _Work, *, since: int) -> None:
        """Weights, an adapter or the device have changed: nothing that is on the device or under way to it counts.

        :param since: see `DeviceBlocks.forget_all`.
        """
        self._weight_changes.labels("known" if work.cache.weights.are_known else "unknown").inc()
        self._relay.look_next()
        self._saves.forget()
        work.loads.cancel_all()
        for known in self._admission.known.values():
            work.lookups.forget(known)
        self._admission.change_weights(work.cache.weights.digest)
        self.device.forget_all(since, self._admission.known)

    def _awaited(self) -> set[BlockKey]:
        """Blocks that are not with the directory yet, or wait there for a place."""
        loading = self._work.loads.blocks() if self._work is not None else ()
        return {*self._saves.unsaved.values(), *(key for key, _ in loading)}

    def _save(self, directory: Directory, blocks: list[Block], computed: Sequence[KnownRequest]) -> None:
        """Saves blocks of the requests that were computed, those of traced ones each by themselves."""
        traced = [known for known in computed if known.trace.context]
        keys = [(known.trace.context, self._groups.keys(known.keys.first(sys.maxsize))) for known in traced]
        for context, of_context in by_trace(blocks, keys).items():
            with tracing.within(context):
                directory.save_full(of_context)

    def _note_results(self) -> None:
        assert self._work is not None
        for result in self._work.cache.directory.poll():
            self._relay.look_next()
            request_id = self._work.loads.end(result)
            known = self._admission.known.get(request_id) if request_id is not None else None
            if known is not None:
                self._work.cache.tokens.note_load(known.sources, self._num_good(result, known), self._size)
                known.note_load(result)

    def _num_good(self, result: JobResult, known: KnownRequest) -> int:
        """How many blocks of a load vLLM goes on with: with several KV groups it takes all or none."""
        if result.failed and self._groups.num_groups > 1:
            return 0
        return min(result.failed, default=len(known.sources))
