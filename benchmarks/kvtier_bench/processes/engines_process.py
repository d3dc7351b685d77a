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

from kvtier.config import load_config
from kvtier.errors import KvtierError
from kvtier.system.logs import set_up_logs

_START_S = 240.0
_LOOK_S = 0.1


@contextmanager
def engine_processes(configs: Sequence[Path], environ: Mapping[str, str]) -> Iterator[list[str]]:
    """The URLs of engines with these configurations, in their order; leaving the context kills them."""
    process = subprocess.Popen(
        [sys.executable, "-m", __name__, *map(str, configs)], stdin=subprocess.PIPE, env={**os.environ, **environ}
    )
    try:
        yield [_url(config, process) for config in configs]
    finally:
        process.communicate()


def _url(config: Path, process: "subprocess.Popen[bytes]") -> str:
    deadline = time.monotonic() + _START_S
    output = config.with_suffix(".out")
    while not output.exists() or "\n" not in output.read_text():
        if process.poll() is not None or time.monotonic() > deadline:
            raise KvtierError(f"an engine did not start; see {config.with_suffix('.log')}")
        time.sleep(_LOOK_S)
    return output.read_text().partition("url=")[2].split()[0]


def _main(configs: Sequence[Path]) -> None:
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
                set_up_logs(stream=log)
                run(load_config(config))
            os._exit(0)
        pids.append(pid)
    sys.stdin.read()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    _main([Path(each) for each in sys.argv[1:]])
