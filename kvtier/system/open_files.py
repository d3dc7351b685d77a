"""How many files and connections a process may have open, for processes that are kvtier's own."""

import resource

_MOST_OPEN_FILES = 65_536
"""The most open files that are asked for: some systems allow a billion, which is slow to walk."""


def raise_open_files_limit() -> int:
    """Raises the process's soft limit as far as the hard one allows; returns what it then is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = reachable_open_files()
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return _MOST_OPEN_FILES if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


def open_files_limit() -> int:
    """How many the process may have open as it is."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST_OPEN_FILES if soft == resource.RLIM_INFINITY else soft


def reachable_open_files() -> int:
    """How many `raise_open_files_limit` would give the process."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_OPEN_FILES)
