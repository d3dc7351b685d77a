"""The speed of a GPU and its bus, and of the host that gives it work. Figures of an H200, partly reckoned."""

from dataclasses import dataclass

from kvtier_kernels_bench.simulation.device import Engine, Stream, Work


@dataclass(frozen=True, slots=True)
class Speeds:
    """Of one rank."""

    bus_bytes_per_s: float = 55e9
    """Each way: PCIe 5.0 x16, measured by others."""
    device_bytes_per_s: float = 1e12
    """That a copy on the device moves beside an engine's kernels: half of what it does alone."""
    batch_s: float = 0.8e-3
    """Of Python for each copy that a mover asks for, beside an engine's thread."""
    engine_s: float = 5e-3
    """Of the engine's Python for a step, before it is launched."""
    launch_s: float = 40e-6
    """For a kernel, a copy or a call of the driver."""
    transfer_s: float = 0.5e-6
    """For each transfer of a batch that the driver is given."""
    verified_bytes_per_s: float = 20e9
    """Of blocks that are lent: their tier checks them before."""
    ipc_s: float = 0.3e-3
    """To ask the tier for a loan, and hear of it."""


class BusPace:
    """As a device runs that has these speeds."""

    waits_to_be_wanted = False

    def __init__(self, speeds: Speeds) -> None:
        self._speeds = speeds

    def seconds(self, _stream: Stream, work: Work) -> tuple[float, bool]:
        on_device = work.engine is Engine.SMS
        return work.nbytes / (self._speeds.device_bytes_per_s if on_device else self._speeds.bus_bytes_per_s), False
