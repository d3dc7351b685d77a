"""`kvtier bench hash`: the prefix chain of a long prompt, beside the same chain hashed as CBOR."""

import hashlib

import numpy as np

from kvtier.cli.options import Json, Plot
from kvtier.errors import KvtierError
from kvtier.identity.keys import PrefixHasher
from kvtier_bench.measuring.options import Rounds
from kvtier_bench.measuring.report import Case, report
from kvtier_bench.measuring.rounds import NUM_ROUNDS, Subject, in_turn, timed

NUM_TOKENS = 100_000
TOKENS_PER_BLOCK = 16


def bench_hash(
    json: Json = False,
    plot: Plot = None,
    rounds: Rounds = NUM_ROUNDS,
) -> None:
    """Hash 100,000 tokens in blocks of 16, beside SHA-256 over CBOR of (parent, token tuple, extras)."""
    try:
        import cbor2
    except ModuleNotFoundError as error:
        raise KvtierError("the comparison needs cbor2: in a checkout of kvtier, pip install '.[dev]'") from error
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

    subjects = {"int32 buffer": ours, "list": from_list, "cbor": cbor}
    samples = in_turn({name: Subject(timed(run)) for name, run in subjects.items()}, rounds=rounds, label="hash")
    cases = [
        Case.of(name, "hash", samples[name], floor=("cbor", samples["cbor"]), batch=NUM_TOKENS, unit="prompt")
        for name in subjects
    ]
    report("Prefix chain of 100,000 tokens", cases, as_json=json, plot=plot)
