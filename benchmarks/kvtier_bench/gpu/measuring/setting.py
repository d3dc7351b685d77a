"""Says where and how large a run measures: a GPU, or in tiny size a CPU, where nothing but that it works is learnt."""

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvtier.clock import MONOTONIC, Clock


@dataclass(frozen=True, slots=True)
class Setting:
    """The device, the sizes and the deadline of one part of a run. One thread."""

    device: torch.device
    tiny: bool
    """Shapes that Triton's interpreter can do in a second, and two rounds."""
    dtype: torch.dtype
    deadline_s: float
    """The deadline by `clock`. A part begins nothing new after it, and is killed some seconds later."""
    clock: Clock = MONOTONIC

    @classmethod
    def here(cls, budget_s: float, *, tiny: bool, clock: Clock = MONOTONIC) -> "Setting":
        """Makes a setting for the current CUDA device, or for the CPU, where `tiny` must be true: else `ValueError`."""
        deadline_s = clock() + budget_s  # before the device is opened, which takes time
        if torch.cuda.is_available():
            device, dtype = torch.device("cuda", torch.cuda.current_device()), torch.bfloat16
        elif tiny:
            device, dtype = torch.device("cpu"), torch.float32
        else:
            raise ValueError("no CUDA device: nothing can be measured; --tiny tries the parts out")
        return cls(device, tiny, dtype, deadline_s, clock)

    @property
    def on_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def launches(self) -> bool:
        """Whether kernels can be launched: on CUDA, or in a process started with TRITON_INTERPRET=1, as tests do it."""
        return self.on_cuda or os.environ.get("TRITON_INTERPRET") == "1"

    @property
    def rounds(self) -> int:
        return 2 if self.tiny else 9

    def left_s(self) -> float:
        return self.deadline_s - self.clock()

    def size(self, full: int, tiny: int) -> int:
        """The one of them that this run is for."""
        return tiny if self.tiny else full

    def synchronize(self) -> None:
        """Blocks until the device has done everything."""
        if self.on_cuda:
            torch.cuda.synchronize(self.device)


Run = Callable[[], object]
