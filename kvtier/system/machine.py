"""What reports of measurements name: the machine that they were made on, and the commit."""

import os
import platform
import subprocess
from pathlib import Path


def hardware() -> str:
    """Processor, cores and operating system, in a line."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    return (
        f"{model}, {os.cpu_count()} cores, {platform.system()} {platform.release()}, Python {platform.python_version()}"
    )


def commit() -> str:
    """Short commit of the checkout, with `+changes` when it differs; `unknown` outside of one."""
    here = Path(__file__).parent
    try:
        args = {"cwd": here, "capture_output": True, "text": True, "check": True}
        revision = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], **args).stdout.strip()  # type: ignore[call-overload]
        changed = subprocess.run(["git", "status", "--porcelain", "-uno"], **args).stdout.strip()  # type: ignore[call-overload]
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{revision}+changes" if changed else str(revision)
