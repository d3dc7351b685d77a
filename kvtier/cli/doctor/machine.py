"""What the machine has that kvtier and its engines need, whatever the configuration says."""

import os
import platform
import resource
import shutil
from collections.abc import Iterable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from kvtier.cli.doctor.gpu import gpu_lines
from kvtier.cli.doctor.lines import Level, Line, Look
from kvtier.config.findings import size_words
from kvtier.config.tiers import default_load_threads
from kvtier.memory import memfd
from kvtier.system.cores import usable_cores
from kvtier.system.memory import available_bytes, total_bytes
from kvtier.system.open_files import open_files_limit, reachable_open_files

_SHARED_MEMORY = Path("/dev/shm")
_SMALL_SHARED_BYTES = 64 << 20
"""What containers have where nobody asks for more."""
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")
_NODES = Path("/sys/devices/system/node")
_CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")
_FEW_FILES = 4096
_PACKAGES = ("torch", "triton", "vllm", "sglang", "redis", "cryptography")


def machine_looks() -> list[Look]:
    """Looks at the machine, and at the releases that are installed. They open no connection."""
    return [
        Look(
            "machine", lambda: [_memory(), _cores(), _shared_memory(), _huge_pages(), _locked_memory(), _open_files()]
        ),
        Look("GPU", gpu_lines),
        Look("releases", lambda: [_releases()]),
    ]


def _memory() -> Line:
    total, available = total_bytes(), available_bytes()
    if total is None or available is None:
        return Line(Level.NOTE, "memory", "this system does not say how much it has")
    return Line(Level.OK, "memory", f"{size_words(available)} available of {size_words(total)}")


def _cores() -> Line:
    cores = usable_cores()
    nodes = len(list(_NODES.glob("node[0-9]*"))) or 1
    allowed = _allowed_cores()
    if allowed is not None and allowed < cores:
        found = f"{cores}, and the control group gives this process the time of {allowed:g}"
        effect = "threads are as many as there are cores, and wait for each other"
        remedy = "raise the limit (docker run --cpus), or set cache.load_threads and engine.num_threads"
        return Line(Level.WARNING, "cores", found, effect, remedy)
    of_host, busy = os.cpu_count() or 1, os.getloadavg()[0]
    if busy > of_host / 2:
        found = (
            f"{cores} for this process; in the last minute {busy:.1f} threads have wanted the {of_host} of this host"
        )
        effect = "an engine on the CPU with a thread for each core waits, in every step, for the slowest"
        remedy = (
            f"where they are not an engine's own, set its engine.num_threads to {max(1, int(of_host - busy))} or less"
        )
        return Line(Level.NOTE, "cores", found, effect, remedy)
    found = f"{cores} for this process, on {nodes} NUMA node{'s' if nodes > 1 else ''}"
    return Line(Level.OK, "cores", f"{found}; cache.load_threads is {default_load_threads()} unless it is set")


def _allowed_cores() -> float | None:
    """Returns how many cores' time the control group has; None: as much as there is."""
    try:
        quota, period = _CPU_LIMIT.read_text().split()
        return int(quota) / int(period)
    except (OSError, ValueError):
        return None


def _shared_memory() -> Line:
    if not memfd.available():
        effect = "blocks of a pool on this host come through its socket"
        return Line(Level.WARNING, "shared memory", "this system has no memfds", effect, "use Linux for it")
    try:
        usage = shutil.disk_usage(_SHARED_MEMORY)
    except OSError:
        return Line(Level.NOTE, "shared memory", f"{_SHARED_MEMORY} is not there: kvtier needs none, vLLM does")
    found = f"{_SHARED_MEMORY} has {size_words(usage.free)} free of {size_words(usage.total)}"
    if usage.total <= _SMALL_SHARED_BYTES:
        effect = "kvtier needs none of it, but ranks of vLLM and SGLang may not start"
        return Line(Level.NOTE, "shared memory", found, effect, "give the container --shm-size=8g or --ipc=host")
    return Line(Level.OK, "shared memory", f"{found}; kvtier itself needs none of it")


def _huge_pages() -> Line:
    try:
        chosen = (_HUGE_PAGES / "shmem_enabled").read_text().partition("[")[2].partition("]")[0]
    except OSError:
        return Line(Level.NOTE, "huge pages", "this kernel has no transparent ones")
    if chosen in ("advise", "always", "within_size", "force"):
        return Line(Level.OK, "huge pages", f"shared memory has them (shmem_enabled is {chosen})")
    found = f"shared memory has none (shmem_enabled is {chosen})"
    effect = "an engine's host memory takes longer to touch and to pin at its start"
    return Line(Level.NOTE, "huge pages", found, effect, f"as root: echo advise > {_HUGE_PAGES}/shmem_enabled")


def _locked_memory() -> Line:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Line(Level.OK, "locked memory", "memlock has no limit")
    effect = "CUDA pins memory by its driver, whatever this says; libraries of RDMA count against it"
    remedy = "for RDMA alone: ulimit -l unlimited, or LimitMEMLOCK=infinity"
    return Line(Level.NOTE, "locked memory", f"memlock is {size_words(soft)}", effect, remedy)


def _open_files() -> Line:
    now, most = open_files_limit(), reachable_open_files()
    found = f"{now:,}, which pool and engine raise to {most:,}" if now < most else f"{most:,}"
    if most >= _FEW_FILES:
        return Line(Level.OK, "open files", found)
    effect = "connections and slabs of memory take one or two each, and are refused when there are no more"
    return Line(Level.WARNING, "open files", found, effect, "raise the hard limit: ulimit -Hn, or LimitNOFILE=")


def _releases() -> Line:
    found = [f"kvtier {version('kvtier')}", f"Python {platform.python_version()}", *_installed()]
    missing = [name for name in _PACKAGES if not _release(name)]
    without = f"; without {', '.join(missing)}" if missing else ""
    return Line(Level.OK, "releases", ", ".join(found) + without)


def _installed() -> Iterable[str]:
    return (f"{name} {_release(name)}" for name in _PACKAGES if _release(name))


def _release(name: str) -> str:
    """Returns the release of an installed package, without an import of it; empty: it is not installed."""
    for distribution in (name, f"{name}-cpu"):  # as vLLM's build for CPUs is called
        with suppress(PackageNotFoundError):
            return version(distribution)
    return ""
