"""Health checks over gRPC for any peer: probes have no credentials."""

import contextlib
import threading
from collections import deque
from collections.abc import Iterator

import grpc
from grpc_health.v1 import health_pb2

SERVICE = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
_REQUEST_S = 5.0
"""Seconds that a peer may keep a thread without saying what it asks."""
_MAX_WAITING = 2
"""Threads that peers may keep without saying what they ask. One more ends the oldest: probes say it at once."""


class HealthServicer:
    """`Check` of gRPC's health protocol: what is listening is serving. Any thread.

    No `Watch`, which clients take for a pool that serves: with it, strangers would hold calls for ever.
    """

    def __init__(self, *services: str) -> None:
        """:param services: that it knows besides the pool as a whole."""
        self._known = frozenset(("", *services))
        self._waiting: deque[grpc.ServicerContext] = deque()
        """Calls whose request has not come, oldest first."""
        self._lock = threading.Lock()

    def handler(self) -> grpc.GenericRpcHandler:
        """A stream of requests, of which there is one: grpc would wait for it on our thread, however long."""
        check = grpc.stream_unary_rpc_method_handler(
            self._check,
            health_pb2.HealthCheckRequest.FromString,
            health_pb2.HealthCheckResponse.SerializeToString,
        )
        return grpc.method_handlers_generic_handler(SERVICE, {"Check": check})

    def _check(
        self, requests: Iterator[health_pb2.HealthCheckRequest], context: grpc.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        with self._bounded_wait(context):
            request = next(requests, health_pb2.HealthCheckRequest())
        if request.service not in self._known:
            context.abort(grpc.StatusCode.NOT_FOUND, "there is no such service here")
        return health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)

    @contextlib.contextmanager
    def _bounded_wait(self, context: grpc.ServicerContext) -> Iterator[None]:
        """Cancels the call when its request takes too long, or too many others wait."""
        late = threading.Timer(_REQUEST_S, context.cancel)
        late.daemon = True
        late.start()
        with self._lock:
            self._waiting.append(context)
            oldest = self._waiting.popleft() if len(self._waiting) > _MAX_WAITING else None
        if oldest is not None:
            oldest.cancel()
        try:
            yield
        finally:
            late.cancel()
            with self._lock, contextlib.suppress(ValueError):
                self._waiting.remove(context)
