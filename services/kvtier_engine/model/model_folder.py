"""Opens the model at a path: a Hugging Face folder or a GGUF file."""

from dataclasses import dataclass
from pathlib import Path

from kvtier.errors import ConfigError
from kvtier.identity.weights_digest import weights_digest
from kvtier_engine.model.gguf_import import import_gguf
from kvtier_engine.model.model_config import ModelConfig, load_model_config
from kvtier_engine.model.weight_files import weight_files
from kvtier_engine.text.tokenizer import ChatTokenizer

DEFAULT_CACHE_DIR = Path("~/.cache/kvtier/models")


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A model that is complete on disk; its weights are not in memory yet."""

    name: str
    config: ModelConfig
    tokenizer: ChatTokenizer
    weight_files: tuple[Path, ...]
    weights_digest: bytes
    """32 bytes, of the content: the same for the same weights at any path (`kvtier.identity.namespace`)."""


def open_model(path: Path, cache_dir: Path = DEFAULT_CACHE_DIR) -> ModelFolder:
    """Opens the model at `path`: a folder with config.json, *.safetensors and tokenizer.json, or a .gguf file.

    A GGUF file is dequantised into `cache_dir` the first time. Hashes the weights the first time.

    :raises ConfigError: names the path, what is missing or wrong, and the remedy.
    """
    path, cache_dir = path.expanduser(), cache_dir.expanduser()
    if path.is_file() and path.suffix == ".gguf":
        folder = import_gguf(path, cache_dir)
    elif path.is_dir():
        folder = path
    else:
        raise ConfigError(f"no model at {path}: give a .gguf file or a folder with config.json and *.safetensors")
    files = weight_files(folder)
    return ModelFolder(
        name=path.stem if path.is_file() else path.resolve().name,
        config=load_model_config(folder),
        tokenizer=ChatTokenizer(folder),
        weight_files=files,
        weights_digest=weights_digest(files, cache_dir),
    )
