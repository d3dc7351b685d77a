"""Whether a pool serves at the addresses of a file, and whether that is the pool of this file."""

from collections.abc import Iterable
from http import HTTPStatus
from http.client import HTTPException
from pathlib import Path

from kvtier.cli.doctor.clocks import healthz
from kvtier.cli.doctor.folder_owner import was_started_with
from kvtier.cli.doctor.lines import Level, Line
from kvtier.cli.stats.samples import reachable
from kvtier.clock import MONOTONIC
from kvtier.config import Config
from kvtier.config.tls_files import pool_service_tls
from kvtier.net.address import Address, open_connection
from kvtier_pool.operator_socket import running_pools

_HTTP_S, _CONNECT_S = 3.0, 1.0
_KEY = "pool_service.listen"


def serving_lines(config: Config, file: Path | None) -> Iterable[Line]:
    """Asks every address of the file. Blocks for some seconds.

    :param file: is where the configuration was read; None: nobody knows.
    """
    table = config.pool_service
    named = [text for text in (*table.listen, *table.grpc_listen) if not text.endswith(":0")]
    states = {text: _is_taken(text) for text in named}
    taken, runs = [text for text in named if states[text]], runs_with(file)
    url = _http_url(config)
    answer = None if url is None else _asked(url)
    if not taken and not runs and answer is None:
        name = "" if file is None else f" --config {file}"
        found = f"no pool runs here with this file: nobody listens at {', '.join(table.listen)}"
        yield Line(Level.NOTE, _KEY, found, remedy=f"to start it: kvtier pool serve{name}")
        return
    listens = f"somebody listens at {', '.join(taken)}" if taken else "a pool runs with this file"
    if url is None:
        yield Line(Level.NOTE, _KEY, f"{listens}; how it is cannot be asked, as http_listen takes any port")
    elif answer is None:
        remedy = "see the pool's log, and restart it if it hangs; if it is another program, choose another port"
        yield Line(Level.PROBLEM, _KEY, f"{listens}, and no pool answers at {url}", "no engine is served", remedy)
    else:
        yield _answered(url, *answer, is_other=runs is False)
    if runs or answer is not None:
        yield from (_nobody(text) for text in named if states[text] is False)


def runs_with(file: Path | None) -> bool | None:
    """Whether a pool of this machine was started with this file. None: none of its pools can be seen from here."""
    pools = running_pools()
    if file is None or not pools:
        return None
    return any(was_started_with(file, pid) for pid in pools)


def _http_url(config: Config) -> str | None:
    """The URL of the HTTP port; None where the file leaves the port to the system."""
    listen = config.pool_service.http_listen
    scheme = "http" if pool_service_tls(config) is None else "https"
    return None if listen.endswith(":0") else f"{scheme}://{reachable(listen)}"


def _asked(url: str) -> tuple[int, str] | None:
    try:
        status, text, _ = healthz(url, _HTTP_S)
    except (OSError, ValueError, HTTPException):
        return None
    return status, "; ".join(text.splitlines()).replace("ok; ", "ok ", 1)[:300]


def _answered(url: str, status: int, said: str, *, is_other: bool) -> Line:
    """:param is_other: whether the pools of this machine were started with other files."""
    if status != HTTPStatus.OK or not said.startswith("ok"):
        return Line(Level.PROBLEM, _KEY, f"{url} answers {status}: {said}", "probes fail", "see the pool's log")
    degraded = said.removeprefix("ok").strip()
    found = f"a pool answers at {url}: {degraded or said}"
    if degraded:
        return Line(Level.PROBLEM, _KEY, found, "it serves without that", "see the pool's log and docs/errors.md")
    if not is_other:
        return Line(Level.OK, _KEY, found)
    return Line(
        Level.PROBLEM,
        _KEY,
        f"{found}; but no pool of this machine was started with this file",
        "a pool does not start with it while another one has its addresses",
        "stop that one, or give each pool addresses of its own (if it has this file under another path, all is well)",
    )


def _nobody(text: str) -> Line:
    what = "the socket's file was removed" if text.startswith("unix:") else "nobody listens there"
    return Line(
        Level.PROBLEM,
        _KEY,
        f"{text}: {what}, although a pool runs",
        "engines that have only this address find no block",
        "restart the pool, which listens anew; if that is another pool, see to its addresses",
    )


def _is_taken(text: str) -> bool | None:
    """Whether somebody listens at an address; None: this user may not ask."""
    address = Address.parse(text if text.startswith("unix:") else reachable(text))
    try:
        open_connection(address, MONOTONIC() + _CONNECT_S).close()
    except (TimeoutError, BlockingIOError):
        return True  # somebody has it, and does not answer
    except PermissionError:
        return None
    except OSError:
        return False
    return True
