"""Whether a server with an HTTP port runs with a file, and answers."""

from http import HTTPStatus
from http.client import HTTPException
from pathlib import Path

from kvtier.cli.doctor.clocks import healthz
from kvtier.cli.doctor.lines import Level, Line
from kvtier.cli.stats.samples import reachable

_HTTP_S = 5.0


def serving_line(
    key: str, who: str, listen: str, file: Path | None, *, path: str = "/healthz", tls: bool = False
) -> Line:
    """Asks for its health. Blocks for some seconds.

    :param key: the key of its address, with dots.
    :param who: a service that `kvtier WHO serve` starts.
    """
    if listen.endswith(":0"):
        return Line(Level.NOTE, key, f"takes any port: whether the {who} runs with this file cannot be asked")
    url = f"{'https' if tls else 'http'}://{reachable(listen)}"
    try:
        status, text, _ = healthz(url, _HTTP_S, path)
    except (OSError, ValueError, HTTPException) as error:
        if isinstance(getattr(error, "reason", error), TimeoutError):
            return _hangs(key, who, url)
        name = "" if file is None else f" --config {file}"
        return Line(Level.NOTE, key, f"no {who} answers at {url}", remedy=f"to start it: kvtier {who} serve{name}")
    found = f"{url} answers {status} {' '.join(text.split())[:300]}"
    if status == HTTPStatus.OK:
        return Line(Level.OK, key, found)
    return Line(Level.PROBLEM, key, found, remedy=f"see the {who}'s log; if it is another program, set {key}")


def _hangs(key: str, who: str, url: str) -> Line:
    return Line(
        Level.PROBLEM,
        key,
        f"somebody listens at {url}, and does not answer within {_HTTP_S:g} s",
        "no request is served",
        f"if it stays so, the {who} hangs or is stopped: see its log, restart it; if it is another program, set {key}",
    )
