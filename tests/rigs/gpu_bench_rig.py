"""The setting of a measurement in tiny size, on a CPU."""

import torch

from kvtier_bench.gpu.measuring.setting import Setting


def tiny(budget_s: float = 30.0) -> Setting:
    return Setting(torch.device("cpu"), True, torch.float32, budget_s, clock=lambda: 0.0)
