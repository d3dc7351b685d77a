"""The speed of a GPU and its bus, and of the host that gives it work. Figures of an H200, partly reckoned."""

from dataclasses import dataclass

from kvtier_bench.gpu.simulation.device import Engine, Stream, Work


@dataclass(frozen=True, slots=True)
class Speeds:
    """The speeds of one rank's GPU and host."""

    bus_bytes_per_s: float = 55e9
    """PCIe 5.0 x16, each way, as others have measured it."""
    device_bytes_per_s: float = 1e12
    """Payload of a copy on the device beside an engine's kernels, at half the speed that it has alone."""
    batch_s: float = 0.8e-3
    """Python's time for each copy that a mover asks for, beside an engine's thread."""
    engine_s: float = 5e-3
    """Python's time for a step of the engine, before it is launched."""
    launch_s: float = 40e-6
    """The host's time for a kernel, a copy or a call of the driver."""
    transfer_s: float = 0.5e-6
    """The host's time for each transfer of a batch that the driver is given."""
    verified_bytes_per_s: float = 20e9
    """The speed at which a tier checks blocks before it lends them."""
    ipc_s: float = 0.3e-3
    """The time to ask a tier for a loan and hear of it."""


class BusPace:
    """The `Pace` of a device with these speeds."""

    waits_to_be_wanted = False

    def __init__(self, speeds: Speeds) -> None:
        self._speeds = speeds

    def seconds(self, _stream: Stream, work: Work) -> tuple[float, bool]:
        on_device = work.engine is Engine.SMS
        return work.nbytes / (self._speeds.device_bytes_per_s if on_device else self._speeds.bus_bytes_per_s), False
