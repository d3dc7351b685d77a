"""Engines in a process of their own: `hicache_child.py ANSWERS`, started by `child_rig` alone.

Commands are lines of JSON on standard input, `{"call": NAME, "shape": {...}, "storage": {...}, ...arguments}`: each has
an engine of its own, and one line of JSON as its answer, on the file descriptor ANSWERS. An error is an answer too,
`{"error": TEXT}`. The process ends with the input.
"""

import json
import os
import sys
import traceback
from typing import Any

from engine_shape import Shape, Storage
from hicache_rig import Engine, engine


def produce(running: Engine, tokens: list[int], seed: int) -> int:
    """Gives the tokens that were stored."""
    running.compute(tokens, seed=seed)
    running.store(tokens)
    return len(tokens)


def consume(running: Engine, tokens: list[int], seed: int) -> int:
    """Gives the tokens that were there, all of whose bytes were right."""
    return running.fetch(tokens, seed=seed)


CALLS = {call.__name__: call for call in (produce, consume)}


def answer(call: str, shape: dict[str, Any], storage: dict[str, Any], **arguments: Any) -> dict[str, Any]:
    try:
        with engine(Shape(**shape), Storage(**storage)) as running:
            return {"answer": CALLS[call](running, **arguments)}
    except Exception:
        return {"error": traceback.format_exc()}


def main() -> None:
    with os.fdopen(int(sys.argv[1]), "w") as answers:
        for line in sys.stdin:
            print(json.dumps(answer(**json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
