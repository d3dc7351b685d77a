"""vLLM's real scheduler over real connectors of ours, stepped by hand: all that is missing of vLLM is the model.

Scheduler, requests and configuration are made by the helpers of vLLM's own tests.
"""

import contextlib
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from arithmetic_model import answer_to
from sdist import load_helpers
from stepping_rank import BLOCK, Rank, ours
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import EventPublisher
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from cache_pool import WAIT_S
from kvtier.identity.keys import BlockHasher
from kvtier.offload.messages import Loaded, decode
from kvtier_vllm.requests.keys import RequestKeys


class Engine:
    """`step` is one of vLLM's. Under asynchronous scheduling the next step is planned before the last one is known."""

    def __init__(
        self,
        model: Path,
        extra: Mapping[str, Any],
        *,
        num_ranks: int = 1,
        num_blocks: int = 200,
        async_scheduling: bool = False,
        transfer: Mapping[str, Any] | None = None,
        max_num_batched_tokens: int = 512,
        hash_algorithm: str = "sha256",
        publisher: EventPublisher | None = None,
    ) -> None:
        """
        :param extra: `kv_connector_extra_config`.
        :param publisher: takes vLLM's KV events, which are on if there is one.
        :param transfer: arguments of `create_vllm_config` about the connector; our connector by itself without.
        """
        helpers = load_helpers()
        ours = {"kv_connector": "KvtierConnector", "kv_connector_module_path": "kvtier_vllm"}
        arguments = {"kv_connector_extra_config": dict(extra), **(transfer or ours)}
        self.config = helpers.create_vllm_config(
            model=str(model),
            block_size=BLOCK,
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            max_num_batched_tokens=max_num_batched_tokens,
            **arguments,
        )
        self.config.scheduler_config.async_scheduling = async_scheduling
        self.config.cache_config.prefix_caching_hash_algo = hash_algorithm
        if publisher is not None:
            self.config.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
        kv = KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer.0", "layer.1"], spec)])
        self.scheduler = helpers.create_scheduler(self.config, num_blocks=num_blocks, kv_cache_config=kv)
        self.scheduler.kv_event_publisher = publisher or self.scheduler.kv_event_publisher
        # As for a model that takes media.
        self.scheduler.max_num_encoder_input_tokens = max_num_batched_tokens
        self.scheduler.encoder_cache_manager = EncoderCacheManager(max_num_batched_tokens)
        self.connector: KVConnectorBase_V1 = self.scheduler.connector
        self.ranks = [
            Rank(
                type(self.connector)(self.config, KVConnectorRole.WORKER, kv),
                rank=rank,
                num_ranks=num_ranks,
                num_blocks=num_blocks,
            )
            for rank in range(num_ranks)
        ]
        identities = {(0, n): rank.connector.get_handshake_metadata() for n, rank in enumerate(self.ranks)}
        self.connector.set_xfer_handshake_metadata_pp_aware(identities)
        self._aggregator = KVOutputAggregator(num_ranks)
        self._depth = 1 if async_scheduling else 0
        self._under_way: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self.requests: dict[str, Request] = {}
        self.answers: dict[str, list[int]] = {}
        self.reasons: dict[str, str] = {}
        self.told: dict[str, dict[str, Any]] = {}
        """`kv_transfer_params` of answers, of those that have some."""
        self.started: Counter[str] = Counter()
        """Loads, by request."""
        self.received: Counter[str] = Counter()
        """Requests whose loads were reported to be over."""
        self._count_loads()
        self.spared: dict[str, int] = {}
        """Tokens that a request had when it was scheduled for the first time."""
        self.num_preemptions = 0

    def ask(
        self,
        number: int,
        num_tokens: int,
        *,
        common: int = 0,
        max_tokens: int = 8,
        salt: str | None = None,
        media: Sequence[MultiModalFeatureSpec] = (),
        params: object = None,
        lender: Mapping[str, Any] | None = None,
    ) -> str:
        """A new request; returns its id. Prompts with different numbers share their first `common` tokens only.

        :param salt: its `cache_salt`.
        :param media: the model does not look at them.
        :param params: what it says to kvtier in its `kv_transfer_params`.
        :param lender: what it says there to `LendingConnector`.
        """
        request = load_helpers().create_request(
            request_id=number, num_tokens=num_tokens, common_prefix_len=common, max_tokens=max_tokens, block_size=BLOCK
        )
        request.cache_salt = salt
        request.mm_features = list(media)
        request.block_hashes.clear()
        request.update_block_hashes()
        said = {"kvtier": params, "lender": lender}
        request.kv_transfer_params = {name: what for name, what in said.items() if what is not None} or None
        return self._add(request, number)

    def continue_with(self, request_id: str, *, max_tokens: int) -> str:
        """The next turn: a prompt that goes on with what was answered."""
        before = self.requests[request_id]
        tokens = [*before.prompt_token_ids, *self.answers[request_id]]
        helpers = load_helpers()
        make = helpers.Request
        with mock.patch.object(helpers, "Request", lambda **named: make(**named | {"prompt_token_ids": tokens})):
            request = helpers.create_request(request_id=0, num_tokens=0, max_tokens=max_tokens, block_size=BLOCK)
        return self._add(request, 0)

    def _add(self, request: Request, number: int) -> str:
        request.request_id = f"{number}-{len(self.requests)}"  # the same prompt may be asked again
        self.requests[request.request_id] = request
        self.scheduler.add_request(request)
        return str(request.request_id)

    def step(self) -> SchedulerOutput:
        output = self.scheduler.schedule()
        self.num_preemptions += len(output.preempted_req_ids or ())
        for new in output.scheduled_new_reqs:
            self.spared[new.req_id] = new.num_computed_tokens
        # Aggregated also if there is one rank only, which vLLM's executors for one do not do: then nothing changes.
        result = self._aggregator.aggregate([rank.execute(output) for rank in self.ranks])
        self._under_way.append((output, result))
        if len(self._under_way) > self._depth:
            self._take_in()
        return output

    def until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline, f"in vain: {what}"
            self.step()

    def finish(self) -> None:
        """Until vLLM would stop stepping."""

        def idle() -> bool:
            return not self.scheduler.has_requests() and not self.connector.has_pending_push_work()

        self.until(idle, "all requests have ended")
        while self._under_way:
            self._take_in()
        self.until(idle, "nothing is left to be said")

    def abort(self, request_id: str) -> None:
        self.scheduler.finish_requests([request_id], RequestStatus.FINISHED_ABORTED)

    @property
    def is_planning_ahead(self) -> bool:
        return self._depth > 0

    def is_loading(self, request_id: str) -> bool:
        return bool(self.requests[request_id].status == RequestStatus.WAITING_FOR_REMOTE_KVS)

    def hashes(self, request_id: str, num_tokens: int | None = None) -> list[bytes]:
        """Keys of the full blocks of its prompt, or of its first so many tokens."""
        request = self.requests[request_id]
        num_tokens = request.num_prompt_tokens if num_tokens is None else num_tokens
        keys = RequestKeys(request, self.hasher(), salt=request.cache_salt)
        return [bytes(key) for key in keys.first(num_tokens // BLOCK)]

    def hasher(self) -> BlockHasher:
        """The hasher of the tenant `red`."""
        hasher: BlockHasher = ours(self.connector)._scheduler._work.cache.hashers["red"]  # type: ignore[attr-defined]
        return hasher

    def note_loaded(self, noted: list[object]) -> None:
        """From now on, notes what workers answer when they have loaded blocks."""

        def note(build: Callable[[], Any]) -> Any:
            metadata = build()
            told = metadata.messages.values() if metadata is not None else ()
            noted.extend(each for messages in told for each in map(decode, messages) if isinstance(each, Loaded))
            return metadata

        for rank in self.ranks:
            connector = ours(rank.connector)
            connector.build_connector_worker_meta = partial(  # type: ignore[method-assign]
                note, connector.build_connector_worker_meta
            )

    def forget_device(self) -> None:
        """Empties vLLM's own prefix cache."""
        assert self.scheduler.reset_prefix_cache()

    def require_right_answers(self) -> None:
        """Requires right answers of all requests that were not aborted, and that nothing leaked."""
        for request_id, request in self.requests.items():
            if request.status == RequestStatus.FINISHED_ABORTED:
                continue
            expected = answer_to(request.prompt_token_ids, request.max_tokens)
            assert self.answers.get(request_id) == expected, request_id
            assert self.reasons[request_id] == "length"
        self.scheduler.schedule()  # as vLLM's own tests do: hands over the last finished ids
        encoded = self.scheduler.encoder_cache_manager
        assert not any(encoded.cached.values())
        encoded.reset()  # what is held by nobody may stay there
        load_helpers().assert_scheduler_empty(self.scheduler)
        assert self.received == self.started, "every load is reported to be over, and once"

    def close(self) -> None:
        for rank in self.ranks:
            rank.connector.shutdown()
        self.scheduler.shutdown()

    def _count_loads(self) -> None:
        begin, end = self.connector.update_state_after_alloc, self.connector.update_connector_output

        def count(request: Request, blocks: Any, num_external_tokens: int) -> None:
            if num_external_tokens:
                self.started[request.request_id] += 1
            begin(request, blocks, num_external_tokens)

        def receive(results: KVConnectorOutput) -> None:
            end(results)  # which may add to them
            self.received.update(results.finished_recving or ())

        self.connector.update_state_after_alloc = count  # type: ignore[method-assign]
        self.connector.update_connector_output = receive  # type: ignore[method-assign]

    def _take_in(self) -> None:
        output, result = self._under_way.popleft()
        for outputs in self.scheduler.update_from_output(output, result).values():
            for each in outputs.outputs:
                self.answers.setdefault(each.request_id, []).extend(each.new_token_ids)
                if each.kv_transfer_params is not None:
                    self.told[each.request_id] = each.kv_transfer_params
                if each.finish_reason is not None:
                    self.reasons[each.request_id] = str(each.finish_reason)


@contextlib.contextmanager
def engine(model: Path, extra: Mapping[str, Any], **how: Any) -> Iterator[Engine]:
    """Closed at the end."""
    running = Engine(model, extra, **how)
    with contextlib.closing(running):
        yield running
