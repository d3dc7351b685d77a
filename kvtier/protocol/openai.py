"""What OpenAI's API has that every HTTP server of ours needs: its error object, and ids of requests."""

import re
import uuid
from typing import Any

REQUEST_ID = "X-Request-Id"
"""The header of a request and of its answer that holds its id."""
_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
"""What clients may call a request: nothing that a log or a shell reads in another way."""


def error_body(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """OpenAI's error object.

    :param kind: its `type`, such as `invalid_request_error`.
    """
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_kind(status: int) -> str:
    """The `type` of an error with this HTTP status."""
    return "invalid_request_error" if status < 500 else "server_error"


def request_id(said: str | None) -> str:
    """The id of a request: the one in its header, or a new one where that is none."""
    return said if said is not None and _ID.fullmatch(said) else uuid.uuid4().hex
