"""`kvtier gateway`: commands of the gateway."""

import asyncio
import contextlib
import gc
import logging
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from kvtier.cli.options import LogFormat, LogLevel, command_group, with_log_options
from kvtier.config import Config, load_config
from kvtier.config.findings import log_warnings
from kvtier.config.reloading import Reloader
from kvtier.system.logs import set_up_logs
from kvtier.system.open_files import raise_open_files_limit
from kvtier.system.process_metrics import leave_out_creation_times
from kvtier_gateway.checks import setting_findings

_LOOK_S = 1.0
"""Seconds between two looks whether the configuration's files have changed."""
_GC_THRESHOLDS = (700, 10, 1_000)
"""A full collection is needed rarely: what the gateway remembers has no cycles."""
_log = logging.getLogger(__name__)

app = command_group(help="A gateway in front of engines: API keys, tenants, routing.")


@app.command()
def serve(
    config: Annotated[Path, typer.Option(help="TOML file: [gateway], [api_keys.NAME], [tenants.NAME].")],
    listen: Annotated[str | None, typer.Option(help="host:port for clients; port 0 takes a free one.")] = None,
    status_listen: Annotated[str | None, typer.Option(help="host:port of /metrics, /healthz and /engines.")] = None,
    log_level: LogLevel = None,
    log_format: LogFormat = None,
) -> None:
    """Serves until SIGTERM or SIGINT, then lets requests finish within gateway.shutdown_grace_s and exits with 0.

    A second signal of the same kind ends it at once. SIGHUP, or a change of the file, gives it the file's keys and
    engines.

    Prints `ready url=http://HOST:PORT status=http://HOST:PORT` when it can be used. Options win over the file.

    Example: kvtier gateway serve --config /etc/kvtier/gateway.toml --log-format json
    """
    set_up_logs(log_level, log_format)
    given = {name: value for name, value in (("listen", listen), ("status_listen", status_listen)) if value is not None}

    def configured() -> Config:
        loaded = load_config(config)
        table = type(loaded.gateway).model_validate(loaded.gateway.model_dump(exclude_unset=True) | given)
        return loaded.with_options("gateway", table, given)

    merged = with_log_options(configured(), log_level, log_format)
    set_up_logs(merged.log.level, merged.log.format)
    log_warnings(_log, setting_findings(merged))
    raise_open_files_limit()
    leave_out_creation_times()
    run(merged, configured)


def run(config: Config, read_again: Callable[[], Config]) -> None:
    """Serves in this process's main thread until SIGTERM or SIGINT.

    :param read_again: the configuration as it is now: its keys and engines are taken from it again on SIGHUP, and when
        a file of it changes.
    """
    # Imported here, so that the command line does not load servers for other commands.
    import uvloop

    uvloop.run(_serve(config, read_again))


async def _serve(config: Config, read_again: Callable[[], Config]) -> None:
    from kvtier_gateway.service import GatewayService

    loop = asyncio.get_running_loop()
    ending, asked = asyncio.Event(), asyncio.Event()

    def end(number: int) -> None:
        ending.set()
        asked.set()
        # A second one ends a stop that takes too long for somebody's patience.
        loop.remove_signal_handler(number)
        signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end, number)
    is_hangup = False

    def hang_up() -> None:
        nonlocal is_hangup
        is_hangup = True
        asked.set()

    loop.add_signal_handler(signal.SIGHUP, hang_up)
    service = GatewayService(config)
    reloader = Reloader(service, config, read_again)
    try:
        addresses = await service.start()
        # What stands now stands as long as the process. A full collection, for which all requests wait, would walk it
        # in 26 ms, and what is remembered of prompts in as many.
        gc.collect()
        gc.freeze()
        gc.set_threshold(*_GC_THRESHOLDS)
        print(f"ready url={addresses.url} status={addresses.status}", flush=True)
        while not ending.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await asked.wait()
            asked.clear()
            if is_hangup:
                is_hangup = False
                reloader.reload("SIGHUP")
            reloader.look()
    finally:
        await service.stop()
