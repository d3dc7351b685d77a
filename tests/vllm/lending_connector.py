"""A connector beside ours that loads for real: it keeps KV of requests in this process and gives it to others.

A request says what it wants in the table `lender` of its `kv_transfer_params`: `{"keep": true}` has its KV kept, and
`{"loads": "between"}` has its prefix loaded between steps, by a thread, `{"loads": "within"}` within its first step.
`{"fails": [1]}` names blocks of that load, by number, that are left garbage and are reported as failed.
"""

import hashlib
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request

KEPT: dict[bytes, list[Tensor]] = {}
"""KV of blocks, one tensor a layer, by all tokens to the end of the block. For all engines of the process."""
_GARBAGE = 7
_NUM_STEPS = 3
"""For which a load between steps is under way, at least."""


@dataclass
class _Load:
    request_id: str
    blocks: list[int]
    keys: list[bytes]
    is_within: bool
    fails: list[int]

    def failed(self) -> list[int]:
        """Device blocks that are not filled."""
        return [self.blocks[index] for index in self.fails if index < len(self.blocks)]


@dataclass
class _Metadata(KVConnectorMetadata):
    loads: list[_Load] = field(default_factory=list)
    keeps: list[tuple[int, bytes]] = field(default_factory=list)


@dataclass
class _UnderWay:
    load: _Load
    thread: threading.Thread
    num_steps: int = _NUM_STEPS


class LendingConnector(KVConnectorBase_V1, SupportsHMA):
    """For one worker, and models with one KV group."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._size = vllm_config.cache_config.block_size
        self._next = _Metadata()
        self._offered: dict[str, tuple[int, int]] = {}
        """By request, the blocks that were offered to it: the first one, and the one behind the last."""
        self._lent: dict[str, int] = {}
        """By request, how often vLLM had preempted it when it was given some. Not again, or a failure never ends."""
        self._layers: list[Tensor] = []
        self._under_way: list[_UnderWay] = []
        self._invalid: set[int] = set()

    # Scheduler

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        loads = _said(request).get("loads")
        if loads is None or self._lent.get(request.request_id) == request.num_preemptions:
            return 0, False
        first = num_computed_tokens // self._size
        keys = keys_of(request.all_token_ids[: request.num_tokens - 1], self._size)
        stop = next((n for n in range(first, len(keys)) if keys[n] not in KEPT), len(keys))
        self._offered[request.request_id] = first, stop
        return (stop - first) * self._size, loads == "between" and stop > first

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        if num_external_tokens:
            self._lent[request.request_id] = request.num_preemptions
            first, stop = self._offered[request.request_id]
            said, (table,) = _said(request), blocks.get_block_ids()
            keys = keys_of(request.all_token_ids, self._size)[first:stop]
            load = _Load(request.request_id, table[first:stop], keys, said["loads"] == "within", said.get("fails", []))
            self._next.loads.append(load)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        metadata, self._next = self._next, _Metadata()
        return metadata

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        if _said(request).get("keep"):
            keys = keys_of(request.all_token_ids[: request.num_tokens - 1], self._size)
            self._next.keeps += zip(block_ids, keys, strict=False)
        return False, None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        (table,) = block_ids
        return self.request_finished(request, table)

    def has_pending_push_work(self) -> bool:
        return bool(self._next.keeps)

    # Worker

    def register_kv_caches(self, kv_caches: Mapping[str, Tensor]) -> None:
        self._layers = list(kv_caches.values())

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(kv_connector_metadata, _Metadata)
        for block, key in kv_connector_metadata.keeps:
            KEPT[key] = [layer[block].clone() for layer in self._layers]

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, _Metadata)
        for load in metadata.loads:
            if load.is_within:
                self._fill(load)
                self._invalid.update(load.failed())
            else:
                thread = threading.Thread(target=self._fill, args=(load,))
                thread.start()
                self._under_way.append(_UnderWay(load, thread))

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: loads within a step are over when it begins."""

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: whole blocks are kept."""

    def wait_for_save(self) -> None:
        """Nothing: blocks are kept when their request has ended."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = KVConnectorTransferResults()
        for each in self._under_way:
            each.num_steps -= 1
            if each.num_steps <= 0:
                each.thread.join()
                results.finished_recving.add(each.load.request_id)
                self._invalid.update(each.load.failed())
        self._under_way = [each for each in self._under_way if each.num_steps > 0]
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        invalid, self._invalid = self._invalid, set()
        return invalid

    def shutdown(self) -> None:
        for each in self._under_way:
            each.thread.join()

    def _fill(self, load: _Load) -> None:
        for index, (block, key) in enumerate(zip(load.blocks, load.keys, strict=True)):
            for layer, kept in zip(self._layers, KEPT[key], strict=True):
                layer[block].fill_(_GARBAGE)
                if index not in load.fails:
                    layer[block].copy_(kept)


def keys_of(tokens: Sequence[int], size: int) -> list[bytes]:
    """What KV of each full block of these tokens is kept under."""
    made, chain = [], hashlib.sha256()
    for start in range(0, len(tokens) - size + 1, size):
        chain.update(np.asarray(tokens[start : start + size], dtype=np.int64).tobytes())
        made.append(chain.digest())
    return made


def _said(request: Request) -> Mapping[str, Any]:
    said: Mapping[str, Any] = (request.kv_transfer_params or {}).get("lender", {})
    return said
