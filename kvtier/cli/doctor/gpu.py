"""Whether torch has a GPU here, and how fast pinned memory is copied to it: measured in a process that can be ended."""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from kvtier.cli.doctor.lines import Level, Line

_DEVICES = (Path("/dev/nvidiactl"), Path("/dev/dxg"), Path("/dev/kfd"))
_TIME_S = 20.0
_SLOW_BYTES_PER_S = 10e9
_PROGRAM = """
import json, time, torch
if not torch.cuda.is_available():
    print(json.dumps({"release": torch.version.cuda}))
    raise SystemExit
host = torch.empty(256 << 20, dtype=torch.uint8, pin_memory=True)
there = torch.empty_like(host, device="cuda")
def seconds(into, source):
    times = []
    for _ in range(4):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        into.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begun)
    return min(times)
print(json.dumps({"name": torch.cuda.get_device_name(), "count": torch.cuda.device_count(),
    "to": host.nbytes / seconds(there, host), "from": host.nbytes / seconds(host, there)}))
"""


def gpu_lines() -> Iterable[Line]:
    """Imports torch in a child process only, and only where there is a device. Takes 20 s at the most."""
    if not any(device.exists() for device in _DEVICES):
        return [Line(Level.OK, "GPU", "no GPU: there is no device of one")]
    if importlib.util.find_spec("torch") is None:
        return [Line(Level.OK, "GPU", "no GPU for kvtier: torch is not installed here, and a pool needs none")]
    command = [sys.executable, "-c", _PROGRAM]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIME_S, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        effect = "an engine would hang at its start"
        return [
            Line(Level.PROBLEM, "GPU", f"no copy has ended within {_TIME_S:.0f} s", effect, "see nvidia-smi, dmesg")
        ]
    last = (done.stdout.strip().splitlines() or [""])[-1]
    if done.returncode or not last.startswith("{"):
        why = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        return [Line(Level.PROBLEM, "GPU", f"torch cannot use it: {why}", remedy="see nvidia-smi, and torch's release")]
    return [_line(json.loads(last))]


def _line(measured: dict[str, object]) -> Line:
    if "name" not in measured:
        built = f"for CUDA {measured['release']}" if measured["release"] else "without CUDA"
        found = f"torch finds none (it is built {built})"
        remedy = "see nvidia-smi; in a container, --gpus all; or install torch for this driver"
        return Line(Level.WARNING, "GPU", found, "an engine would compute on the CPU", remedy)
    to, back = float(str(measured["to"])), float(str(measured["from"]))
    found = (
        f"{measured['count']} x {measured['name']}; pinned memory is copied at {to / 1e9:.1f} GB/s to the first one, "
    )
    found += f"{back / 1e9:.1f} GB/s back"
    if min(to, back) >= _SLOW_BYTES_PER_S:
        return Line(Level.OK, "GPU", found)
    remedy = "see the link's width in nvidia-smi -q (PCI), and on which NUMA node this process runs"
    return Line(Level.WARNING, "GPU", found, "hits take as long to load", remedy)
