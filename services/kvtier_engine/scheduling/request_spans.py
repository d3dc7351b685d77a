"""The spans of one request: all of it, and one after the other what it waits for or does."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Self

from kvtier.system.tracing import Attribute, Span, tracing


class RequestSpans:
    """Begins with the request's arrival. One thread at a time: the server's, then, once submitted, the scheduler's."""

    def __init__(self, whole: Span) -> None:
        self._whole = whole
        self._stage = tracing.begin("queue", whole.context)

    @classmethod
    def begin(cls, traceparent: str | None, tenant: str | None) -> Self | None:
        """:param traceparent: the header of the request; None: it had none."""
        parent = tracing.sampled(traceparent)
        if parent is None:
            return None
        named: dict[str, Attribute] = {"tenant": tenant} if tenant is not None and tracing.names_tenants else {}
        whole = tracing.begin("request", parent, **named)
        whole.answers_a_client = True
        return cls(whole)

    @property
    def context(self) -> str:
        """The trace context of what is done for the request whenever there is time, such as saving its blocks."""
        return self._whole.context

    def enter(self, stage: str, /, **attributes: Attribute) -> None:
        """The present stage is over, and this one begins; if it is the same, it goes on."""
        if stage != self._stage.name:
            tracing.end(self._stage)
            self._stage = tracing.begin(stage, self._whole.context)
        self._stage.attributes |= attributes

    def note(self, **attributes: Attribute) -> None:
        """Says more of the present stage."""
        self._stage.attributes |= attributes

    @contextmanager
    def within_stage(self) -> Iterator[None]:
        """What the calling thread starts meanwhile belongs to the present stage."""
        with tracing.within(self._stage.context):
            yield

    def first_token(self) -> None:
        """The request has its first token."""
        self.enter("decode")
        self._whole.events.append(("first_token", self._stage.start_ns))

    def end(self, attributes: Mapping[str, Attribute], *, failed: bool) -> None:
        """The request is over."""
        tracing.end(self._stage)
        self._whole.attributes |= attributes
        self._whole.has_failed = failed
        tracing.end(self._whole)
