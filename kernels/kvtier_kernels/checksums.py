"""A checksum of a block's bytes that a device and a host compute alike, in any order and by any number of threads.

A block is its parts, one after the other. Each part is cut into words of 8 bytes, little-endian, the last one filled up
with zeros; words are numbered from 0 through all parts. In arithmetic modulo 2**64, the checksum is `SEED` plus the
sum over all words of `mixed(word) * key(number)`, where `mixed(word)` is `product ^ product >> 32` of
`product = word * MIXER`. The keys are odd numbers, made from a word's number as SplitMix64 (Steele, Lea and Flood,
2014) makes random numbers from a counter.

A change of a single word always changes the sum: the word is mixed by a permutation, and an odd factor loses nothing.
Several changed words, and words that changed places, go unseen about once in 2**32 cases, unless somebody chose them
to: this finds accidents, not attackers. The words are mixed because a plain product passes the highest bit of a word on
to nothing but the highest bit of the sum, where two such changes would always cancel out: the signs of two numbers.
"""

import functools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

SEED = 0x6B76_7469_6572_3031
"""Ensures that the sum of a block of zeros is not the 0 that fresh memory holds."""
WORD_BYTES = 8
MIXER = 0xBF58_476D_1CE4_E5B9
KEY_STEP = 0x9E37_79B9_7F4A_7C15
"""What SplitMix64 adds to its counter: 2**64 divided by the golden ratio."""
KEY_FACTOR = 0xD6E8_FEB8_6659_FD93
HALF = 32
"""What a product is shifted by: its upper half is where all of its factor's bits have been."""
_CHUNK_WORDS = 1 << 14
"""This much of a block at a time stays in a core's cache, with its keys and what becomes of it."""

Words = npt.NDArray[np.uint64]


def part_words(part_bytes: int) -> int:
    """How many words a part is cut into."""
    return -(-part_bytes // WORD_BYTES)


def host_checksum(block: npt.NDArray[np.uint8], part_sizes: Sequence[int]) -> int:
    """The checksum of a block in host memory, as a signed integer of 64 bits, which is what torch has.

    Releases the GIL for most of the time. Takes about 1 ms for 2 MiB, after the first block of these sizes.

    :param block: uint8 `[sum(part_sizes)]`, contiguous; where it begins matters for speed only.
    :param part_sizes: bytes of each part.
    """
    if block.dtype != np.uint8 or block.shape != (sum(part_sizes),) or not block.flags.c_contiguous:
        raise ValueError(f"block {block.dtype} {list(block.shape)}: needs contiguous uint8 [{sum(part_sizes)}]")
    words = _words(block, part_sizes)
    keys, total = _keys(len(words)), SEED
    products, uppers = np.empty((2, min(_CHUNK_WORDS, len(words))), dtype=np.uint64)
    for start in range(0, len(words), _CHUNK_WORDS):
        chunk = words[start : start + _CHUNK_WORDS]
        product, upper = products[: len(chunk)], uppers[: len(chunk)]
        np.multiply(chunk, np.uint64(MIXER), out=product)
        np.right_shift(product, np.uint64(HALF), out=upper)
        np.bitwise_xor(product, upper, out=product)
        total += int(np.dot(product, keys[start : start + len(chunk)]))
    return as_signed(total)


def as_signed(number: int) -> int:
    """The number modulo 2**64, as a signed integer of 64 bits."""
    return (number + 2**63) % 2**64 - 2**63


def _words(block: npt.NDArray[np.uint8], part_sizes: Sequence[int]) -> Words:
    """A view where no part ends inside a word, else a copy."""
    if all(size % WORD_BYTES == 0 for size in part_sizes):
        return block.view("<u8")
    padded = np.zeros(sum(map(part_words, part_sizes)) * WORD_BYTES, dtype=np.uint8)
    source = target = 0
    for size in part_sizes:
        padded[target : target + size] = block[source : source + size]
        source, target = source + size, target + part_words(size) * WORD_BYTES
    return padded.view("<u8")


@functools.lru_cache(maxsize=4)
def _keys(num_words: int) -> Words:
    """The keys of so many words. They take as many bytes as a block, and are kept for the next block of its size."""
    keys = np.arange(1, num_words + 1, dtype=np.uint64)
    keys *= np.uint64(KEY_STEP)
    keys ^= keys >> np.uint64(HALF)
    keys *= np.uint64(KEY_FACTOR)
    keys ^= keys >> np.uint64(HALF)
    keys |= np.uint64(1)
    return keys
