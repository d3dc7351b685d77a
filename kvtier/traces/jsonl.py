"""Traces as the Mooncake project publishes them: a JSON object a line, plain or compressed by gzip.

`{"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [a number per block of the prompt]}`;
from https://github.com/kvcache-ai/Mooncake, `FAST25-release/traces`. Traces of agents come in the same form.
"""

import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from kvtier.errors import ConfigError
from kvtier.traces.form import Request, Trace

MOONCAKE_TOKENS_PER_BLOCK = 512
_GZIP_MAGIC = b"\x1f\x8b"


def read_jsonl(path: Path, *, tokens_per_block: int = MOONCAKE_TOKENS_PER_BLOCK) -> Trace:
    """The whole trace, about 2 s for a million references. Raises `ConfigError` with the line that cannot be read.

    :param tokens_per_block: what a number in `hash_ids` stands for; the file does not say it.
    """
    numbers: dict[object, int] = {}
    requests = list(_requests(path, lambda hash_id: numbers.setdefault(hash_id, len(numbers))))
    if not requests:
        raise ConfigError(f"{path} has no request in it: name a trace of at least one line")
    start_s = requests[0].time_s
    requests = [request._replace(time_s=request.time_s - start_s) for request in requests]
    return Trace(path.name, requests, len(numbers), tokens_per_block)


def _requests(path: Path, number: Callable[[object], int]) -> Iterator[Request]:
    line_number = 0
    try:
        with _opened(path) as lines:
            for line in lines:
                line_number += 1
                if line.strip():
                    yield _request(json.loads(line), number)
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        reason = f"there is no {error}" if isinstance(error, KeyError) else str(error)
        raise ConfigError(
            f"{path}, line {line_number}: {reason}; a line is "
            '{"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [a number per block]}'
        ) from error
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{path} cannot be read after line {line_number}: {error}; copy it anew") from error


def _opened(path: Path) -> IO[str]:
    with path.open("rb") as file:
        is_gzip = file.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
    return gzip.open(path, "rt", encoding="utf-8") if is_gzip else path.open(encoding="utf-8")


def _request(fields: dict[str, object], number: Callable[[object], int]) -> Request:
    timestamp, length, hash_ids = fields["timestamp"], fields["input_length"], fields["hash_ids"]
    if not isinstance(timestamp, (int, float)) or not isinstance(length, int) or not isinstance(hash_ids, list):
        raise TypeError("`timestamp` and `input_length` are numbers, `hash_ids` is a list")
    answer = fields.get("output_length", 0)
    if not isinstance(answer, int):
        raise TypeError("`output_length` is a number")
    keys = [number(hash_id) for hash_id in hash_ids]
    return Request(timestamp / 1e3, keys, length, num_answer_tokens=answer)
