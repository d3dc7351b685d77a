"""`kvtier bench block-pool`: what the device tier's bookkeeping costs per block."""

import numpy as np

from kvtier.cli.options import Json, Plot
from kvtier.device.block_pool import BlockPool
from kvtier.identity.keys import BlockHasher, PrefixHasher, tenant_id
from kvtier_bench.measuring.blocks import TENANT
from kvtier_bench.measuring.options import Rounds
from kvtier_bench.measuring.report import Case, report
from kvtier_bench.measuring.rounds import NUM_ROUNDS, Subject, in_turn, timed

NUM_BLOCKS = 100_000
BATCH_BLOCKS = 16
NUM_BATCHES = 5_000


def bench_block_pool(
    json: Json = False,
    plot: Plot = None,
    rounds: Rounds = NUM_ROUNDS,
) -> None:
    """Allocate, key, match and free in batches of 16 blocks, in a pool of 100,000."""
    empty, cached = BlockPool(NUM_BLOCKS), BlockPool(NUM_BLOCKS)
    hasher = BlockHasher(tenant_id(TENANT), PrefixHasher(bytes(32), "", 1))
    keys = hasher.hash_blocks(np.arange(NUM_BLOCKS, dtype=np.int32))
    for start in range(0, NUM_BLOCKS, BATCH_BLOCKS):
        ids = cached.allocate(min(BATCH_BLOCKS, NUM_BLOCKS - start)) or []
        for block_id, key in zip(ids, keys[start:], strict=False):
            cached.assign_key(block_id, key)
        cached.free(ids)

    def allocate_free() -> None:
        for _ in range(NUM_BATCHES):
            empty.free(empty.allocate(BATCH_BLOCKS) or [])

    def match() -> None:
        for batch in range(NUM_BATCHES):
            cached.match_prefix(keys[batch * BATCH_BLOCKS : (batch + 1) * BATCH_BLOCKS])

    def hit() -> None:
        for batch in range(NUM_BATCHES):
            ids = cached.match_prefix(keys[batch * BATCH_BLOCKS : (batch + 1) * BATCH_BLOCKS])
            cached.acquire(ids)
            cached.free(ids)

    subjects = {"allocate + free": allocate_free, "match": match, "match + acquire + free": hit}
    samples = in_turn({name: Subject(timed(run)) for name, run in subjects.items()}, rounds=rounds, label="pool")
    per_block = 1 / (NUM_BATCHES * BATCH_BLOCKS)
    cases = [
        Case.of(name, "block-pool", of.scaled(per_block), batch=BATCH_BLOCKS, unit="block")
        for name, of in samples.items()
    ]
    report("Block pool", cases, as_json=json, plot=plot)
