"""`kvtier bench hash`: the prefix chain of a long prompt, beside the same chain hashed as CBOR."""

import hashlib
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from kvtier.bench.report import Case, Spread, interleave, ratios, report
from kvtier.errors import KvtierError
from kvtier.keys import PrefixHasher

NUM_TOKENS = 100_000
TOKENS_PER_BLOCK = 16


def bench_hash(
    json: Annotated[Path | None, typer.Option(help="Write JSON to this file; - for standard output.")] = None,
) -> None:
    """Hash 100,000 tokens in blocks of 16, beside SHA-256 over CBOR of (parent, token tuple, extras)."""
    try:
        import cbor2
    except ModuleNotFoundError as error:
        raise KvtierError("the comparison needs cbor2: pip install 'kvtier[dev]'") from error
    tokens = np.random.default_rng(0).integers(0, 128_000, NUM_TOKENS, dtype=np.int32)
    token_list = tokens.tolist()
    hasher = PrefixHasher(bytes(32), "", TOKENS_PER_BLOCK)

    def ours() -> None:
        hasher.hash_blocks(tokens)

    def from_list() -> None:
        hasher.hash_blocks(token_list)

    def cbor() -> None:
        parent = bytes(32)
        for start in range(0, NUM_TOKENS, TOKENS_PER_BLOCK):
            block = (parent, tuple(token_list[start : start + TOKENS_PER_BLOCK]), None)
            parent = hashlib.sha256(cbor2.dumps(block, canonical=True)).digest()

    seconds = interleave({"int32 buffer": ours, "list": from_list, "cbor": cbor}, label="hash")
    cases = []
    for name in ("int32 buffer", "list", "cbor"):
        ratio = ratios(seconds["cbor"], seconds[name])
        cases.append(
            Case(
                name,
                f"hash {NUM_TOKENS:,} tokens",
                Spread.of(seconds[name]).median_s * 1e6,
                "prompt",
                "sha256 of cbor",
                ratio.median_s,
                f"{ratio.min_s:.2f} .. {ratio.max_s:.2f}",
            )
        )
    report("Prefix chain", cases, as_json=json)
