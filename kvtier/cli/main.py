"""The entry point of the command `kvtier`. It imports nothing that takes time before Ctrl-C is provided for."""

import sys

_INTERRUPTED = 128 + 2
"""What shells say of a command that SIGINT has ended."""


def main() -> None:
    """Runs the command line of this process, and ends the process: see `kvtier.cli.app.run`. Exit code 130, and no
    traceback, on Ctrl-C."""
    try:
        from kvtier.cli.app import run

        run()
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)


if __name__ == "__main__":
    main()
