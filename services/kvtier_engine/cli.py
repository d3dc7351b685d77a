"""`kvtier engine`: commands of the engine."""

import logging
import signal
import socket
import ssl
import threading
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from kvtier.build.span_export import exporting_spans
from kvtier.cli.configuration.all_checks import findings_of
from kvtier.cli.options import LogFormat, LogLevel, command_group, with_log_options
from kvtier.config import Config, load_config
from kvtier.config.findings import log_warnings
from kvtier.config.tls_files import engine_tls
from kvtier.errors import ConfigError
from kvtier.memory.malloc import keep_freed_memory
from kvtier.net.address import is_loopback, reason_of
from kvtier.net.serving_tls import serving_context
from kvtier.system.logs import set_up_logs
from kvtier.system.open_files import raise_open_files_limit
from kvtier.system.process_metrics import leave_out_creation_times

if TYPE_CHECKING:
    import uvicorn

    from kvtier_engine.scheduling.engine import Engine

_SHUTDOWN_GRACE_S = 5
"""What requests that are running at a stop get to finish; then they are cancelled."""

_log = logging.getLogger(__name__)

app = command_group(help="A small OpenAI-compatible engine that shares its KV cache.")


@app.command()
def serve(
    config: Annotated[Path, typer.Option(help="TOML file: [engine], [cache], tiers, and this engine's tenant.")],
    model: Annotated[Path | None, typer.Option(help="Hugging Face folder or GGUF file, instead of the file's.")] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="TCP port; 0 takes a free one.")] = None,
    host: Annotated[
        str | None, typer.Option(help="Address of this machine to listen on: 127.0.0.1, 0.0.0.0, ::1.")
    ] = None,
    log_level: LogLevel = None,
    log_format: LogFormat = None,
) -> None:
    """Serves until SIGTERM or SIGINT, then finishes what it can, writes out what is queued and exits with 0.

    A second signal of the same kind ends it at once.

    Prints `ready url=http://HOST:PORT`, or https with TLS, when it can be used. Options win over the file.

    Example: kvtier engine serve --config kvtier.toml --port 8001
    """
    set_up_logs(log_level, log_format)
    keep_freed_memory()
    leave_out_creation_times()
    loaded = with_log_options(load_config(config), log_level, log_format)
    set_up_logs(loaded.log.level, loaded.log.format)
    final = _with_options(loaded, model, host, port)
    log_warnings(_log, findings_of(final))
    run(final)


def run(config: Config) -> None:
    """Computes in this process's first thread, and serves HTTP in another, until SIGTERM or SIGINT."""
    # Imported here, so that the command line does not load torch for other commands.
    import uvicorn

    from kvtier_engine.api.http_connections import BACKLOG, bounded_protocol
    from kvtier_engine.api.known_hosts import KnownHosts
    from kvtier_engine.api.request_tenants import RequestTenants
    from kvtier_engine.api.server import Server
    from kvtier_engine.api.tls_server import TlsServer
    from kvtier_engine.assemble import assembled_engine

    open_files, tls, tenants = raise_open_files_limit(), _tls(config), RequestTenants.of(config)
    with (
        _listening(config.engine.listen) as listener,
        exporting_spans(config, "kvtier-engine"),
        assembled_engine(config) as assembled,
    ):
        server = Server(
            assembled.engine,
            assembled.model.tokenizer,
            model_names=(assembled.model.name, *config.engine.adapters),
            eos_token_ids=assembled.model.config.eos_token_ids,
            registry=assembled.registry,
            tenants=tenants,
        )
        served, is_of_this_machine = server.app(), is_loopback(listener.getsockname()[0])
        serving = uvicorn.Config(
            KnownHosts(served, config.engine.allowed_hosts) if is_of_this_machine else served,
            loop="asyncio",  # whatever else is installed: one loop, which tests have seen
            http=bounded_protocol(open_files),
            backlog=BACKLOG,
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=_SHUTDOWN_GRACE_S,
        )
        uvicorn_server = uvicorn.Server(serving) if tls is None else TlsServer(serving, tls)
        _serve_until_ended(uvicorn_server, assembled.engine, listener, "http" if tls is None else "https")


def _serve_until_ended(server: "uvicorn.Server", engine: "Engine", listener: socket.socket, scheme: str) -> None:
    """Runs the engine in this thread and the server in another one, until a signal comes or either of them ends."""

    def serve_http() -> None:
        try:
            server.run(sockets=[listener])
        finally:
            engine.stop()

    def on_signal(number: int, frame: FrameType | None) -> None:
        server.should_exit = True
        # A second one ends a stop that takes too long for somebody's patience.
        signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    thread = threading.Thread(target=serve_http, name="kvtier-http")
    thread.start()
    host, port = listener.getsockname()[:2]
    print(f"ready url={scheme}://{f'[{host}]' if ':' in host else host}:{port}", flush=True)
    try:
        engine.run()
    finally:
        server.should_exit = True
        thread.join()


def _tls(config: Config) -> ssl.SSLContext | None:
    files = engine_tls(config)
    return None if files is None else serving_context(files)


def _listening(address: str) -> socket.socket:
    """Listens before the model is loaded: a port in use is found at once, and early clients wait instead of failing."""
    host, separator, port = address.rpartition(":")
    if not separator or not port.isdigit():
        raise ConfigError(f"engine.listen: {address!r}: use host:port, e.g. 127.0.0.1:8000")
    try:
        return socket.create_server((host.strip("[]"), int(port)), family=_family(host), backlog=128)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"engine.listen: cannot listen on {address}: {reason_of(error)}; choose another port (--port) or address "
            "(--host)"
        ) from error


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _with_options(config: Config, model: Path | None, host: str | None, port: int | None) -> Config:
    """The configuration with the command line's values in place of the file's."""
    changes: dict[str, object] = {}
    if model is not None:
        changes["model"] = model.expanduser().resolve()
    if host is not None or port is not None:
        known_host, _, known_port = config.engine.listen.rpartition(":")
        new_host = known_host if host is None else f"[{host.strip('[]')}]" if ":" in host else host
        changes["listen"] = f"{new_host}:{known_port if port is None else port}"
    return config.with_options("engine", config.engine.model_copy(update=changes), changes)
