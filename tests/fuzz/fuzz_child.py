"""One target under atheris, in a process of its own: libFuzzer ends the process that it runs in.

    python tests/fuzz/fuzz_child.py TARGET CORPUS_FOLDER LIBFUZZER_OPTIONS...

Seeds are written to the corpus folder first. atheris is not in `kvtier[dev]`: `make fuzz` has an environment for it.
"""

import hashlib
import logging
import sys
from pathlib import Path

import atheris

_HERE = Path(__file__).parent
sys.path[:0] = [str(_HERE), str(_HERE.parent / "rigs")]

with atheris.instrument_imports(include=["kvtier", "kvtier_pool"]):  # type: ignore[no-untyped-call]
    from fuzz_targets import TARGETS


def main() -> None:
    target = TARGETS[sys.argv[1]]
    corpus = Path(sys.argv[2])
    corpus.mkdir(parents=True, exist_ok=True)
    for seed in target.seeds():
        (corpus / hashlib.sha256(seed).hexdigest()[:16]).write_bytes(seed)
    logging.getLogger().addHandler(logging.NullHandler())  # warnings of damage, thousands a second
    options = [sys.argv[0], str(corpus), f"-max_len={target.max_bytes}", *sys.argv[3:]]
    with target.opened() as execute:
        atheris.Setup(options, execute)  # type: ignore[no-untyped-call]
        atheris.Fuzz()  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
