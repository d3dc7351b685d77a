"""kvtier's configuration as SGLang's users give it: a file, keys in the backend's extra config, or both."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier.config import Config, merge_tables, nearest, parse_config
from kvtier.errors import ConfigError

SOURCE = "hicache-storage-backend-extra-config"
_FILE, _FOLDER, _REVISION, _V1 = "config", "model_folder", "model_revision", "interface_v1"
_MOST_S = 9.5
"""What SGLang's thread may be held for: it is given 10 s to end."""
_OF_SGLANG = frozenset(
    (
        "backend_name",
        "module_path",
        "class_name",
        "prefetch_threshold",
        "prefetch_timeout_base",
        "prefetch_timeout_per_ki_token",
        "hicache_storage_pass_prefix_keys",
        "file_storage_path",
        "tp_lcm_size",
    )
)
"""Keys that SGLang reads itself, or adds."""
_KNOWN = (_FILE, _FOLDER, _REVISION, _V1, *_OF_SGLANG, *Config.model_fields)


@dataclass(frozen=True, slots=True)
class Settings:
    """What the extra config says."""

    config: Config
    model_folder: Path | None
    """The folder of the weights, if it is not the one that the server was told."""
    model_revision: str | None
    """What stands for the weights' content, by the operator's word."""
    is_zero_copy: bool
    """`interface_v1`: SGLang hands over places in its host memory rather than copies of pages."""

    @property
    def question_s(self) -> float:
        """What a question to the pool may take."""
        return min(self.config.cache.lookup_deadline_s, self.config.pool.call_timeout_s)


def load_settings(extra: Mapping[str, Any]) -> Settings:
    """The settings; keys given inline win over those of the file named by `config`.

    The tables `pool`, `tenants`, `cache` and `host` count, and no others: SGLang has host memory of its own,
    `host.capacity_bytes` is what may wait for a pool that does not answer.

    :raises ConfigError: names file or key, and the remedy.
    """
    for name in extra:
        if name not in _KNOWN:
            raise ConfigError(f"{SOURCE}.{name}: unknown key{nearest(name, _KNOWN)}")
    inline = {name: value for name, value in extra.items() if name not in _OF_SGLANG}
    folder_named, revision, is_v1 = (inline.pop(name, None) for name in (_FOLDER, _REVISION, _V1))
    model_folder = _text(_FOLDER, folder_named)
    data: dict[str, Any] = {}
    folder, source = Path(), SOURCE
    named = _text(_FILE, inline.pop(_FILE, None))
    if named is not None:
        path = Path(named).expanduser()
        folder, source = path.parent, f"{path} and {SOURCE}" if inline else str(path)
        try:
            data = tomllib.loads(path.read_text())
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f"{SOURCE}.{_FILE}: cannot read {path}: {error}") from error
    config = parse_config(merge_tables(data, inline), source=source, folder=folder)
    _require_pool(config, source)
    settings = Settings(
        config,
        None if model_folder is None else Path(model_folder).expanduser(),
        _text(_REVISION, revision),
        bool(is_v1),
    )
    _require_haste(settings, source)
    return settings


def _require_pool(config: Config, source: str) -> None:
    if not config.pool.address:
        raise ConfigError(
            f'{source}: pool.address: missing, and the pool is all that this backend has; e.g. "unix:/run/kvtier.sock"'
        )
    if config.pool.write_policy != "write_through":
        raise ConfigError(
            f"{source}: pool.write_policy is {config.pool.write_policy!r}: SGLang decides what it stores "
            "(--hicache-write-policy); use write_through"
        )


def _require_haste(settings: Settings, source: str) -> None:
    """A write that asks, transfers for half of a deadline, begins another transfer and asks again ends in time."""
    transfer_s, question_s = settings.config.pool.call_timeout_s, settings.question_s
    longest_s = 1.5 * transfer_s + 2 * question_s
    if longest_s > _MOST_S:
        raise ConfigError(
            f"{source}: pool.call_timeout_s is {transfer_s:g} and cache.lookup_deadline_s {question_s:g}: a pool that "
            f"hangs could hold SGLang's threads for {longest_s:.1f} s, and SGLang ends when they do not within 10 s of "
            "/flush_cache; set them lower, to 5 and 1 at most"
        )


def _text(key: str, value: object) -> str | None:
    if value is not None and (not isinstance(value, str) or not value):
        raise ConfigError(f"{SOURCE}.{key}: {value!r} is no text")
    return value
