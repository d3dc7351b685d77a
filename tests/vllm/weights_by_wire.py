"""A weight transfer engine of vLLM's that runs on the CPU: what arrives is in a file, and could be from anywhere."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

BACKEND = "a file"


@dataclass
class _Init(WeightTransferInitInfo):
    pass


@dataclass
class _Update(WeightTransferUpdateInfo):
    path: str


class WeightsByWire(WeightTransferEngine[_Init, _Update]):
    """In checkpoint format, as NCCL and CUDA IPC have it."""

    init_info_cls, update_info_cls = _Init, _Update

    def init_transfer_engine(self, init_info: _Init) -> None:
        pass

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: _Update) -> None:
        self.model.load_weights(load_file(Path(update_info.path)).items())  # type: ignore[operator]

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        pass


def register() -> None:
    """Lets vLLM find it in this process."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, WeightsByWire)
