"""The listening gRPC server: pool, health, reflection."""

from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

import grpc
from grpc_reflection.v1alpha import reflection

from kvtier.config import Config
from kvtier.config.tls_files import pool_service_tls
from kvtier.errors import ConfigError, KvtierError
from kvtier.net.address import UNIX_PREFIX
from kvtier.net.certificates import Renewed, TlsFiles, read_pem, server_context
from kvtier.protocol.status import code_for
from kvtier_pool.grpc.call_places import CallPlaces
from kvtier_pool.grpc.callers import Callers
from kvtier_pool.grpc.health import SERVICE as HEALTH_SERVICE
from kvtier_pool.grpc.health import HealthServicer
from kvtier_pool.grpc.servicer import SERVICE, PoolServicer
from kvtier_pool.listener import SocketAccess, require_nobody_there

_MAX_MESSAGE_BYTES = 4 << 20
_LOOKAHEAD_BYTES = 256 << 10
"""What a client may send before anybody reads it. gRPC would raise this to megabytes for each connection by itself, as
far as the network gives: 60 connections of one tenant took 900 MiB. Less slows a single client down."""
_OPTIONS = (
    # Two servers on one port would share it without a word.
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    # Finds clients that are gone without a word, so that their upload's slot is given back.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", _LOOKAHEAD_BYTES),
    # What has come is read to its end, also after a connection was ended for sending too much.
    ("grpc.tcp_receive_buffer_size", _LOOKAHEAD_BYTES),
)
_HANDSHAKE_S = 5.0
"""The seconds that a peer has to begin HTTP/2, as long as HELLO of the block protocol has; after that it makes way."""
_IDLE_S = 60.0
"""The seconds after which a connection without a call is closed; clients open another one with their next call."""
_KEYS = "gRPC takes P-256, P-384, and RSA of 2,048 bits or more; leave `grpc_listen` empty, or have another key signed"


class PoolServer:
    """Binds, serves and stops. One thread calls it."""

    def __init__(self, servicer: PoolServicer, callers: Callers, config: Config, places: CallPlaces) -> None:
        """Binds nothing yet: see `start`."""
        table = config.pool_service
        self._server = grpc.server(
            # A thread is made when it is needed, so that most of them never are.
            futures.ThreadPoolExecutor(places.num_threads, thread_name_prefix="kvtier-grpc"),
            interceptors=[_ReflectionGuard(callers, places)],
            options=(
                *_OPTIONS,
                # Each costs a descriptor, and nobody needs a token to open one. As many as there are places, and as
                # many that may come before some have made way.
                ("grpc.max_allowed_incoming_connections", 2 * callers.connections.num_places),
                ("grpc.server_handshake_timeout_ms", round(_HANDSHAKE_S * 1000)),
                ("grpc.max_connection_idle_ms", round(_IDLE_S * 1000)),
            ),
            # Calls beyond the threads are those that nobody has asked yet whose they are.
            maximum_concurrent_rpcs=2 * places.num_threads,
            compression=grpc.Compression.NoCompression,
        )
        reflection.enable_server_reflection((SERVICE, HEALTH_SERVICE, reflection.SERVICE_NAME), self._server)
        self._server.add_generic_rpc_handlers((servicer.handler(), HealthServicer(SERVICE).handler()))
        self._connections = callers.connections
        self._listen = table.grpc_listen
        self._access = SocketAccess(table.socket_mode, table.socket_group)
        self._tls = pool_service_tls(config)

    def start(self) -> tuple[str, ...]:
        """Listens and serves; returns the addresses with real ports. `ConfigError` when one cannot be bound."""
        others = self._connections.listening()
        addresses = tuple(map(self._bind, self._listen))
        self._connections.start(self._connections.listening() - others)
        self._server.start()
        return addresses

    def stop(self, grace_s: float) -> None:
        """Takes no new calls, gives those in flight `grace_s` seconds, then cancels them. Waits."""
        self._server.stop(grace_s).wait()
        self._connections.stop()

    def _bind(self, address: str) -> str:
        tls = None if address.startswith(UNIX_PREFIX) else self._tls
        try:
            if address.startswith(UNIX_PREFIX):
                require_nobody_there(address.removeprefix(UNIX_PREFIX))  # gRPC would take the name from whoever has it
            if tls is None:
                port = self._server.add_insecure_port(address)
                if address.startswith(UNIX_PREFIX):  # made as the umask has it; nobody is answered before `start`
                    self._access.give(address.removeprefix(UNIX_PREFIX))
            else:
                port = self._server.add_secure_port(address, _credentials(tls))
        except OSError as error:
            raise ConfigError(
                f"pool_service.grpc_listen: cannot listen on {address}: {error}; choose another one (--grpc-listen)"
            ) from error
        except RuntimeError as error:
            if tls is not None and not _usable(tls):
                raise ConfigError(f"cannot serve gRPC on {address} with this key: {_KEYS}") from error
            raise ConfigError(
                f"pool_service.grpc_listen: cannot listen on {address}: is it in use, or not of this machine? Choose "
                "another one (--grpc-listen)"
            ) from error
        return address if address.startswith(UNIX_PREFIX) else f"{address.rpartition(':')[0]}:{port}"


class _ReflectionGuard(grpc.ServerInterceptor):
    """Reflection streams keep a thread each, so they are for clients that have credentials, and a call of theirs."""

    def __init__(self, callers: Callers, places: CallPlaces) -> None:
        self._callers = callers
        self._places = places

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], "grpc.RpcMethodHandler[Any, Any] | None"],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[Any, Any] | None":
        handler = continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith(f"/{reflection.SERVICE_NAME}/"):
            return handler
        serve = handler.stream_stream
        assert serve is not None, "reflection has other calls than streams by now"

        def guarded(requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
            try:
                login = self._callers.login_of(context)
                with self._places.of_call(login.tenant):
                    yield from serve(requests, context)
            except KvtierError as error:
                context.abort(code_for(error), str(error))

        return grpc.stream_stream_rpc_method_handler(guarded, handler.request_deserializer, handler.response_serializer)


def _usable(files: TlsFiles) -> bool:
    """Whether gRPC takes them on a port that is free: it does not say why it does not listen."""
    probe = grpc.server(futures.ThreadPoolExecutor(1), options=_OPTIONS)
    try:
        probe.add_secure_port("127.0.0.1:0", _credentials(files))
    except RuntimeError:
        return False
    probe.start()  # one that was never started keeps its port
    probe.stop(None).wait()
    return True


def _credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """Makes the credentials of one address: gRPC takes them as they are but once, and asks for newer ones after that.

    Raises `ConfigError` when the files are no good. Renewed ones count from the next connection on.
    """

    def read() -> grpc.ServerCertificateConfiguration:
        server_context(files)  # names what is wrong, which gRPC does not
        certificate, key, *ca = map(read_pem, files.named)
        return grpc.ssl_server_certificate_configuration([(key, certificate)], ca[0] if ca else None)

    renewed = Renewed(files.named, read)
    given = renewed.current()

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        """None: as before."""
        nonlocal given
        before, given = given, renewed.current()
        return None if given is before else given

    # The stubs know of no None, which grpc documents.
    return grpc.dynamic_ssl_server_credentials(given, fetch, files.ca is not None)  # type: ignore[arg-type]
