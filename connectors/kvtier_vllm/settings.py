"""kvtier's configuration as vLLM's users give it: a file, keys in `kv_connector_extra_config`, or both."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm.config import ParallelConfig

from kvtier.config import Config, merge_tables, parse_config
from kvtier.errors import ConfigError

_SOURCE = "kv_connector_extra_config"
_FILE = "config"
_ANY_TOKENS = 16
"""Tokens in a block, where it does not matter."""


def load_settings(extra: Mapping[str, Any], tokens_per_block: int) -> Config:
    """The configuration; keys given inline win over those of the file named by `config`.

    :param tokens_per_block: of vLLM's blocks, which are kvtier's here.
    :raises ConfigError: names file or key, and the remedy.
    """
    inline = {name: value for name, value in extra.items() if name != _FILE}
    data: dict[str, Any] = {}
    folder, source = Path(), _SOURCE
    if _FILE in extra:
        if not isinstance(extra[_FILE], (str, Path)):
            raise ConfigError(f"{_SOURCE}.{_FILE}: must be the path of a file")
        path = Path(extra[_FILE]).expanduser()
        folder, source = path.parent, f"{path} and {_SOURCE}" if inline else str(path)
        try:
            data = tomllib.loads(path.read_text())
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f"{_SOURCE}.{_FILE}: cannot read {path}: {error}") from error
    data = merge_tables(data, inline)
    # Parsed before it is put in: the environment has its say, too, and keys of fewer tokens than a block has would be
    # those of other blocks as well.
    if "tokens_per_block" in parse_config(data, source=source, folder=folder).cache.model_fields_set:
        raise ConfigError(
            f"{source}: cache.tokens_per_block: vLLM decides that (--block-size); leave it out, and "
            "KVTIER__CACHE__TOKENS_PER_BLOCK out of the environment"
        )
    config = parse_config(
        merge_tables(data, {"cache": {"tokens_per_block": tokens_per_block}}), source=source, folder=folder
    )
    for name, policy in (
        ("host", config.host.write_policy),
        ("disk", config.disk.write_policy),
        ("pool", config.pool.write_policy),
    ):
        if policy == "write_back":
            raise ConfigError(f"{source}: {name}.write_policy: vLLM does not say what it evicts; use write_through")
    return config


def of_rank(config: Config, parallel: ParallelConfig) -> Config:
    """The configuration of one of vLLM's workers: its part of what is meant for all on this host.

    Scheduler and workers call it alike. Each of several engines in data parallelism has host memory of its own, as with
    vLLM's `--kv-offloading-size`; the cores are divided among all of them.
    """
    num_ranks = parallel.local_world_size
    return config.of_rank(num_ranks, num_ranks * max(1, parallel.data_parallel_size_local))


def of_worker(config: Config, name: str) -> Config:
    """The configuration of one of several workers: with a disk folder of its own."""
    if config.disk.directory is None:
        return config
    disk = config.disk.model_copy(update={"directory": config.disk.directory / name})
    return config.model_copy(update={"disk": disk})


def shown_config(extra: Mapping[str, Any]) -> Config | None:
    """The configuration, for a process that only shows what others count; None where it is no good, which is told where
    it matters."""
    try:
        return load_settings(extra, _ANY_TOKENS)
    except ConfigError:
        return None
