"""A folder of weights that tests change, and what a worker knows of it."""

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

from kvtier.identity.weights_digest import weights_digest
from kvtier_vllm.messages import WeightsState
from kvtier_vllm.weights.weights import Change, Weights


class Model:
    """A folder of weights, and who computes with them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.write(0)
        self.weights = Weights(self._namespace, self._files)

    def write(self, value: int, name: str = "weight") -> None:
        save_file({name: torch.full((8,), value)}, self.folder / "model.safetensors")

    def _files(self, path: str) -> list[Path]:
        return sorted(Path(path or self.folder).glob("*.safetensors"))

    def _namespace(self) -> bytes:
        return weights_digest(self._files(""), self.folder)

    def reload(self, meanwhile: Callable[[], None] = lambda: None) -> WeightsState:
        with self.weights.changing("reload_weights", Change.FROM_FILES):
            assert self.weights.state.namespace is None, "something could be loaded or saved in the middle of it"
            meanwhile()
        return self.weights.state


def model_in(tmp_path: Path) -> Model:
    """For a fixture `model`."""
    return Model(tmp_path / "model")
