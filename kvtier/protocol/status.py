"""The one table between the exceptions of kvtier and the status codes of gRPC."""

import grpc

from kvtier.errors import (
    ClosedError,
    ConfigError,
    CorruptBlockError,
    InvalidInputError,
    InvariantError,
    KvtierError,
    LimitExceededError,
    UnauthenticatedError,
    UnavailableError,
)

_TABLE: tuple[tuple[type[KvtierError], grpc.StatusCode], ...] = (
    (InvalidInputError, grpc.StatusCode.INVALID_ARGUMENT),
    (UnauthenticatedError, grpc.StatusCode.UNAUTHENTICATED),
    (LimitExceededError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (CorruptBlockError, grpc.StatusCode.DATA_LOSS),
    (ConfigError, grpc.StatusCode.FAILED_PRECONDITION),
    (InvariantError, grpc.StatusCode.INTERNAL),
    # The first class of a code is what a client raises for it.
    (UnavailableError, grpc.StatusCode.UNAVAILABLE),
    (ClosedError, grpc.StatusCode.UNAVAILABLE),
)

CODES = (grpc.StatusCode.OK, *dict.fromkeys(code for _, code in _TABLE), grpc.StatusCode.UNKNOWN)
"""The status codes of calls that a server has answered."""


def code_for(error: KvtierError) -> grpc.StatusCode:
    """The status a server answers when `error` ended a call."""
    for kind, code in _TABLE:
        if isinstance(error, kind):
            return code
    return grpc.StatusCode.UNKNOWN


def error_for(code: grpc.StatusCode, details: str) -> KvtierError:
    """The exception a client raises for a call that ended with `code`.

    Codes that are not in the table (a deadline, a cancelled call, a server that is none of ours) say
    that no answer came: `UnavailableError`.
    """
    for kind, known in _TABLE:
        if code is known:
            return kind(f"{code.name}: {details}")
    return UnavailableError(f"{code.name}: {details}")
