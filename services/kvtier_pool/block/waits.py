"""The span of one request to a pool that traces, and of what it waited for before it was read."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from kvtier.protocol.block import Fields, Verb, trace_of
from kvtier.system.tracing import NO_CONTEXT, tracing
from kvtier_pool.auth import Login
from kvtier_pool.request_span import pool_span

_NOTABLE_NS = 100_000
"""A wait for a turn that is as long has a span of its own. Shorter ones are the time between two lines of code."""


class Waits:
    """Begins when the first byte of a request is there. One thread; only while tracing is on."""

    def __init__(self) -> None:
        self._begun_ns = self._ended_ns = time.time_ns()

    def end(self) -> None:
        """It is the request's turn."""
        self._ended_ns = time.time_ns()

    @contextmanager
    def request_span(self, verb: str, request: Fields, login: Login | None) -> Iterator[None]:
        """The calling thread works for this request meanwhile, within the span of its engine, if it has named one."""
        # Slabs are mapped once, each by a request: spans of those would hide the others.
        with pool_span(verb, NO_CONTEXT if verb == Verb.MAP else trace_of(request), login) as span:
            if span is None:
                yield
                return
            span.start_ns = self._begun_ns
            span.attributes["waited_us"] = (self._ended_ns - self._begun_ns) // 1000
            if self._ended_ns - self._begun_ns >= _NOTABLE_NS:
                turn = tracing.begin("wait for turn", span.context)
                turn.start_ns = self._begun_ns
                tracing.end(turn, self._ended_ns)
            with tracing.within(span.context):
                yield
