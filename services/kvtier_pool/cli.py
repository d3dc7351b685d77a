"""`kvtier pool`: commands of the cache pool service."""

import gc
import logging
import os
import select
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer

from kvtier.build.span_export import exporting_spans
from kvtier.cli.options import LogFormat, LogLevel, command_group, with_log_options
from kvtier.config import Config, load_config, parse_config
from kvtier.config.accepted import accepted_tokens
from kvtier.config.findings import log_warnings
from kvtier.config.reloading import Reloader, ReloadThread
from kvtier.errors import ConfigError
from kvtier.memory.malloc import give_back_freed_memory, keep_freed_memory
from kvtier.system.logs import set_up_logs
from kvtier.system.open_files import raise_open_files_limit
from kvtier.system.private_process import make_process_private
from kvtier.system.process_metrics import leave_out_creation_times
from kvtier_pool.checks import setting_findings
from kvtier_pool.operator_server import OperatorServer
from kvtier_pool.operator_verbs import OperatorVerbs
from kvtier_pool.service import PoolService

_SLOW_START_S = 5.0
_LOOK_S = 1.0
"""Seconds between two looks whether the configuration's files have changed, or tokens have expired."""
_GC_THRESHOLDS = (50_000, 20, 1_000)
"""Garbage is looked for among what is young. A look at everything takes a quarter of a second per million blocks, with
all requests waiting, and the books of a tier have no cycles."""

_log = logging.getLogger(__name__)
app = command_group(help="The cache pool service.")


@app.command()
def serve(
    config: Annotated[
        Path | None, typer.Option(help="TOML file with the tables pool_service and tenants.NAME (token_sha256).")
    ] = None,
    listen: Annotated[
        list[str] | None,
        typer.Option(help="Block protocol address, host:port or unix:/path; port 0: free one. Repeatable."),
    ] = None,
    grpc_listen: Annotated[list[str] | None, typer.Option(help="gRPC address, likewise. Repeatable.")] = None,
    http_listen: Annotated[str | None, typer.Option(help="host:port of /healthz and /metrics.")] = None,
    tls_certificate: Annotated[
        Path | None, typer.Option(help="Certificate chain in PEM: TLS on all TCP ports.")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its key.")] = None,
    tls_client_ca: Annotated[
        Path | None, typer.Option(help="CAs in PEM: only clients with a certificate of theirs may connect.")
    ] = None,
    insecure: Annotated[
        bool | None,
        typer.Option("--insecure", help="Let other machines connect without TLS: tokens travel in the clear."),
    ] = None,
    memory_bytes: Annotated[str | None, typer.Option(help="Memory tier, e.g. 4GiB.")] = None,
    disk_dir: Annotated[Path | None, typer.Option(help="Folder of the disk tier; without: memory only.")] = None,
    disk_bytes: Annotated[str | None, typer.Option(help="Disk tier, e.g. 100GiB.")] = None,
    redis_url: Annotated[
        str | None, typer.Option(help="Redis or Valkey below memory and disk, e.g. redis://127.0.0.1:6379/0.")
    ] = None,
    record_trace: Annotated[
        Path | None, typer.Option(help="Record what is asked for in this file, for `kvtier simulate`.")
    ] = None,
    shutdown_grace_s: Annotated[float | None, typer.Option(help="Seconds a stop may take to write down.")] = None,
    tenant: Annotated[
        list[str] | None,
        typer.Option(help="NAME=SHA256 of its token in hex, instead of the file's tenants. Repeatable."),
    ] = None,
    log_level: LogLevel = None,
    log_format: LogFormat = None,
) -> None:
    """Serves until SIGTERM or SIGINT, then writes down what waits and exits with 0.

    Prints `ready block=ADDRESS[,ADDRESS...] grpc=ADDRESS[,ADDRESS...] http=ADDRESS` when it can be used. Flags win
    over the file.

    Example: kvtier pool serve --config /etc/kvtier/kvtier.toml --log-format json

    Example, without a file: kvtier pool serve --tenant red=$(printf %s "$KVTIER_TOKEN" | sha256sum | cut -d' ' -f1)
    """
    set_up_logs(log_level, log_format)
    flags = {
        "listen": listen,
        "grpc_listen": grpc_listen,
        "http_listen": http_listen,
        "tls_certificate": tls_certificate,
        "tls_key": tls_key,
        "tls_client_ca": tls_client_ca,
        "insecure": insecure,
        "memory_bytes": memory_bytes,
        "disk_dir": disk_dir,
        "disk_bytes": disk_bytes,
        "redis_url": redis_url,
        "record_trace": record_trace,
        "shutdown_grace_s": shutdown_grace_s,
    }
    given = {name: value for name, value in flags.items() if value is not None}
    merged = with_log_options(configured(config, given, tenant or []), log_level, log_format)
    set_up_logs(merged.log.level, merged.log.format)
    with exporting_spans(merged, "kvtier-pool"):
        run(merged, lambda: configured(config, given, tenant or []))


def run(config: Config, read_again: Callable[[], Config]) -> None:
    """Serves in this process's main thread until SIGTERM or SIGINT.

    :param read_again: the configuration as it is now: its tenants, operators and observers are taken from it again on
        SIGHUP, and when a file of it changes. The rest of it, and what is wrong with it, changes nothing.
    """
    make_process_private()  # engines of all tenants may run as this user
    keep_freed_memory()  # before the first thread, which would have an arena of its own
    slow = threading.Timer(_SLOW_START_S, _tell_of_slow_start, [config])
    slow.daemon = True
    slow.start()
    log_warnings(_log, setting_findings(config))
    leave_out_creation_times()
    gc.set_threshold(*_GC_THRESHOLDS)
    came = _noted_signals()
    raise_open_files_limit()  # a connection or a slab of memory takes one or two
    service = PoolService(config)
    reloader = Reloader(service, config, read_again)  # looks at the files before a start that may take long
    addresses = service.start()
    slow.cancel()
    ending = threading.Event()
    operators = OperatorServer(OperatorVerbs(service, reloader, ending.is_set).verbs())
    operators.start()
    gc.collect()
    gc.freeze()  # what stands now stands as long as the process: a full collection would walk it for 80 ms
    give_back_freed_memory()  # what imports, and reading the configuration, have left
    block, grpc = ",".join(addresses.block), ",".join(addresses.grpc)
    print(f"ready block={block} grpc={grpc} http={addresses.http}", flush=True)
    reloads = ReloadThread(reloader)
    reloads.start()
    _serve_until_ended(service, reloads, came)
    reloads.stop()
    service.stop()
    ending.set()
    operators.stop()  # last: the disk of a trace may not answer, and what clients were promised is written by now


def _tell_of_slow_start(config: Config) -> None:
    """Says what a start waits for, as nothing else is heard of it meanwhile."""
    what = (
        "takes its memory" if config.pool_service.disk_dir is None else "reads its disk tier, or that does not answer"
    )
    _log.warning("the pool is not ready after %g s: it %s", _SLOW_START_S, what)


def _noted_signals() -> set[int]:
    """Returns the set to which handlers add the numbers of signals that came.

    A handler does nothing that takes a lock: whatever it interrupts may hold that lock.
    """
    came: set[int] = set()

    def on_signal(number: int, frame: FrameType | None) -> None:
        came.add(number)
        if number != signal.SIGHUP:
            # A second one ends a drain that takes too long for somebody's patience.
            signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, on_signal)
    return came


def _serve_until_ended(service: PoolService, reloads: ReloadThread, came: set[int]) -> None:
    """Looks after the service until one of the signals that `came` is to end it."""
    # The kernel may give the signal to another thread, and Python runs the handler in this one, when it wakes. So that
    # it does, whichever thread has the signal writes to the pipe.
    signals, written = os.pipe()
    os.set_blocking(written, False)
    signal.set_wakeup_fd(written, warn_on_full_buffer=False)
    while not came & {signal.SIGTERM, signal.SIGINT}:
        if signal.SIGHUP in came:
            came.remove(signal.SIGHUP)
            reloads.hang_up()
        if num_ended := service.end_stale():
            _log.info("%d connections ended: their tokens have expired", num_ended)
        reloads.tell_of_hang()
        if select.select([signals], [], [], _LOOK_S)[0]:
            os.read(signals, 1)


def configured(file: Path | None, flags: dict[str, Any], tenants: list[str]) -> Config:
    """The configuration with the command line's values in place of those of the file and the environment.

    :param flags: fields of `pool_service`. Relative paths are relative to the working directory, those of the file to
        its folder.
    :param tenants: `NAME=SHA256` each. If there are any, they replace all tenants of the file.
    """
    base = load_config(file) if file is not None else parse_config({}, source="environment")
    given = {name: v.expanduser().absolute() if isinstance(v, Path) else v for name, v in flags.items()}
    table = base.pool_service.model_dump(exclude_unset=True) | given
    merged = parse_config(
        {"pool_service": table, "tenants": _tenant_tables(tenants)}, source="command line", environ={}
    )
    made = base.with_options("pool_service", merged.pool_service, given)
    if not tenants:
        return made
    accepted_tokens(merged)  # what is wrong with them is said of the command line, not of the file
    return made.model_copy(update={name: getattr(merged, name) for name in ("tenants", "operators", "observers")})


def _tenant_tables(tenants: list[str]) -> dict[str, dict[str, list[str]]]:
    tables: dict[str, dict[str, list[str]]] = {}
    for text in tenants:
        name, separator, digest = text.partition("=")
        if not separator:
            raise ConfigError(f"--tenant {text}: use NAME=SHA256, made with: printf %s TOKEN | sha256sum")
        tables.setdefault(name, {"token_sha256": []})["token_sha256"].append(digest)
    return tables
