"""Whether this machine's clock and another one's agree: tokens, certificates and secrets end by them."""

import email.utils
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Iterable
from http.client import HTTPException

from kvtier.cli.doctor.lines import Level, Line

_MOST_APART_S = 5.0


def clock_line(other: str, apart_s: float) -> Line:
    """:param apart_s: how far the other clock is ahead of ours."""
    if abs(apart_s) <= _MOST_APART_S:
        return Line(Level.OK, "clock", f"it agrees with that of {other}")
    way = "behind" if apart_s > 0 else "ahead of"
    return Line(
        Level.WARNING,
        "clock",
        f"it is {abs(apart_s):,.0f} s {way} that of {other}",
        "tokens, certificates and previous secrets end at other times than they should",
        "let NTP set both clocks",
    )


def healthz(url: str, timeout_s: float, path: str = "/healthz") -> tuple[int, str, float | None]:
    """Asks a service's HTTP port, and sends nothing secret: status, text, and how far its clock is ahead, in seconds.

    :raises OSError: nobody answers, or not by HTTP. `ValueError`, `HTTPException`: no address, no HTTP.
    """
    context = ssl.create_default_context()  # whoever it is: only clocks and health are asked for
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
    try:
        with opener.open(f"{url}{path}", timeout=timeout_s) as answer:
            return answer.status, answer.read(1000).decode(errors="replace"), _ahead_s(answer.headers.get("Date"))
    except urllib.error.HTTPError as error:
        return error.code, error.read(1000).decode(errors="replace"), _ahead_s(error.headers.get("Date"))


def pool_clock(host: str, port: str, timeout_s: float) -> Iterable[Line]:
    """Compares the clock with that of the pool at a host, if its HTTP port can be reached."""
    for scheme in ("http", "https"):
        try:
            _, _, ahead_s = healthz(f"{scheme}://{host}:{port}", timeout_s)
        except (OSError, ValueError, HTTPException):
            continue
        if ahead_s is not None:
            return [clock_line(f"the pool at {host}", ahead_s)]
    return [Line(Level.NOTE, "clock", f"not compared: no HTTP port of the pool answers at {host}:{port}")]


def _ahead_s(date: str | None) -> float | None:
    if date is None:
        return None
    try:
        return email.utils.parsedate_to_datetime(date).timestamp() - time.time()
    except ValueError:
        return None
