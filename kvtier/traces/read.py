"""Reads a trace, whichever form its file has."""

from pathlib import Path

from kvtier.errors import ConfigError
from kvtier.traces.form import Trace
from kvtier.traces.jsonl import MOONCAKE_TOKENS_PER_BLOCK, read_jsonl
from kvtier.traces.recorded import read_recorded
from kvtier.traces.records import FRAME_MAGIC


def read_trace(path: Path, *, tokens_per_block: int = MOONCAKE_TOKENS_PER_BLOCK) -> Trace:
    """kvtier's own form, or Mooncake's JSON lines, plain or compressed by gzip; the first bytes say which.

    :param tokens_per_block: of JSON lines only, which do not say it.
    :raises ConfigError: the file is neither, or damaged.
    """
    try:
        with path.open("rb") as file:
            start = file.read(len(FRAME_MAGIC))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; name a trace") from error
    return read_recorded(path) if start == FRAME_MAGIC else read_jsonl(path, tokens_per_block=tokens_per_block)
