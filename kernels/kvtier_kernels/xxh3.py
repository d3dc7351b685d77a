"""The constants of XXH3 with 64 bits over more than 240 bytes, with the default secret and no seed.

From xxHash's specification, `doc/xxhash_spec.md` of version 0.8.3. Input is taken in stripes of 8 words of 8 bytes, a
word to each of 8 accumulators, and in groups of 16 stripes, after each of which the accumulators are scrambled.
"""

import functools
import struct

import torch
from torch import Tensor

LEAST_BYTES = 241
"""Shorter input is summed by other rules, which are not here."""
WORD_BYTES, LANES, STRIPES, GROUP_WORDS = 8, 8, 16, 128
PRIME32_1, PRIME32_2, PRIME32_3 = 0x9E37_79B1, 0x85EB_CA77, 0xC2B2_AE3D
PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME64_5 = (
    0x9E37_79B1_85EB_CA87, 0xC2B2_AE3D_27D4_EB4F, 0x1656_67B1_9E37_79F9, 0x85EB_CA77_C2B2_AE63, 0x27D4_EB2F_1656_67C5,
)  # fmt: skip
AVALANCHE = 0x1656_6791_9E37_79F9
_START = (PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1)
_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221b8084674f743248e"
    "e03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8a8fa763fe39c343ff9dcbbc7c70b4f1d8a"
    "51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8f"
    "f8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_LAST_OFFSET, _MERGE_OFFSET = len(_SECRET) - 64 - 7, 11
"""Bytes into the secret, of the keys for the last 64 bytes and of those for the end. Neither is a multiple of 8."""

SCRAMBLE_AT, LAST_AT, MERGE_AT, START_AT = 16, 24, 32, 40
"""The places in `table` where 8 words begin: of the secret for the scramble, the last stripe and the end, and what
accumulators begin as. The keys of the stripe with number `r` in its group are those from `r` on."""


@functools.cache
def table(device: torch.device) -> Tensor:
    """int64 `[48]` on the device: the secret in words of 8 bytes, and what `SCRAMBLE_AT` and the others name.

    The first call for a device copies it there and waits for that.
    """
    words = [*struct.unpack("<24Q", _SECRET)]
    for offset in (_LAST_OFFSET, _MERGE_OFFSET):
        words += struct.unpack_from("<8Q", _SECRET, offset)
    packed = bytearray(struct.pack("<48Q", *words, *_START))
    return torch.frombuffer(packed, dtype=torch.int64).to(device, copy=True)
