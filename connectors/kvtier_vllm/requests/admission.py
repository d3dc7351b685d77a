"""Admission of requests: for which of them blocks are loaded and saved, and by which keys."""

import logging
from collections.abc import Mapping

from vllm.v1.request import Request

from kvtier.clock import Clock
from kvtier.config import Config
from kvtier.identity.keys import BlockHasher
from kvtier.system.logs import log_fields
from kvtier_vllm.content.contents import Contents
from kvtier_vllm.request_hashes import name_adapter
from kvtier_vllm.requests.keys import RequestKeys
from kvtier_vllm.requests.known_requests import KnownRequest
from kvtier_vllm.requests.media import RequestMedia
from kvtier_vllm.requests.params import RequestParams, params_of
from kvtier_vllm.requests.tenants import Tenants
from kvtier_vllm.requests.traces import RequestTrace

_log = logging.getLogger(__name__)


class Admission:
    """Requests from their arrival to their end. Scheduler thread only; nothing blocks."""

    def __init__(self, config: Config, contents: Contents, clock: Clock) -> None:
        """:param contents: digests of adapters and media; stays the caller's."""
        self._has_pool = bool(config.pool.address)
        self._tenants = Tenants(config)
        self._adapters = contents.adapters
        self._media = RequestMedia(contents.media, patience_s=config.cache.lookup_deadline_s, clock=clock)
        self._is_warned = False
        self.known: dict[str, KnownRequest] = {}
        """The admitted requests by id, for others to read."""

    def params_of(self, request: Request) -> RequestParams:
        """Returns what the request asks of kvtier."""
        return params_of(request, has_pool=self._has_pool, may_be=self._tenants.may_be)

    def pass_over(self, request: Request) -> None:
        """Takes a new request while no worker has said what its KV is: vLLM's own cache alone works for it."""
        self._tenants.of(request, self.params_of(request).tenant)
        if not self._is_warned:
            self._is_warned = True
            _log.error(
                "kvtier keeps nothing: no worker has said what its KV is. MultiConnector hands on what its first "
                "connector's workers say, and no more: name KvtierConnector first"
            )

    def add(self, request: Request, hashers: Mapping[str, BlockHasher], weights: bytes | None) -> None:
        """Takes a new request, and admits it if its tenant and its content are known, now or when its media are.

        :param hashers: the hasher of each tenant, by its name.
        :param weights: what tells the weights from those that vLLM has started with; None: they are those.
        """
        params = self.params_of(request)
        # Before all else: vLLM's own cache must know it in any case.
        tenant, salt = self._tenants.of(request, params.tenant)
        if tenant is None or not RequestKeys.cover(request):
            return
        adapter = self._adapter_of(request)
        if adapter is None:
            return
        keys = RequestKeys(request, hashers[tenant], salt=salt, adapter=adapter, weights=weights)
        known = KnownRequest(request, keys, params, RequestTrace(request.trace_headers))
        if self._media.admit(known):
            self._keep(known)

    def is_pending(self, request: Request) -> bool:
        """Whether vLLM is to ask again what the request hits: its media have no names yet, or have just got them."""
        if request.request_id not in self._media:
            return False
        if self._media.is_worth_waiting(request):
            return True
        with log_fields(request_id=request.request_id):
            named = self._media.take(request.request_id)
        if named is None:
            return False
        self._keep(named)
        # What vLLM has just found on the device it has found by the names before: they may be another medium's.
        return True

    def drop(self, request_id: str) -> KnownRequest | None:
        """Forgets a request that has ended. Returns it if it was admitted."""
        self._media.drop(request_id)
        return self.known.pop(request_id, None)

    def change_weights(self, weights: bytes | None) -> None:
        """Names all requests anew, by the digest of other weights. What was saved of them does not count any more."""
        self._media.forget()
        for request_id, known in list(self.known.items()):
            if self._adapter_of(known.request) == known.keys.adapter:
                known.keys.change_weights(weights)
            else:  # vLLM goes on to call its blocks by the adapter that it was added with
                del self.known[request_id]
            known.num_saved = 0

    def _keep(self, known: KnownRequest) -> None:
        """Loads and saves for the request from now on. It has not been scheduled yet.

        vLLM's own cache tells adapters apart by name and path, which several may have: there goes their content, too.
        """
        if (name := known.keys.adapter_name) is not None:
            name_adapter(known.request, name)
        self.known[known.request.request_id] = known

    def _adapter_of(self, request: Request) -> bytes | None:
        """Returns the digest of the request's adapter, empty for a request without one; None: it is not known."""
        return b"" if request.lora_request is None else self._adapters.digest(request.lora_request)
