"""Asking an engine."""

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from kvtier.errors import KvtierError

REQUEST_TIMEOUT_S = 300.0


def post(url: str, body: Mapping[str, Any]) -> Any:
    """POSTs JSON and returns the JSON answer. Raises `KvtierError` with the server's message."""
    request = urllib.request.Request(
        url, data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}, method="POST"
    )
    try:
        with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        raise KvtierError(f"{url} answered {error.code}: {error.read().decode(errors='replace')[:2000]}") from error
    except OSError as error:
        raise KvtierError(f"{url} cannot be reached: {error}") from error
