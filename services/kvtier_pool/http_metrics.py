"""`/metrics` of the HTTP port: who may see which series, and how often they are made."""

import threading
from collections.abc import Callable
from typing import Literal

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from kvtier.clock import MONOTONIC, Clock
from kvtier.config.credentials import Role
from kvtier.system.metric_totals import Totals
from kvtier_pool.auth import LoginRefusedError, bearer_token
from kvtier_pool.logins import Logins

_TEXT = "text/plain; charset=utf-8"
_TENANT = "tenant"
"""The label of series that are a single tenant's."""
_PAUSE = 9.0
"""How long no page is made after one, in times that it took to make: askers get a tenth of a core together."""


class HttpMetrics:
    """Answers requests for `/metrics`: series of single tenants go to operators, and totals to observers, and to
    anybody where that is configured. Any thread."""

    def __init__(
        self,
        registry: CollectorRegistry,
        logins: Logins,
        *,
        access: Literal["open", "observer"],
        in_clear: str | None,
    ) -> None:
        """
        :param access: whether a request without a token is answered.
        :param in_clear: why no token may be sent to the HTTP port, and what to do; None: one may.
        """
        self._logins = logins
        self._access = access
        self._in_clear = in_clear
        self._of_all = Page(lambda: generate_latest(registry))
        self._totals = Page(lambda: generate_latest(Totals(registry, {_TENANT})))

    def answer(self, authorization: str | None, peer: str) -> tuple[int, str, bytes]:
        """Status, content type and text. Blocks for a moment where it refuses, and while many ask."""
        if authorization is None and self._access == "open":
            return 200, CONTENT_TYPE_LATEST, self._totals.text()
        if self._in_clear is not None:
            return 403, _TEXT, f"{self._in_clear}\n".encode()
        try:
            token = bearer_token(authorization) if authorization is not None else None
            login = self._logins.at("http", peer).log_in(token)
        except LoginRefusedError as error:
            return 401, _TEXT, f"metrics_access = {self._access}: {error}\n".encode()
        if login.role is Role.TENANT:
            return 403, _TEXT, b"a tenant's token: /tenants shows its own figures; /metrics is for observers\n"
        page = self._of_all if login.role is Role.OPERATOR else self._totals
        return 200, CONTENT_TYPE_LATEST, page.text()


class Page:
    """A text that anybody may ask for at any rate. One thread at a time makes it, then nobody for nine times as long;
    whoever asks meanwhile waits and shares the next one. No text is older than the request for it. Any thread."""

    def __init__(self, make: Callable[[], bytes], clock: Clock = MONOTONIC) -> None:
        self._make = make
        self._clock = clock
        self._changed = threading.Condition()
        self._is_made = False
        """Whether a thread makes one now. Guarded by _changed, as all that follows."""
        self._num_begun = 0
        self._last = (0, b"")
        """The number of the one that was made last, and its text."""
        self._next_s = float("-inf")
        """When the next one may be begun."""

    def text(self) -> bytes:
        """Blocks until it is there. Raises what making it raises."""
        with self._changed:
            wanted = self._num_begun + 1
            while self._last[0] < wanted:
                pause_s = self._next_s - self._clock()
                if self._is_made or pause_s > 0:
                    self._changed.wait(None if self._is_made else pause_s)
                    continue
                self._is_made = True
                self._num_begun = number = self._num_begun + 1
                break
            else:
                return self._last[1]
        began_s = self._clock()
        text = None
        try:
            text = self._make()
            return text
        finally:
            with self._changed:
                self._is_made = False
                if text is not None:
                    self._last = (number, text)
                ended_s = self._clock()
                self._next_s = ended_s + _PAUSE * (ended_s - began_s)
                self._changed.notify_all()
