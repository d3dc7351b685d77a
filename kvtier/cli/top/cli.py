"""The command `kvtier top`: looks again and again, on a screen, as lines, or as JSON."""

import json as json_module
import os
import sys
import time
from collections.abc import Sequence
from itertools import count as counted
from typing import Annotated

import typer
from rich.console import Console, Group, RenderableType

from kvtier.cli.stats.asking import Places
from kvtier.cli.stats.command import Ca, ConfigFile, Token, Urls
from kvtier.cli.top.picture import Picture, Watch
from kvtier.cli.top.terminal import opened
from kvtier.cli.top.view import view_of
from kvtier.clock import MONOTONIC
from kvtier.errors import UnavailableError

_FIRST_S = 1.0
"""How long the first interval is, where the others are longer: rates are wanted soon."""


def top(
    config: ConfigFile = None,
    url: Urls = None,
    ca: Ca = None,
    token: Token = None,
    interval: Annotated[float, typer.Option(min=0.1, max=3600, help="Seconds from one look to the next.")] = 2.0,
    count: Annotated[int | None, typer.Option(min=1, help="End after so many looks. Default: go on.")] = None,
    once: Annotated[
        bool, typer.Option("--once", help="Print what one interval shows, and end. Exit code 1 when nobody answers.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print a JSON object per interval, each on a line.")] = False,
) -> None:
    """What engines and pools do at this moment: GB/s and hits of each tier, queues, tenants, what fails.

    Asks the engine and the pool that the configuration names, or those given by --url, and shows what counters gained
    since it last asked. q or Ctrl-C ends it. In a pipe, each look is printed as lines. A process that does not answer
    is shown as down, and goes on when it is back. Tenants are shown with the token of an operator (--token).

    Example, of two pools and an engine: kvtier top --url pool1:7602 --url pool2:7602 --url 127.0.0.1:8000

    Example, with tenants: kvtier top --config /etc/kvtier/pool.toml --token file:/run/secrets/operator

    Example, of a log: kvtier top --json --interval 60 >> kvtier.jsonl
    """
    watch = Watch(Places(config, url or (), ca, token), interval)
    if once:
        watch.look()
        time.sleep(interval)
        pictures = watch.look()
        _write(Console(highlight=False), pictures, as_json=json)
        if all(picture.problem is not None for picture in pictures):
            raise UnavailableError("; ".join(picture.problem or "" for picture in pictures))
        return
    if json or not all(stream is not None and stream.isatty() for stream in (sys.stdout, sys.stdin)):
        _run_as_lines(watch, interval, count, as_json=json)
    else:
        _run_on_screen(watch, interval, count)


def _run_as_lines(watch: Watch, interval_s: float, count: int | None, *, as_json: bool) -> None:
    console, next_s = Console(highlight=False), MONOTONIC()
    try:
        for number in counted(1):
            _write(console, watch.look(), as_json=as_json)
            if number == count:
                return
            next_s = max(next_s + interval_s, MONOTONIC())
            time.sleep(max(0.0, next_s - MONOTONIC()))
    except KeyboardInterrupt:
        return
    except BrokenPipeError:  # the interpreter would try to flush it at its end, and say that it cannot
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _write(console: Console, pictures: Sequence[Picture], *, as_json: bool) -> None:
    at_s = time.time()
    if as_json:
        print(json_module.dumps({"time": at_s, "sources": [picture.plain() for picture in pictures]}), flush=True)
    else:
        console.print(titled(pictures, at_s, ""))
        console.file.flush()


def _run_on_screen(watch: Watch, interval_s: float, count: int | None) -> None:
    console = Console(highlight=False)
    with opened(console) as screen:
        for number in counted(1):
            began_s = MONOTONIC()
            screen.show(titled(watch.look(), time.time(), f"every {interval_s:g} s, q ends"))
            if number == count:
                return
            wanted_s = min(interval_s, _FIRST_S) if number == 1 else interval_s
            if not screen.wait(max(0.0, wanted_s - (MONOTONIC() - began_s))):
                return


def titled(pictures: Sequence[Picture], at_s: float, how: str) -> RenderableType:
    """Pictures below a line that says when they were taken, and how.

    :param at_s: when, in seconds since 1970.
    """
    title = f"kvtier top  {time.strftime('%H:%M:%S', time.localtime(at_s))}  {how}".rstrip()
    return Group(f"[reverse]{title}[/reverse]", view_of(pictures, at_s))
