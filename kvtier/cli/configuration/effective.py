"""What a configuration comes to, key by key, and who has set each."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from kvtier.config import load_config
from kvtier.config.parsing import without_credentials
from kvtier.config.references import overridden_keys
from kvtier.errors import printable


@dataclass(frozen=True, slots=True)
class Setting:
    """One key of a configuration that was read."""

    key: str
    """The name, with dots."""
    value: Any
    """The value as JSON has it. Secrets stand there as they stand in the file: `env:NAME` or `file:PATH`."""
    source: str
    """`default`, the file's name, or the name of a variable of the environment."""


def settings_of(file: Path, environ: Mapping[str, str]) -> list[Setting]:
    """Returns every key with its value. Raises `ConfigError` for a file that cannot be read or has errors."""
    config = load_config(file, environ)
    variables = overridden_keys(environ)
    return [
        Setting(key, value, variables.get(key, str(file) if is_set else "default"))
        for key, value, is_set in _values("", config)
    ]


def _values(prefix: str, section: BaseModel) -> Iterator[tuple[str, Any, bool]]:
    for name in type(section).model_fields:
        value, is_set = getattr(section, name), name in section.model_fields_set
        path = f"{prefix}{name}"
        if isinstance(value, BaseModel):
            yield from _values(f"{path}.", value)
        elif isinstance(value, dict):
            for named, below in value.items():
                yield from _values(f"{path}.{printable(named)}.", below)
        else:
            yield path, _shown(section.model_dump(mode="json", include={name})[name]), is_set


def _shown(value: Any) -> Any:
    """A value without passwords that stand in URLs."""
    if isinstance(value, list):
        return [_shown(each) for each in value]
    if isinstance(value, dict):
        return {key: _shown(each) for key, each in value.items()}
    return without_credentials(value) if isinstance(value, str) and "://" in value else value
