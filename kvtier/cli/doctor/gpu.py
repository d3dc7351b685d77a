"""Whether torch has a GPU here, and how fast pinned memory is copied to it: measured in a process that can be ended."""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from kvtier.cli.doctor.lines import Level, Line
from kvtier.cli.doctor.patience import Patience

_DEVICES = (Path("/dev/nvidiactl"), Path("/dev/dxg"), Path("/dev/kfd"))
_TIME_S, _MOST_S = 20.0, 100.0
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
    """Imports torch in a child process only, and only where there is a device. Waits 20 s at the most for a driver that
    hangs."""
    if not any(device.exists() for device in _DEVICES):
        return [Line(Level.OK, "GPU", "no GPU: there is no device of one")]
    if importlib.util.find_spec("torch") is None:
        return [Line(Level.OK, "GPU", "no GPU for kvtier: torch is not installed here, and a pool needs none")]
    done = _done()
    if done is None:
        effect = "an engine would hang at its start"
        found = f"no copy has ended within {_TIME_S:.0f} s beside what was waited for cores"
        return [Line(Level.PROBLEM, "GPU", found, effect, "see nvidia-smi, dmesg")]
    last = (done.stdout.strip().splitlines() or [""])[-1]
    if done.returncode or not last.startswith("{"):
        why = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        return [Line(Level.PROBLEM, "GPU", f"torch cannot use it: {why}", remedy="see nvidia-smi, and torch's release")]
    return [_line(json.loads(last))]


def _done() -> "subprocess.CompletedProcess[str] | None":
    """The program and what it has printed; None: it has not ended in time."""
    command, patience = [sys.executable, "-c", _PROGRAM], Patience(_TIME_S, _MOST_S, may_compute=False)
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True) as process:
        while wait_s := patience.wait_s():
            try:
                out, errors = process.communicate(timeout=wait_s)
            except subprocess.TimeoutExpired:
                continue
            return subprocess.CompletedProcess(command, process.returncode, out, errors)
        process.kill()
    return None


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
