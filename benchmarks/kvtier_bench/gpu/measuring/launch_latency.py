"""How long a small launch and its end take, as any process of the machine sees it.

    python -m kvtier_bench.gpu.measuring.launch_latency [--tiny]

runs until its standard input is closed, and then prints a JSON list: when each launch began, by the monotonic clock,
and the seconds that it took.
"""

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import torch

from kvtier.clock import MONOTONIC
from kvtier.errors import KvtierError
from kvtier_bench.gpu.measuring.setting import Setting

Launches = list[tuple[float, float]]
"""The time when each launch began, and its seconds."""
_PAUSE_S = 1e-4
"""The pause between launches: without it, a process would hold the interpreter, and remember too many."""
_PATIENCE_S = 60.0


def launch_until(stop: Callable[[], bool], setting: Setting, into: Launches) -> None:
    """Launches one after the other, and waits for the end of each."""
    numbers = torch.zeros(256, device=setting.device)
    while not stop():
        begin = MONOTONIC()
        numbers.add_(1)
        setting.synchronize()
        into.append((begin, MONOTONIC() - begin))
        time.sleep(_PAUSE_S)


def during(launches: Launches, begin_s: float, end_s: float) -> list[float]:
    """The seconds of each launch that was under way between these times."""
    return [seconds for at, seconds in launches if at < end_s and at + seconds > begin_s]


@contextlib.contextmanager
def launching_here(setting: Setting) -> Iterator[Launches]:
    """A thread of this process launches while inside."""
    stop, launches = threading.Event(), Launches()
    thread = threading.Thread(target=launch_until, args=(stop.is_set, setting, launches), name="kvtier-bench-launch")
    thread.start()
    try:
        yield launches
    finally:
        stop.set()
        thread.join()


@contextlib.contextmanager
def launching_elsewhere(*, tiny: bool) -> Iterator[Launches]:
    """Another process launches while inside; its launches are there afterwards.

    :raises KvtierError: it did not end well.
    """
    command = [sys.executable, "-m", "kvtier_bench.gpu.measuring.launch_latency", *(["--tiny"] if tiny else [])]
    launches = Launches()
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            if process.stdout.readline() != "ready\n":
                raise KvtierError("the process that launches did not start")
            yield launches
        finally:
            output, _ = process.communicate(timeout=_PATIENCE_S)
    launches += [(at, seconds) for at, seconds in json.loads(output)]


def _wait_for_end(ended: threading.Event) -> None:
    sys.stdin.read()
    ended.set()


def main() -> None:
    """Does what the module's first lines say."""
    setting, launches, ended = Setting.here(_PATIENCE_S, tiny="--tiny" in sys.argv), Launches(), threading.Event()
    launch_until(lambda: bool(launches), setting, launches)  # the first sets up the device
    launches.clear()
    threading.Thread(target=_wait_for_end, args=(ended,), daemon=True).start()
    print("ready", flush=True)
    launch_until(ended.is_set, setting, launches)
    json.dump(launches, sys.stdout)


if __name__ == "__main__":
    main()
