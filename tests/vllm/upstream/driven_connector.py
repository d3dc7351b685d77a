"""Our connector where vLLM's tests have a mock: what they make the mock answer, ours is made to answer by its content.

A test that says "99 blocks of this request can be loaded" gets a connector whose host memory holds these blocks. Should
it offer anything else, the test fails. All its other answers are its own, whatever a test sets for the mock.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any
from unittest.mock import Mock

import numpy as np
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request

from kvtier.build.engine_cache import mover_half
from kvtier.clock import MONOTONIC
from kvtier.device.kv import HostMemoryKV
from kvtier.identity.keys import NamespaceId
from kvtier.metrics import Metrics
from kvtier.offload.planner import leading_hits
from kvtier_vllm import KvtierConnector
from kvtier_vllm.messages import WorkerIdentity
from kvtier_vllm.requests.keys import RequestKeys

_NAMESPACE = NamespaceId(b"vLLM's own tests")
_NUM_DEVICE_BLOCKS = 10_000
BLOCK_BYTES = 64
_PATIENCE_S = 60.0
Offer = tuple[int | None, bool]
REMOTE: list[Request] = []
"""Requests whose prefix another engine has, as their test says: all of it that can be loaded is here."""


class Offers:
    """`get_num_new_matched_tokens`, as far as tests treat it as a mock."""

    def __init__(self, ask: Callable[[Request, int], Offer], hold: Callable[[Request, int], None]) -> None:
        self._ask, self._hold = ask, hold
        self._canned: Callable[[Request, int], Offer] | Iterable[Offer] | None = None
        self.call_count = 0

    @property
    def side_effect(self) -> Callable[[Request, int], Offer] | Iterable[Offer] | None:
        return self._canned

    @side_effect.setter
    def side_effect(self, canned: Callable[[Request, int], Offer] | Iterable[Offer] | None) -> None:
        self._canned = canned if callable(canned) or canned is None else iter(canned)

    def __call__(self, request: Request, num_computed_tokens: int) -> Offer:
        self.call_count += 1
        if self._canned is None:
            return self._ask(request, num_computed_tokens)
        if request in REMOTE:
            REMOTE.remove(request)
        canned = self._canned
        wanted = canned(request, num_computed_tokens) if callable(canned) else next(canned)  # type: ignore[call-overload]
        if wanted[0]:
            self._hold(request, num_computed_tokens + wanted[0])
        offer = self._ask(request, num_computed_tokens)
        assert offer[0] == wanted[0], f"the test wants {wanted} offered, kvtier offers {offer}"
        assert not offer[0] or offer[1] == wanted[1], "kvtier loads asynchronously, always"
        return offer


class DrivenConnector(KvtierConnector):
    """The scheduler's half, connected to a mover over memory of its own."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        side = self._on_scheduler()
        device = HostMemoryKV(np.zeros((_NUM_DEVICE_BLOCKS, BLOCK_BYTES), dtype=np.uint8))
        half = mover_half(side._config, device=device, namespace=_NAMESPACE, metrics=Metrics())
        self._mover = side._stack.enter_context(half).mover
        side.connect([WorkerIdentity(_NAMESPACE, BLOCK_BYTES, [])])
        for name in dir(KVConnectorBase_V1):
            method = getattr(self, name)
            if not name.startswith("_") and callable(method):
                # A side effect goes before a return value that the test sets for the mock.
                self.__dict__[name] = Mock(side_effect=method)
        self.__dict__["get_num_new_matched_tokens"] = Offers(self._offer, self.hold)
        self.__dict__["on_new_request"] = Mock(side_effect=self._note_new)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "get_num_new_matched_tokens" and not isinstance(value, Offers):
            offers = Offers(self._offer, self.hold)
            offers.side_effect = value.side_effect
            value = offers
        super().__setattr__(name, value)

    def hold(self, request: Request, num_tokens: int) -> None:
        """From now on, our host memory has the first blocks of this request."""
        side = self._on_scheduler()
        assert side._work is not None
        size = side._size
        hashes = RequestKeys(request, side._work.cache.hashers["red"], salt=request.cache_salt).first(
            num_tokens // size
        )
        assert len(hashes) == num_tokens // size
        directory = side._work.cache.directory
        directory.start_save(list(zip(hashes, range(len(hashes)), strict=True)))
        deadline = MONOTONIC() + _PATIENCE_S
        while leading_hits(directory.poll_lookup(directory.start_lookup(hashes)) or []) < len(hashes):
            assert MONOTONIC() < deadline, "the blocks did not arrive in host memory"
            self._exchange()

    def _exchange(self) -> None:
        """What the worker of an engine would do in a step."""
        side = self._on_scheduler()
        assert side._work is not None
        self._mover.submit(side._work.cache.directory.take_messages())
        self._mover.wait(0.05)
        # By the directory itself: it is no step of vLLM's that these saves belong to.
        side._work.cache.directory.deliver(0, self._mover.poll())
        side._note_results()

    def _note_new(self, request: Request) -> None:
        KvtierConnector.on_new_request(self, request)

    def _offer(self, request: Request, num_computed_tokens: int) -> Offer:
        side = self._on_scheduler()
        if request in REMOTE:
            REMOTE.remove(request)
            self.hold(request, (request.num_tokens - 1) // side._size * side._size)
        if request.request_id not in side._admission.known:
            side.add(request)  # tests put their mock into a scheduler that has requests already
        return KvtierConnector.get_num_new_matched_tokens(self, request, num_computed_tokens)


class RecordingConnector(KvtierConnector):
    """Counts the calls that vLLM's life-cycle test asks about."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.call_record: Counter[str] = Counter()

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        self.call_record["bind_connector_metadata"] += 1
        super().bind_connector_metadata(connector_metadata)

    def wait_for_save(self) -> None:
        self.call_record["wait_for_save"] += 1
        super().wait_for_save()

    def clear_connector_metadata(self) -> None:
        self.call_record["clear_connector_metadata"] += 1
        super().clear_connector_metadata()


class HandshakeConnector(KvtierConnector):
    """Keeps what it was given by the handshake."""

    legacy_metadata: dict[int, Any] | None = None
    pp_aware_metadata: dict[tuple[int, int], Any] | None = None

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        self.legacy_metadata = metadata

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        self.pp_aware_metadata = metadata
        super().set_xfer_handshake_metadata_pp_aware(metadata)
        assert self._on_scheduler()._work is not None, "not connected"
