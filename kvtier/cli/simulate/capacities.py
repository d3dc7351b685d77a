"""Capacities as they are typed: in blocks, in bytes, or as a multiple of what the trace was recorded under."""

from pydantic import ByteSize, TypeAdapter

from kvtier.errors import ConfigError
from kvtier.simulate.cases import Level
from kvtier.traces.form import Trace

_SIZE = TypeAdapter(ByteSize)


def parse_capacity(text: str, trace: Trace, block_bytes: int | None) -> int:
    """Blocks, from `5000`, `64GiB` or `2x`. Raises `ConfigError` where the text or the trace does not say so much.

    :param block_bytes: the size of a block; None: unknown.
    """
    text = text.strip()
    try:
        blocks = _blocks(text, trace, block_bytes)
    except (ValueError, OverflowError) as error:
        raise ConfigError(
            f"capacity {text!r} is none: name blocks as in 5000, bytes as in 64GiB, or 2x for twice what was "
            "there when the trace was recorded"
        ) from error
    if blocks < 1:
        raise ConfigError(f"capacity {text!r} is less than one block: name a larger one")
    return blocks


def parse_capacities(text: str | None, trace: Trace, block_bytes: int | None) -> list[Level]:
    """One cache for each; by default 1x, 2x and 4x, where the trace was recorded under a known capacity."""
    if text is None:
        if trace.recorded is None:
            raise ConfigError(
                f"name capacities in blocks, e.g. --capacity 1000,10000: {trace.name} does not say under which it was "
                f"recorded; it has {trace.num_keys:,} distinct blocks"
            )
        text = "1x,2x,4x"
    return [Level("cache", parse_capacity(part, trace, block_bytes)) for part in text.split(",")]


def parse_tiers(text: str, trace: Trace, block_bytes: int | None) -> list[Level]:
    """Tiers of one cache, from `host=1000,disk=20000`: the fastest first."""
    levels = []
    for part in text.split(","):
        name, equals, capacity = part.strip().partition("=")
        if not name or not equals:
            raise ConfigError(f"tier {part!r} has no name or no capacity: write --tiers host=1000,disk=20000")
        levels.append(Level(name, parse_capacity(capacity, trace, block_bytes)))
    return levels


def _blocks(text: str, trace: Trace, block_bytes: int | None) -> int:
    if text.isdecimal():
        return int(text)
    if text.endswith("x"):
        factor = float(text[:-1])
        if trace.recorded is None:
            raise ConfigError(
                f"capacity {text!r}: {trace.name} does not say under which capacity it was recorded; "
                "name blocks or bytes"
            )
        return int(factor * trace.recorded.capacity_blocks)
    nbytes = int(_SIZE.validate_python(text))
    if block_bytes is None:
        raise ConfigError(f"capacity {text!r}: {trace.name} does not say how large a block is; add --block-bytes 2MiB")
    return nbytes // block_bytes
