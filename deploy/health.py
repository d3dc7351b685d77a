"""Exit code 0 when the pool of this container is well; otherwise says what it answered."""

import sys
from http.client import HTTPConnection, HTTPException

_TIMEOUT_S = 3.0


def main() -> int:
    """Plain http.client: a proxy set in the environment must not be asked about this machine."""
    connection = HTTPConnection("127.0.0.1", int(sys.argv[1]) if len(sys.argv) > 1 else 7602, timeout=_TIMEOUT_S)
    try:
        connection.request("GET", "/healthz")
        answer = connection.getresponse()
        print(answer.read().decode(errors="replace").strip())
    except (OSError, HTTPException) as error:
        print(f"no answer: {error!r}")
        return 1
    return 0 if answer.status == 200 else 1


if __name__ == "__main__":
    sys.exit(main())
