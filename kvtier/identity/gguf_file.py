"""Reads GGUF files with the package `gguf`, which is imported only then."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvtier.errors import ConfigError

SHAPE_NAMES: Mapping[str, str] = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
}
"""What `config.json` calls the numbers of a model's shape, and GGUF behind its architecture's name and a dot."""


def read_gguf(path: Path) -> tuple[Any, dict[str, Any]]:
    """The file as `gguf.GGUFReader`, which maps its tensors, and its fields by name. A long vocabulary takes seconds.

    :raises ConfigError: it cannot be read as GGUF, or `gguf` is not installed.
    """
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise ConfigError(f"{path}: a GGUF file is read with the package gguf: pip install gguf") from error
    try:
        reader = GGUFReader(path)
        return reader, {name: field.contents() for name, field in reader.fields.items()}
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}; name a file that is there") from error
    except (ValueError, KeyError, IndexError, OverflowError) as error:
        # What the reader says of a torn file is about numpy's views, and helps nobody.
        raise torn(path) from error


def torn(path: Path) -> ConfigError:
    """What to raise for a file that is no whole GGUF."""
    return ConfigError(
        f"{path} cannot be read as GGUF: it is torn, or of a format that is not GGUF 2 or 3; download it again"
    )
