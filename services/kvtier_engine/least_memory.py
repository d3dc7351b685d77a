"""The least memory that an engine starts with."""

from collections.abc import Iterable

from kvtier.config import Config
from kvtier.config.findings import Finding, Severity
from kvtier.config.tiers import MIN_HOST_BLOCKS


def too_small(config: Config, block_bytes: int, blocks_of_token: int = 1) -> Iterable[Finding]:
    """Yields errors for sizes that no engine of this model starts with.

    :param block_bytes: that a block takes on the device, at least.
    :param blocks_of_token: on the device, one for each KV group.
    """
    in_host = block_bytes if config.engine.lossy_codec == "none" else block_bytes // 2
    needed = {"engine.kv_bytes": (int(config.engine.kv_bytes), block_bytes * blocks_of_token)}
    if config.engine.cache:
        needed["host.capacity_bytes"] = (config.host_bytes(), MIN_HOST_BLOCKS * in_host)
    for key, (nbytes, least) in needed.items():
        if nbytes < least:
            yield Finding(
                Severity.ERROR,
                key,
                f"{nbytes:,} bytes, and a block of {config.cache.tokens_per_block} tokens of this model takes "
                f"{block_bytes:,}: set it to {least:,} at the very least, better to a hundred times that",
            )
