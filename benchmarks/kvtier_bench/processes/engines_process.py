"""Several engines of ours, each a process of its own, for the price of importing torch once.

`python -m kvtier_bench.processes.engines_process CONFIG...` imports, and forks an engine for each configuration, which
writes its standard output and its log beside that. It ends them when its standard input ends.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from kvtier.config import load_config
from kvtier.errors import KvtierError
from kvtier.system.logs import set_up_logs

_START_S = 240.0
_LOOK_S = 0.1


class EngineProcess(NamedTuple):
    """An engine that serves."""

    pid: int
    url: str


@contextmanager
def engine_processes(
    configs: Sequence[Path], environ: Mapping[str, str], program: Sequence[str] = ("-m", __name__)
) -> Iterator[list[EngineProcess]]:
    """Engines with these configurations, in their order; leaving the context kills them.

    :param program: arguments of Python before the configurations, of what calls `serve` with them.
    """
    process = subprocess.Popen(
        [sys.executable, *program, *map(str, configs)], stdin=subprocess.PIPE, env={**os.environ, **environ}
    )
    try:
        yield [_started(config, process) for config in configs]
    finally:
        process.communicate()


def _started(config: Path, process: "subprocess.Popen[bytes]") -> EngineProcess:
    deadline = time.monotonic() + _START_S
    output = config.with_suffix(".out")
    while not output.exists() or output.read_text().count("\n") < 2:
        if process.poll() is not None or time.monotonic() > deadline:
            raise KvtierError(f"an engine did not start; see {config.with_suffix('.log')}")
        time.sleep(_LOOK_S)
    pid, ready = output.read_text().splitlines()[:2]
    return EngineProcess(int(pid), ready.partition("url=")[2].split()[0])


def serve(configs: Sequence[Path]) -> None:
    """Forks an engine for each configuration, and kills them when the standard input has ended."""
    # All that an engine needs, before the first fork.
    import uvicorn  # noqa: F401

    import kvtier_engine.api.server
    import kvtier_engine.assemble  # noqa: F401
    from kvtier_engine.cli import run

    pids = []
    for config in configs:
        pid = os.fork()
        if not pid:
            with config.with_suffix(".out").open("w") as output, config.with_suffix(".log").open("w") as log:
                os.dup2(output.fileno(), 1)
                os.close(0)
                print(os.getpid(), flush=True)
                set_up_logs(stream=log)
                run(load_config(config))
            os._exit(0)
        pids.append(pid)
    sys.stdin.read()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    serve([Path(each) for each in sys.argv[1:]])
