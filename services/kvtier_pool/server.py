"""The listening gRPC server: pool, health, reflection."""

from collections.abc import Callable
from concurrent import futures
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvtier.errors import ConfigError, KvtierError
from kvtier.wire.status import code_for
from kvtier_pool.auth import TokenAuthenticator
from kvtier_pool.servicer import SERVICE, PoolServicer
from kvtier_pool.settings import PoolSettings

_MAX_MESSAGE_BYTES = 4 << 20
_OPTIONS = (
    # Two servers on one port would share it without a word.
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    # Finds clients that are gone without a word, so that their upload's slot is given back.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
)


class PoolServer:
    """Binds, serves and stops. One thread calls it."""

    def __init__(self, servicer: PoolServicer, authenticator: TokenAuthenticator, settings: PoolSettings) -> None:
        """Binds nothing yet: see `start`."""
        self._server = grpc.server(
            futures.ThreadPoolExecutor(settings.num_threads, thread_name_prefix="kvtier-grpc"),
            interceptors=[_ReflectionGuard(authenticator)],
            options=_OPTIONS,
            maximum_concurrent_rpcs=4 * settings.num_threads,
            compression=grpc.Compression.NoCompression,
        )
        self._health = health.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server)
        self._server.add_generic_rpc_handlers((servicer.handler(),))
        self._listen = settings.grpc_listen

    def start(self) -> tuple[str, ...]:
        """Listens and serves; returns the addresses with real ports. `ConfigError` when one cannot be bound."""
        addresses = tuple(self._bind(address) for address in self._listen)
        self._server.start()
        for service in ("", SERVICE):
            self._health.set(service, health_pb2.HealthCheckResponse.SERVING)
        return addresses

    def stop(self, grace_s: float) -> None:
        """Takes no new calls, gives those in flight `grace_s` seconds, then cancels them. Waits."""
        self._health.enter_graceful_shutdown()
        self._server.stop(grace_s).wait()

    def _bind(self, address: str) -> str:
        try:
            port = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise ConfigError(f"cannot listen on {address}: is it in use, or not of this machine?") from error
        return address if address.startswith("unix:") else f"{address.rpartition(':')[0]}:{port}"


class _ReflectionGuard(grpc.ServerInterceptor):
    """Reflection streams keep a thread each, so they are for those who have a token."""

    def __init__(self, authenticator: TokenAuthenticator) -> None:
        self._authenticator = authenticator

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], "grpc.RpcMethodHandler[Any, Any] | None"],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[Any, Any] | None":
        if handler_call_details.method.startswith(f"/{reflection.SERVICE_NAME}/"):
            try:
                self._authenticator.authenticate(handler_call_details.invocation_metadata)
            except KvtierError as error:
                return _refuse(code_for(error), str(error))
        return continuation(handler_call_details)


def _refuse(code: grpc.StatusCode, details: str) -> "grpc.RpcMethodHandler[Any, Any]":
    def refuse(request: Any, context: grpc.ServicerContext) -> Any:
        context.abort(code, details)

    return grpc.stream_stream_rpc_method_handler(refuse)
