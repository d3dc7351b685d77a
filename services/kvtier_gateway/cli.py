"""`kvtier gateway`: commands of the gateway."""

import asyncio
import gc
import logging
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvtier.cli.options import LogFormat, LogLevel, command_group, with_log_options
from kvtier.config import Config, load_config
from kvtier.config.findings import log_warnings
from kvtier.config.reloading import Reloader, ReloadThread
from kvtier.system.logs import set_up_logs
from kvtier.system.open_files import raise_open_files_limit
from kvtier.system.process_metrics import leave_out_creation_times
from kvtier_gateway.checks import setting_findings
from kvtier_gateway.protection import require_usable

if TYPE_CHECKING:
    from kvtier_gateway.service import GatewayService

_LOOK_S = 1.0
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


class _OnLoop:
    """The service, for a reloader on another thread: it takes configurations on its event loop."""

    def __init__(self, service: "GatewayService", loop: asyncio.AbstractEventLoop) -> None:
        self.name, self.what = service.name, service.what
        self.files, self.note = service.files, service.note
        self._service, self._loop = service, loop

    def take(self, config: Config) -> None:
        """Takes a configuration as `GatewayService.take` does, but reads the files that it names off the loop."""
        require_usable(config)

        async def take() -> None:
            self._service.take(config)

        asyncio.run_coroutine_threadsafe(take(), self._loop).result()


async def _serve(config: Config, read_again: Callable[[], Config]) -> None:
    from kvtier_gateway.service import GatewayService

    loop = asyncio.get_running_loop()
    ending = asyncio.Event()

    def end(number: int) -> None:
        ending.set()
        # A second one ends a stop that takes too long for somebody's patience.
        loop.remove_signal_handler(number)
        signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end, number)
    service = GatewayService(config)
    reloads = ReloadThread(Reloader(_OnLoop(service, loop), config, read_again))
    loop.add_signal_handler(signal.SIGHUP, reloads.hang_up)
    try:
        addresses = await service.start()
        # What stands now stands as long as the process. A full collection, for which all requests wait, would walk it
        # in 26 ms, and what is remembered of prompts in as many.
        gc.collect()
        gc.freeze()
        gc.set_threshold(*_GC_THRESHOLDS)
        print(f"ready url={addresses.url} status={addresses.status}", flush=True)
        reloads.start()
        while not ending.is_set():
            reloads.tell_of_hang()
            with suppress(TimeoutError):
                await asyncio.wait_for(ending.wait(), _LOOK_S)
    finally:
        reloads.stop()
        await service.stop()
        loop.remove_signal_handler(signal.SIGHUP)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # one more would end the process as a failure
