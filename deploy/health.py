"""Exit code 0 when the pool of this container is well; otherwise says what it answered."""

import ssl
import sys
from http.client import HTTPConnection, HTTPException, HTTPSConnection

_TIMEOUT_S = 3.0
_NO_TLS_HERE = 400
"""What a pool with certificates answers to plain HTTP."""


def main() -> int:
    """Plain http.client: a proxy set in the environment must not be asked about this machine."""
    port = int(sys.argv[1]) if len(sys.argv) > 1 else 7602
    # Over loopback, where no certificate can be for the name: whoever answers there is this container.
    unverified = ssl._create_unverified_context()
    try:
        status, text = ask(HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT_S))
        if status == _NO_TLS_HERE:
            status, text = ask(HTTPSConnection("127.0.0.1", port, timeout=_TIMEOUT_S, context=unverified))
    except (OSError, HTTPException) as error:
        print(f"no answer: {error!r}")
        return 1
    print(text)
    return 0 if status == 200 else 1


def ask(connection: HTTPConnection) -> tuple[int, str]:
    connection.request("GET", "/healthz")
    answer = connection.getresponse()
    return answer.status, answer.read().decode(errors="replace").strip()


if __name__ == "__main__":
    sys.exit(main())
