"""The span of one request to the pool, whatever it came over."""

from collections.abc import Iterator
from contextlib import contextmanager

from kvtier.system.tracing import Attribute, Span, tracing
from kvtier_pool.auth import Login


@contextmanager
def pool_span(verb: str, parent: str, login: Login | None) -> Iterator[Span | None]:
    """The span of a request whose engine works within `parent`; None where it has none, or tracing is off.

    It ends with the context, in which the calling thread still works within what it did before.
    """
    if not parent or not tracing.is_on:
        yield None
        return
    named: dict[str, Attribute] = {"tenant": login.name} if login is not None and tracing.names_tenants else {}
    span = tracing.begin(f"pool {verb}", parent, **named)
    span.answers_a_client = True
    try:
        yield span
    except BaseException:
        span.has_failed = True
        raise
    finally:
        tracing.end(span)
