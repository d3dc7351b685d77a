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

from kvtier.errors import ConfigError, UnavailableError
from kvtier_pool.operator_socket import Lines, address_of, peer_of, running_pools, send

_SIZE = TypeAdapter(ByteSize)
_ANSWER_S = 30.0
"""A pool says something twice a second."""

app = typer.Typer(help="Traces of a cache pool that runs.", no_args_is_help=True, pretty_exceptions_enable=False)


@app.callback()
def _trace() -> None:
    """Makes `record` a command of its own although it is the only one."""


@app.command()
def record(
    file: Annotated[Path, typer.Argument(help="File on the pool's host, written by the pool.")],
    pid: Annotated[int | None, typer.Option(help="Process of the pool; needed where several run.")] = None,
    max_bytes: Annotated[str, typer.Option(help="Size of the file, 8 bytes for each reference.")] = "256MiB",
    seconds: Annotated[float, typer.Option(min=0.1, help="How long, at the most.")] = 3600.0,
) -> None:
    """Records what a running pool on this host is asked for, until Ctrl-C, for `kvtier simulate`.

    For root and the user that the pool runs as, where the pool runs: in its container if it is in one. The recording
    ends with this command, whatever ends that.
    """
    request = {"file": str(file.absolute()), "max_bytes": _bytes(max_bytes), "seconds": seconds}
    with _connected(pid) as connection:
        with contextlib.suppress(BrokenPipeError):  # a pool that refuses at once has said why
            send(connection, request)
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


def _connected(pid: int | None) -> socket.socket:
    """A connection to the pool, and to nobody who only has its name."""
    if pid is None:
        pools = running_pools()
        if len(pools) != 1:
            found = f"pools {', '.join(map(str, pools))} run here: name one by --pid" if pools else "no pool runs here"
            raise ConfigError(f"{found}; in a container, run this command there")
        (pid,) = pools
    with contextlib.ExitStack() as unless_returned:
        connection = unless_returned.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        try:
            connection.settimeout(_ANSWER_S)
            connection.connect(address_of(pid))
            whose = peer_of(connection).pid
        except OSError as error:
            raise UnavailableError(f"no pool answers as process {pid}: {error}") from error
        if whose != pid:
            raise UnavailableError(f"another process than {pid} has the name of that pool: nothing is asked of it")
        unless_returned.pop_all()
        return connection


def _follow(connection: socket.socket, console: Console) -> None:
    """Shows what the pool says until the recording has ended."""
    lines = Lines(connection)
    with console.status("asking the pool") as status:
        while True:
            message = _received(lines)
            if "recording" in message:
                print(f"recording to {message['recording']}, until Ctrl-C", flush=True)
            elif "ended" in message:
                break
            else:
                status.update(_said(message))
    print(f"{_said(message)}; {message['ended']}", flush=True)


def _received(lines: Lines) -> dict[str, Any]:
    try:
        message = lines.receive()
    except OSError as error:
        raise UnavailableError(f"the pool says nothing any more: {error}") from error
    if message is None:
        raise UnavailableError("the pool has ended; what it has recorded by then is in the file")
    if "error" in message:
        raise ConfigError(str(message["error"]))
    return message


def _said(message: dict[str, Any]) -> str:
    lost = f", {message['dropped']:,} not recorded" if message["dropped"] else ""
    return f"{message['seconds']:,.0f} s: {message['keys']:,} keys, {message['bytes']:,} bytes{lost}"
