"""kvtier's configuration as vLLM's users give it: a file, keys in `kv_connector_extra_config`, or both."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvtier.config import Config, parse_config
from kvtier.errors import ConfigError

_SOURCE = "kv_connector_extra_config"
_FILE = "config"


def load_settings(extra: Mapping[str, Any], tokens_per_block: int) -> Config:
    """The configuration; keys given inline win over those of the file named by `config`.

    :param tokens_per_block: of vLLM's blocks, which are kvtier's here.
    :raises ConfigError: names file or key, and the remedy.
    """
    inline = {name: value for name, value in extra.items() if name != _FILE}
    data: dict[str, Any] = {}
    folder, source = Path(), _SOURCE
    if _FILE in extra:
        path = Path(extra[_FILE]).expanduser()
        folder, source = path.parent, f"{path} and {_SOURCE}" if inline else str(path)
        try:
            data = tomllib.loads(path.read_text())
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f"{_SOURCE}.{_FILE}: cannot read {path}: {error}") from error
    data = _merged(data, inline)
    if "tokens_per_block" in data.get("cache", {}):
        raise ConfigError(f"{source}: cache.tokens_per_block: vLLM decides that (--block-size); leave it out")
    data = _merged(data, {"cache": {"tokens_per_block": tokens_per_block}})
    return parse_config(data, source=source, folder=folder)


def _merged(data: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Tables key by key, everything else as a whole."""
    merged = dict(data)
    for name, value in over.items():
        known = merged.get(name)
        both = isinstance(known, Mapping) and isinstance(value, Mapping)
        merged[name] = _merged(known, value) if both else value  # type: ignore[arg-type]
    return merged
