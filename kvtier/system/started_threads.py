"""Executors whose threads all run before there is work for them."""

import threading
from concurrent.futures import ThreadPoolExecutor

from kvtier.errors import UnavailableError


def started_threads(num_threads: int, name: str) -> ThreadPoolExecutor:
    """An executor with so many threads, all of which run already: `submit` starts none, and so never fails for want of
    one.

    An executor otherwise starts its threads as work comes, after it has queued that work. Where the process may have
    no more threads, `submit` raises, and the work is done all the same, later, beside whatever its caller has done
    since.

    :param name: of the threads.
    :raises UnavailableError: the process may have no more threads.
    """
    executor = ThreadPoolExecutor(num_threads, name)
    all_run = threading.Barrier(num_threads)
    try:
        begun = [executor.submit(all_run.wait) for _ in range(num_threads)]
    except RuntimeError as error:
        all_run.abort()
        executor.shutdown(cancel_futures=True)
        remedy = "raise the limit of the process, such as `ulimit -u` or its container's pids"
        raise UnavailableError(f"no thread for {name} ({error}): {remedy}") from error
    for each in begun:
        each.result()
    return executor
