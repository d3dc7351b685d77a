"""One engine: whether it may get requests, which ones it has, and what it says of its load."""

import asyncio
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvtier.config.gateway import GatewayEngineConfig
from kvtier.identity.keys import NamespaceId
from kvtier.system.quiet_log import QuietLog
from kvtier_gateway.engines.prices import LearnedPrices

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Loads:
    """What an engine says of itself in its `/metrics`; zeros before the first answer."""

    num_running: float = 0.0
    num_waiting: float = 0.0
    kv_used: float = 0.0
    """The used part of its device's KV, from 0 to 1."""


class KeyForm(NamedTuple):
    """What keys of an engine's blocks are made of, beside tokens and a tenant's secret."""

    tokens_per_block: int
    namespaces: frozenset[NamespaceId]
    """The namespaces that a hit needs: one for each of its ranks whose KV differs."""


class Attempt:
    """A request that an engine has. Event loop only.

    Whoever serves the request runs in `task`; when the engine is given up, that task is cancelled and `is_lost`.
    """

    __slots__ = ("has_begun", "is_lost", "task")

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.task = task
        self.is_lost = False
        self.has_begun = False
        """Whether the first byte of its answer has come."""


@dataclass(eq=False, slots=True)
class Engine:
    """An engine at one address. Event loop only."""

    url: str
    """What requests go to: `http://host:port`."""
    config: GatewayEngineConfig
    server_name: str | None = None
    """What its certificate must be for, where that is not the host in its URL."""
    is_up: bool = False
    """Whether it has answered the last looks at it."""
    was_down: bool = False
    """Whether it has been down since somebody was last told that what it holds may be gone."""
    is_removed: bool = False
    """Whether the configuration, or DNS, does not name it any more."""
    num_failures: int = 0
    """Looks in a row that have failed."""
    problem: str | None = None
    """Why the last look failed; None where it did not."""
    models: Mapping[str, dict[str, Any]] | None = None
    """The models that it serves, by their names, as OpenAI's API lists them; None before it has said so."""
    adapters: frozenset[str] = frozenset()
    """Names among `models` of LoRA adapters, as vLLM says: blocks have other keys with them."""
    loads: Loads = Loads()
    takes_tenants: bool | None = None
    """Whether its last page has shown that it keeps tenants apart whom a request names in `kv_transfer_params`; None
    before it was up."""
    is_vllm: bool | None = None
    """Whether its last page was vLLM's; None before it was up."""
    was_fenced: bool = False
    """Whether the log has it that no request goes there, as `is_fenced` says."""
    key_form: KeyForm | None = None
    """How it makes keys; None before it has said so, and of engines without kvtier."""
    log: QuietLog = field(default_factory=lambda: QuietLog(_log))
    """Takes lines that may come with every look."""
    request_log: QuietLog = field(default_factory=lambda: QuietLog(_log))
    """Takes lines that may come with every request."""
    prices: LearnedPrices = field(default_factory=LearnedPrices)
    attempts: set[Attempt] = field(default_factory=set)
    """The requests that it has from this gateway, as `holding` says."""
    num_begun: int = 0
    """How many of `attempts` have begun."""

    @property
    def num_waiting(self) -> int:
        """The number of requests that it has and of whose answers no byte has come."""
        return len(self.attempts) - self.num_begun

    @contextmanager
    def holding(self) -> Iterator[Attempt]:
        """A request that it has until the context ends."""
        attempt = Attempt()
        self.attempts.add(attempt)
        try:
            yield attempt
        finally:
            self.attempts.discard(attempt)
            self.num_begun -= attempt.has_begun

    def note_begun(self, attempt: Attempt) -> None:
        """The first byte of the answer has come."""
        if not attempt.has_begun:
            attempt.has_begun = True
            self.num_begun += 1

    @property
    def is_fenced(self) -> bool:
        """Whether tenants would share its cache: it is told their names in a way that it has not shown to follow."""
        if self.takes_tenants is not False or self.config.isolation != "tenant":
            return False
        return self.config.tenants is None or len(self.config.tenants) > 1

    @property
    def is_usable(self) -> bool:
        """Whether it is up and keeps tenants apart."""
        return self.is_up and not self.is_fenced

    def may_serve(self, tenant: str, model: str | None) -> bool:
        """Whether it gets new requests of this tenant for this model; None: for any."""
        if not self.is_up or self.is_removed or self.config.draining or self.is_fenced:
            return False
        if self.config.tenants is not None and tenant not in self.config.tenants:
            return False
        return model is None or self.models is None or model in self.models

    def mark_up(self) -> None:
        """It has answered."""
        self.is_up, self.num_failures, self.problem = True, 0, None

    def mark_failed(self, most_failures: int) -> bool:
        """A look at it has failed; whether it counts as down because of it. Its requests are given up then: those that
        have had no byte of an answer go to another engine."""
        self.num_failures += 1
        if self.num_failures < most_failures:
            return False
        was_up, self.is_up, self.was_down = self.is_up, False, True
        self.give_up()
        return was_up

    def mark_unreachable(self) -> None:
        """Notes that it accepts no connections. It gets no requests until it answers a look. Requests that it has may
        still get their answers."""
        self.is_up, self.was_down = False, True

    def give_up(self) -> None:
        """Ends all requests that it has."""
        for attempt in self.attempts:
            if not attempt.is_lost:
                attempt.is_lost = True
                attempt.task.cancel()
