"""`kvtier bench block-pool`: what the device tier's bookkeeping costs per block."""

from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from kvtier.bench.report import Case, Spread, interleave, report
from kvtier.block_pool import BlockPool
from kvtier.keys import PrefixHasher

NUM_BLOCKS = 100_000
BATCH_BLOCKS = 16
NUM_BATCHES = 5_000


def bench_block_pool(
    json: Annotated[Path | None, typer.Option(help="Write JSON to this file; - for standard output.")] = None,
) -> None:
    """Allocate, key, match and free in batches of 16 blocks, in a pool of 100,000."""
    empty, cached = BlockPool(NUM_BLOCKS), BlockPool(NUM_BLOCKS)
    hashes = PrefixHasher(bytes(32), "", 1).hash_blocks(np.arange(NUM_BLOCKS, dtype=np.int32))
    for start in range(0, NUM_BLOCKS, BATCH_BLOCKS):
        ids = cached.allocate(min(BATCH_BLOCKS, NUM_BLOCKS - start)) or []
        for block_id, chain_hash in zip(ids, hashes[start:], strict=False):
            cached.assign_key(block_id, chain_hash)
        cached.free(ids)

    def allocate_free() -> None:
        for _ in range(NUM_BATCHES):
            empty.free(empty.allocate(BATCH_BLOCKS) or [])

    def match() -> None:
        for batch in range(NUM_BATCHES):
            cached.match_prefix(hashes[batch * BATCH_BLOCKS : (batch + 1) * BATCH_BLOCKS])

    def hit() -> None:
        for batch in range(NUM_BATCHES):
            ids = cached.match_prefix(hashes[batch * BATCH_BLOCKS : (batch + 1) * BATCH_BLOCKS])
            cached.acquire(ids)
            cached.free(ids)

    seconds = interleave(
        {"allocate + free": allocate_free, "match": match, "match + acquire + free": hit}, label="pool"
    )
    per_block = 1e6 / (NUM_BATCHES * BATCH_BLOCKS)
    cases = [
        Case(name, f"batches of {BATCH_BLOCKS}", Spread.of(values).median_s * per_block, "block")
        for name, values in seconds.items()
    ]
    report("Block pool", cases, as_json=json)
