"""`kvtier trace`: commands for traces of pools that run."""

import contextlib
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from pydantic import ByteSize, TypeAdapter, ValidationError
from rich.console import Console

from kvtier.cli.options import command_group
from kvtier.errors import ConfigError, KvtierError
from kvtier_pool.operator_client import ask, connected, received
from kvtier_pool.operator_socket import Lines

_SIZE = TypeAdapter(ByteSize)

app = command_group(help="Traces of a cache pool that runs.")


@app.command()
def record(
    file: Annotated[Path, typer.Argument(help="File on the pool's host, written by the pool.")],
    pid: Annotated[int | None, typer.Option(help="Process of the pool; needed where several run.")] = None,
    max_bytes: Annotated[str, typer.Option(help="Size of the file, 8 bytes for each reference.")] = "256MiB",
    seconds: Annotated[float, typer.Option(min=0.1, help="How long, at the most.")] = 3600.0,
) -> None:
    """Records what a running pool on this host is asked for, until Ctrl-C, for `kvtier simulate`.

    For root and the user that the pool runs as, where the pool runs: in its container if it is in one. The recording
    ends with this command, whatever ends that. Exit code 1 when the file cannot be written, or not to its end.

    Example: kvtier trace record /var/tmp/pool.trace --seconds 600
    """
    request = {"file": str(file.absolute()), "max_bytes": _bytes(max_bytes), "seconds": seconds}
    with connected(pid) as connection:
        ask(connection, request)
        with _ending_by_ctrl_c(connection):
            _follow(connection, Console(stderr=True))


@contextlib.contextmanager
def _ending_by_ctrl_c(connection: socket.socket) -> Iterator[None]:
    """Ctrl-C ends what is sent, so that the pool writes down what it has and says so."""

    def end(signum: int, frame: FrameType | None) -> None:
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_WR)

    former = signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, former)


def _bytes(text: str) -> int:
    try:
        return int(_SIZE.validate_python(text))
    except ValidationError as error:
        raise ConfigError(f"--max-bytes {text}: name a size, e.g. 256MiB") from error


def _follow(connection: socket.socket, console: Console) -> None:
    """Shows what the pool says until the recording has ended. Raises `KvtierError` where the file was the reason."""
    lines = Lines(connection)
    with console.status("asking the pool") as status:
        while True:
            message = received(lines)
            if "recording" in message:
                print(f"recording to {message['recording']}, until Ctrl-C", flush=True)
            elif "ended" in message:
                break
            else:
                status.update(_said(message))
    if message.get("failed"):
        raise KvtierError(
            f"{_said(message)}; then the trace could not be written: {message['ended']}; "
            "make room or name a file elsewhere, and record again"
        )
    print(f"{_said(message)}; {message['ended']}", flush=True)


def _said(message: dict[str, Any]) -> str:
    lost = f", {message['dropped']:,} not recorded" if message["dropped"] else ""
    return f"{message['seconds']:,.0f} s: {message['keys']:,} keys, {message['bytes']:,} bytes{lost}"
