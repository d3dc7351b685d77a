"""Several of vLLM's OpenAI servers for the price of importing vLLM once: `server_child.py FLAGS...`, started by
`engine_lab` alone, each of FLAGS a list of a server's as JSON.

All servers, and their engines, are forked from a process that has imported what they need. It hands SIGTERM on to the
servers, and ends when they have.
"""

import gc
import json
import multiprocessing
import os
import signal
import sys
from typing import Any
from unittest import mock

gc.disable()
import vllm.v1.engine.core  # noqa: E402
import vllm.v1.engine.utils  # noqa: E402
import vllm.v1.executor.multiproc_executor  # noqa: E402
import vllm.v1.worker.cpu_worker  # noqa: E402
from model_classes import found_out_here  # noqa: E402
from vllm.entrypoints.launchers.api_server.entry import main  # noqa: E402

import kvtier_vllm.connector  # noqa: F401, E402

gc.freeze()
gc.enable()


def _forked() -> Any:
    """In place of vLLM's own on the CPU, which starts processes that import it all again."""
    return multiprocessing.get_context("fork")


for module in (vllm.v1.engine.utils, vllm.v1.executor.multiproc_executor):
    mock.patch.object(module, "get_mp_context", _forked).start()
# An engine's signals are not its server's, whose loop would hear of them.
os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))


def _serve(flags: list[str]) -> int:
    """The id of a new process that serves."""
    pid = os.fork()
    if not pid:
        sys.argv[1:] = flags
        with found_out_here():
            main()
        os._exit(0)
    return pid


if __name__ == "__main__":
    pids = [_serve(json.loads(flags)) for flags in sys.argv[1:]]
    signal.signal(signal.SIGTERM, lambda *_: [os.kill(pid, signal.SIGTERM) for pid in pids])
    for pid in pids:
        os.waitpid(pid, 0)
