"""What client and pool know of each other's use of shared memory: where a block lies in a slab, and its generation.

A slab is memory of equal slots, followed, from the next page on, by little-endian u64 words: 1 as long as the slab
is in use, then the generation of each slot's content. The pool changes a slot's generation before it lets anybody
write there, and sets all words to zero when it gives the slab up.
"""

import struct

PLACE = struct.Struct("<QQQ")
"""One block: slot id (slab number * 2**32 + place), generation, checksum of its payload
(`kvtier.codec.checksums.checksum`)."""
WORD = struct.Struct("<Q")
"""A slot id, or a checksum."""
