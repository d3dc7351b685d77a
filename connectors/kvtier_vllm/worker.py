"""The connector in a vLLM worker: the mover over its paged KV."""

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from torch import Tensor
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.v1.kv_cache_interface import KVCacheConfig

from kvtier.build.engine_cache import mover_half
from kvtier.build.span_export import exporting_spans
from kvtier.clock import MONOTONIC
from kvtier.config import Config
from kvtier.device.pinned_memory import near_node, pins_read_only
from kvtier.errors import ConfigError
from kvtier.identity.keys import NamespaceId
from kvtier.metrics import Metrics
from kvtier.offload import ALONE, OTHER_COPIES, Mover, Replica
from kvtier.offload.messages import LoadBatch, Loaded, ToDirectory, ToMover, decode, encode
from kvtier_vllm.compat import holds_the_same_in_all_ranks, states_of
from kvtier_vllm.content.identity import DIGESTS, namespace_of, weight_files
from kvtier_vllm.content.loaded_adapters import LoadedAdapters
from kvtier_vllm.kv.paged_kv import device_kv
from kvtier_vllm.messages import StepMetadata, WorkerIdentity, WorkerMetadata
from kvtier_vllm.observe.relay import Relay
from kvtier_vllm.observe.stats import KvtierStats
from kvtier_vllm.refusals import refusal, without_blocks
from kvtier_vllm.settings import of_worker
from kvtier_vllm.steps.step_starts import StepStarts
from kvtier_vllm.weights.weight_hooks import watching
from kvtier_vllm.weights.weights import Weights

_log = logging.getLogger(__name__)
_PATIENCE_S = 5.0
_LOOK_S = 0.05
_EMPTY_STEP_S = 0.002
"""How long an empty step waits for transfers, unless a request goes on after it: a loop of empty steps would take the
interpreter from them."""


class WorkerSide:
    """One worker's half. Called by its main thread only; the mover has threads of its own."""

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, config: Config) -> None:
        self._vllm_config, self._kv_cache_config, self._config = vllm_config, kv_cache_config, config
        self._stack = contextlib.ExitStack()
        self._mover: Mover | None = None
        self._metrics = Metrics()
        self._relay = Relay(self._metrics.registry)
        self._weights: Weights | None = None
        """None until `register`, and so are adapters."""
        self._adapters: LoadedAdapters | None = None
        self._begun = (0, 0)
        """The generation of the weights, and the number of the first step that has begun in it."""
        self._told_generation = 0
        """The generation of the weights that the scheduler knows."""
        self._identity: WorkerIdentity | None = None
        self._rank = 0
        self._outbox: list[ToDirectory] = []
        """Messages of the mover for the scheduler."""
        self._starts = StepStarts()
        self._step = 0
        """Number of the present step, until the scheduler is told of it."""
        self._loading: dict[int, int] = {}
        """The generation of the weights that each load batch without an answer is of, by id of the batch."""
        self._results = KVConnectorTransferResults()
        self._invalid: set[int] = set()

    def register(self, layers: Mapping[str, Tensor]) -> None:
        """Takes over the worker's KV. Raises `ConfigError`.

        A second engine in one process gets the connector of the first from vLLM, which would copy blocks of the one for
        those of the other.
        """
        if self._mover is not None:
            raise ConfigError(
                "vLLM gives an engine the connector of another one in its process, which cannot serve both: leave out "
                "VLLM_ENABLE_V1_MULTIPROCESSING=0, or end the other engine first"
            )
        self._stack.enter_context(exporting_spans(self._config, "kvtier-vllm"))  # before tiers are made
        num_blocks = self._kv_cache_config.num_blocks
        tp, pp = get_tp_group(), get_pp_group()
        self._rank = pp.rank_in_group * tp.world_size + tp.rank_in_group
        groups = [
            {name: layers[name] for name in group.layer_names if name in layers}
            for group in self._kv_cache_config.kv_cache_groups
        ]
        is_replicated = holds_the_same_in_all_ranks(self._kv_cache_config)
        namespace = self._watch_weights(lambda: self._namespace(groups))
        num_copies = self._config.cache.load_threads + OTHER_COPIES
        layers_by_group = [group.values() for group in groups]
        staging_bytes = int(self._config.cache.staging_bytes)
        device = self._stack.enter_context(
            device_kv(
                layers_by_group,
                num_blocks,
                num_copies=num_copies,
                staging_bytes=staging_bytes,
                checks_loads=self._config.verifies_on_device(next(iter(layers.values())).device.type),
            )
        )
        config = of_worker(self._config, f"{self._vllm_config.parallel_config.data_parallel_index}-{self._rank}")
        has_direct_loads = pins_read_only(next(iter(layers.values())).device)
        if not has_direct_loads:
            config = config.without_direct_loads()
        half = mover_half(
            config,
            device=device,
            namespace=namespace,
            metrics=self._metrics,
            numa_node=near_node(next(iter(layers.values())).device),
            replica=Replica(tp.rank_in_group, tp.world_size) if is_replicated else ALONE,
        )
        entered = self._stack.enter_context(half)
        self._mover = entered.mover
        # With what its disk holds: the first request already wants to know.
        self._identity = WorkerIdentity(
            namespace, device.block_bytes, list(map(encode, self._mover.poll())), has_direct_loads
        )
        _log.info(
            "kvtier keeps KV of namespace %s, %d bytes a block, KV groups: %d",
            namespace.hex(), device.block_bytes, len(groups),
        )  # fmt: skip
        taken = entered.memory_use().by_kind().items()
        _log.info(
            "kvtier takes memory for this rank: %s", ", ".join(f"{kind} {size >> 20} MiB" for kind, size in taken)
        )

    def identity(self) -> WorkerIdentity | None:
        return self._identity

    def begin(self, step: StepMetadata) -> None:
        """Begins a step. It is called before the forward pass is launched, when blocks have been cleared for it."""
        if self._mover is not None:
            self._starts.begin(step.number, self._mover.fence())
            self._step = step.number
            if step.number and self._generation != self._begun[0]:
                self._begun = (self._generation, step.number)

    def flush(self, step: StepMetadata) -> None:
        """Waits, before the forward pass, until what it overwrites has been copied. A copy within this host's memory
        ends."""
        if self._mover is None:
            return
        begun = MONOTONIC()
        warn_at = begun + _PATIENCE_S
        while awaited := self._mover.copying(step.flush):
            self._mover.wait(_LOOK_S)
            self._poll()
            if (now := MONOTONIC()) > warn_at:
                _log.warning("a step has waited %.0f s for %d copies to host memory", now - begun, len(awaited))
                warn_at += _PATIENCE_S

    def submit(self, step: StepMetadata) -> None:
        """Gives the mover the step's messages, after the forward pass was launched."""
        if self._mover is None:
            return
        assert self._adapters is not None
        self._adapters.expect(step.adapters)
        messages = self._without_refused(step)
        loads = [message.batch_id for message in messages if isinstance(message, LoadBatch)]
        self._loading.update(dict.fromkeys(loads, self._generation))
        self._mover.submit(messages, loads_after=self._starts.fence(step.loads_after))
        if step.is_empty and not step.ended:
            self._mover.wait(_EMPTY_STEP_S)
        for request_id, invalid in step.ended.items():
            self._results.finished_recving.add(request_id)
            if len(self._kv_cache_config.kv_cache_groups) == 1:
                self._invalid.update(invalid)
            elif invalid:  # blocks of which group, vLLM would not know
                self._results.failed_recving.add(request_id)

    def take_stats(self) -> KvtierStats | None:
        """What this worker and its I/O process have counted since it was last told, and how much more memory the tiers
        take."""
        gains = self._relay.take()
        return KvtierStats(gains) if gains else None

    def take_results(self) -> KVConnectorTransferResults:
        results, self._results = self._results, KVConnectorTransferResults()
        return results

    def take_invalid_blocks(self) -> set[int]:
        invalid, self._invalid = self._invalid, set()
        return invalid

    def take_messages(self) -> WorkerMetadata | None:
        """Returns what the scheduler is to know; None when there is nothing to say."""
        self._poll()
        if self._weights is None or self._adapters is None:
            return None
        state, adapters = self._weights.state, self._adapters.take_untold()
        has_changed = state.generation != self._told_generation
        if not (self._outbox or self._step or has_changed or adapters):
            return None
        self._told_generation = state.generation
        if state.generation == self._begun[0]:
            state = replace(state, first_step=self._begun[1])
        messages, self._outbox = [encode(message) for message in self._outbox], []
        step, self._step = self._step, 0
        of_rank = {self._rank: messages} if messages else {}
        return WorkerMetadata(of_rank, step, {self._rank: state} if has_changed else {}, adapters)

    def close(self) -> None:
        """Ends after what was submitted."""
        self._mover = None
        self._stack.close()

    def _namespace(self, groups: Sequence[Mapping[str, Tensor]]) -> NamespaceId:
        """The namespace of the weights that the model's folder has at this moment."""
        return namespace_of(
            self._vllm_config,
            groups,
            states=states_of(self._kv_cache_config),
            num_blocks=self._kv_cache_config.num_blocks,
            tp_rank=0 if holds_the_same_in_all_ranks(self._kv_cache_config) else get_tp_group().rank_in_group,
            pp_rank=get_pp_group().rank_in_group,
            digests=DIGESTS,
        ).id

    def _watch_weights(self, namespace: Callable[[], NamespaceId]) -> NamespaceId:
        """Watches the weights from now on until `close`; gives the namespace of those that vLLM has loaded."""
        model, load = self._vllm_config.model_config, self._vllm_config.load_config
        self._weights = Weights(namespace, lambda path: weight_files(model, load, path))
        self._adapters = LoadedAdapters(self._weights.forget_device)
        self._stack.enter_context(watching(self._vllm_config, self._weights, self._adapters, self._wait_for_copies))
        assert self._weights.state.namespace is not None
        return NamespaceId(self._weights.state.namespace)

    @property
    def _generation(self) -> int:
        assert self._weights is not None
        return self._weights.state.generation

    def _without_refused(self, step: StepMetadata) -> list[ToMover]:
        """What the mover is to do. The rest is of other weights than this worker has, and is answered here."""
        assert self._weights is not None
        state, messages = self._weights.state, [decode(data) for data in step.messages]
        if not messages or (state.namespace is not None and step.generations[self._rank] == state.generation):
            return messages
        accepted = []
        for message in messages:
            answers = refusal(message)
            if answers is None:
                accepted.append(message)
            else:
                self._outbox += answers
        return accepted

    def _wait_for_copies(self) -> None:
        """Waits until no copy that was submitted touches the device, and for no tier that is slow."""
        if self._mover is not None:
            self._mover.cancel_loads()
        while self._mover is not None and self._mover.is_at_device:
            self._mover.wait(_LOOK_S)
            self._poll()

    def _poll(self) -> None:
        if self._mover is None:
            return
        for message in self._mover.poll():
            self._relay.look_next()
            if isinstance(message, Loaded) and self._loading.pop(message.batch_id) != self._generation:
                message = without_blocks(message)
            self._outbox.append(message)
