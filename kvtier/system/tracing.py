"""Spans of one request, as OpenTelemetry has them, in W3C's trace context: https://www.w3.org/TR/trace-context/

A **context** is the text of a `traceparent` header: which trace, which span in it, and that it is sampled. A thread
works within one context, or within none: then nothing here does anything. Contexts cross threads and processes as
text; spans go from where they end to whoever exports them (`kvtier.build.span_export`). Nothing here imports
OpenTelemetry.

Names and attributes have counts, bytes and names of tiers, never what a user has said, a key or a credential.
"""

import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")
_SAMPLED = 1
NO_CONTEXT = ""
_NOTHING = nullcontext()
Attribute = str | int | float | bool


@dataclass(slots=True)
class Span:
    """Something that took time within a trace. One thread at a time."""

    name: str
    context: str
    """The context of what happens within the span."""
    parent: str
    """The context that it is in; `NO_CONTEXT`: it is the first of its trace."""
    start_ns: int
    """Nanoseconds since 1970, as `end_ns`."""
    attributes: dict[str, Attribute]
    end_ns: int = 0
    events: list[tuple[str, int]] = field(default_factory=list)
    """Moments within it that have a name, and when they were."""
    answers_a_client: bool = False
    """Whether another process has asked for it and waits for its end."""
    has_failed: bool = False


class Tracing:
    """The place that the spans of this process go to. `start` and `stop` are for its start and end, the rest for any
    thread."""

    def __init__(self) -> None:
        self._export: Callable[[Span], None] | None = None
        """Written whole by `start` and `stop`."""
        self._sample_ratio = 0.0
        self.names_tenants = False
        """Whether spans may say whose request they are of."""
        self._here = threading.local()

    @property
    def is_on(self) -> bool:
        return self._export is not None

    def start(self, export: Callable[[Span], None], *, sample_ratio: float, names_tenants: bool) -> None:
        """Begins to make spans.

        :param export: called with each span at its end, by any thread. Must not block, and must not raise.
        :param sample_ratio: the part of requests without a context of their own that become traces.
        """
        self._sample_ratio, self.names_tenants, self._export = sample_ratio, names_tenants, export

    def stop(self) -> None:
        """Ends that: no more spans are made."""
        self._export = None

    def context(self) -> str:
        """Returns what the calling thread works within. A process that has no spans of its own passes it on, too."""
        return getattr(self._here, "context", NO_CONTEXT)

    def sampled(self, traceparent: str | None) -> str | None:
        """Returns the context of a request that has come with this header; `NO_CONTEXT`: it begins a trace of its own.
        None: it has no spans.

        Whoever has begun the trace has decided; where nobody has, one of so many requests is chosen.
        """
        if self._export is None:
            return None
        if traceparent is not None and is_context(traceparent):
            return traceparent[:55] if int(traceparent[53:55], 16) & _SAMPLED else None
        return NO_CONTEXT if random.random() < self._sample_ratio else None

    def begin(self, name: str, parent: str, /, **attributes: Attribute) -> Span:
        """Begins a span; the caller ends it. `parent` may be `NO_CONTEXT`."""
        trace = parent[3:35] if parent else f"{random.getrandbits(128) or 1:032x}"
        context = f"00-{trace}-{random.getrandbits(64) or 1:016x}-01"
        return Span(name, context, parent, time.time_ns(), attributes)

    def end(self, span: Span, end_ns: int | None = None) -> None:
        """Ends a span, now or at that time, and has it exported."""
        span.end_ns = time.time_ns() if end_ns is None else end_ns
        if self._export is not None:
            self._export(span)

    def within(self, context: str) -> AbstractContextManager[None]:
        """Has the calling thread work within this context."""
        return _NOTHING if context == self.context() else self._within(context)

    def span(self, name: str, /, **attributes: Attribute) -> AbstractContextManager[Span | None]:
        """A span of what the calling thread does meanwhile; None where it works within no context."""
        parent = self.context()
        return self._span(name, parent, attributes) if parent and self._export is not None else _NOTHING

    @contextmanager
    def _within(self, context: str) -> Iterator[None]:
        before = getattr(self._here, "context", NO_CONTEXT)
        self._here.context = context
        try:
            yield
        finally:
            self._here.context = before

    @contextmanager
    def _span(self, name: str, parent: str, attributes: dict[str, Attribute]) -> Iterator[Span]:
        span = self.begin(name, parent, **attributes)
        try:
            with self.within(span.context):
                yield span
        except BaseException:
            span.has_failed = True
            raise
        finally:
            self.end(span)


tracing = Tracing()
"""The tracing of this process, which has one place that its spans go to, as it has one log."""


def is_context(text: str) -> bool:
    """Whether it is a `traceparent` that can be read, of this version of the standard or a later one."""
    return len(text) <= 512 and _TRACEPARENT.fullmatch(text) is not None
