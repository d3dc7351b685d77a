"""Sealing: AES-256-GCM by keys that one tenant has, so that whoever has not got them can neither read nor forge blocks.

A sealed payload has 48 bytes more than what is sealed:

    offset   bytes  field
         0      24  random, of this block alone
        24       8  the writer's checksum of the payload (u64, little endian), masked
        32       n  ciphertext
    32 + n      16  tag of GCM

    material = HMAC-SHA-512(tenant's key, label || tenant id || u32 key id || random)
    key of the block = material[0:32], nonce = material[32:44], mask of the checksum = material[44:52]

The tag covers what the caller binds the payload to (the header of the stored form without its checksum), the masked
checksum and the ciphertext. Every block has a key of its own, made from 192 random bits: no count of blocks is near
which a nonce would come again under the same key, and nothing has to be remembered across restarts (decision 30).

`cryptography` is imported when there is a key, and only then. It releases the GIL while it works on a payload, and
writes straight into the buffer that it is given. `SealingKeys` is safe in any thread.
"""

import enum
import hashlib
import hmac
import os
import struct
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from kvtier.errors import ConfigError, SealedBlockError, SealFault
from kvtier.identity.keys import TenantId

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers import AEADDecryptionContext, AEADEncryptionContext, Cipher
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    from cryptography.hazmat.primitives.ciphers.modes import GCM

KEY_BYTES = 32
MAX_KEY_ID = 255
"""The disk tier keeps the id of every block in memory, in one byte."""

_RANDOM_BYTES, _MASKED_BYTES = 24, 8
FRONT_BYTES = _RANDOM_BYTES + _MASKED_BYTES
"""How many bytes of a sealed payload stand before the ciphertext."""
TAG_BYTES = 16
"""How many bytes of a sealed payload stand behind the ciphertext."""
SEAL_BYTES = FRONT_BYTES + TAG_BYTES
"""How many more bytes a payload has when it is sealed."""

_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_Buffer = bytes | bytearray | memoryview


class Purpose(enum.Enum):
    """What keys are for. The same secret gives other keys for another purpose."""

    STORAGE = b"kvtier.storage.v1"
    """Blocks on disk and in Redis: the keys of whoever runs the disk or the pool."""
    CARRIAGE = b"kvtier.carriage.v1"
    """Blocks that an engine gives to a pool: keys that the pool never has."""


class Sealer:
    """One payload that is sealed piece by piece, from its beginning to its end. One thread."""

    __slots__ = ("_context", "front")

    def __init__(self, context: "AEADEncryptionContext", front: bytes) -> None:
        """Made by `SealingKeys.sealer`."""
        self._context = context
        self.front = front
        """The `FRONT_BYTES` that stand before the ciphertext."""

    def update_into(self, piece: _Buffer, into: memoryview) -> None:
        """Fills `into`, as long as `piece` and in memory that nobody else can write to, with the piece's ciphertext."""
        self._context.update_into(piece, into)

    def tag(self) -> bytes:
        """The `TAG_BYTES` that stand behind the ciphertext, after the last piece."""
        self._context.finalize()
        return self._context.tag


class Opener:
    """One sealed payload that is opened piece by piece, from its beginning to its end. One thread.

    What has been opened is worth nothing before `finish` has returned.
    """

    __slots__ = ("_checksum", "_context", "_key_id")

    def __init__(self, context: "AEADDecryptionContext", key_id: int, checksum: int) -> None:
        """Made by `SealingKeys.opener`."""
        self._context, self._key_id, self._checksum = context, key_id, checksum

    def update_into(self, piece: _Buffer, into: memoryview) -> None:
        """Fills `into`, as long as `piece`, with what a piece of the ciphertext was made from. Nobody else can write to
        the memory of `piece` meanwhile."""
        self._context.update_into(piece, into)

    def finish(self, tag: bytes) -> int:
        """Returns the writer's checksum, which is still to be compared.

        Raises `SealedBlockError` when the payload was not sealed by this key for its place, or was changed since.
        """
        from cryptography.exceptions import InvalidTag

        try:
            self._context.finalize_with_tag(tag)
        except InvalidTag as error:
            raise _altered(self._key_id) from error
        return self._checksum


class SealingKeys:
    """One tenant's keys for one purpose, by their ids. The one with the largest id seals, all of them open.

    Immutable: any thread. Sealing or opening costs 5 us a block, and 0.11 CPU seconds per GiB where the processor has
    instructions for AES.
    """

    def __init__(self, purpose: Purpose, tenant: TenantId, keys: Mapping[int, bytes]) -> None:
        """:param keys: of 32 random bytes each, at least one, by ids from 1 to `MAX_KEY_ID`.

        Raises `ConfigError` when `cryptography` is not installed, and for keys or ids that cannot be any.
        """
        if not keys or any(len(key) != KEY_BYTES or not 1 <= number <= MAX_KEY_ID for number, key in keys.items()):
            raise ConfigError(f"sealing keys: need one or more of {KEY_BYTES} bytes, with ids from 1 to {MAX_KEY_ID}")
        self._keys = {
            key_id: hmac.new(key, purpose.value + tenant + _U32.pack(key_id), hashlib.sha512)
            for key_id, key in keys.items()
        }
        """What is gone on with from a copy, by key id: the key and all that is the same for each block are in it.
        After a block has been moved and the caches are empty, a quarter of the price of beginning anew."""
        self.newest = max(keys)
        """The id of the key that seals."""
        _ = self._cipher  # now, rather than at the first block

    def __repr__(self) -> str:
        return f"SealingKeys(ids={sorted(self._keys)})"

    def seal_into(self, bound: bytes, checksum: int, payload: _Buffer, into: memoryview) -> None:
        """Fills `into` with `payload` sealed by the newest key.

        :param bound: what the block is opened with again, and nothing else; not stored here.
        :param checksum: its writer's.
        :param into: one-dimensional bytes, `SEAL_BYTES` more than `payload`, that nobody else can write to meanwhile:
            GCM may read what it has written.
        """
        key, nonce, front = self._fresh(checksum)
        into[:FRONT_BYTES] = front
        self._cipher(key).encrypt_into(nonce, payload, bound + front[_RANDOM_BYTES:], into[FRONT_BYTES:])

    def open_into(self, key_id: int, bound: bytes, sealed: _Buffer, into: memoryview) -> int:
        """Fills `into` with what `seal_into` was given; returns the writer's checksum, which is still to be compared.

        Raises `SealedBlockError` when it was not sealed by this tenant's key of this id and for `bound`, or was changed
        since; then `into` holds anything.

        :param sealed: `SEAL_BYTES` more than `into`, in memory that nobody else can write to meanwhile.
        """
        self._require_known(key_id)
        if len(sealed) != len(into) + SEAL_BYTES:
            raise SealedBlockError(SealFault.ALTERED, f"sealed block of {len(sealed)} bytes for {len(into)}")
        view = memoryview(sealed)
        key, nonce, mask = self._material(key_id, bytes(view[:_RANDOM_BYTES]))
        masked = bytes(view[_RANDOM_BYTES:FRONT_BYTES])
        try:
            self._cipher(key).decrypt_into(nonce, view[FRONT_BYTES:], bound + masked, into)
        except self._invalid_tag as error:
            raise _altered(key_id) from error
        return int(_U64.unpack(masked)[0]) ^ mask

    def sealer(self, bound: bytes, checksum: int) -> Sealer:
        """Seals one payload piece by piece, as `seal_into` does at once. Takes 10 us more than that: for large ones."""
        key, nonce, front = self._fresh(checksum)
        context = self._stream(key, nonce).encryptor()
        context.authenticate_additional_data(bound + front[_RANDOM_BYTES:])
        return Sealer(context, front)

    def opener(self, key_id: int, bound: bytes, front: bytes) -> Opener:
        """Opens one payload piece by piece, as `open_into` does at once, with the same errors. Takes 10 us more.

        :param front: the `FRONT_BYTES` before the ciphertext.
        """
        self._require_known(key_id)
        key, nonce, mask = self._material(key_id, front[:_RANDOM_BYTES])
        masked = front[_RANDOM_BYTES:]
        context = self._stream(key, nonce).decryptor()
        context.authenticate_additional_data(bound + masked)
        return Opener(context, key_id, int(_U64.unpack(masked)[0]) ^ mask)

    def _require_known(self, key_id: int) -> None:
        if key_id not in self._keys:
            is_newer = key_id > self.newest
            known = f"key {key_id}, which is not known here: known are {sorted(self._keys)}"
            raise SealedBlockError(SealFault.NEWER_KEY if is_newer else SealFault.UNKNOWN_KEY, f"sealed with {known}")

    def _fresh(self, checksum: int) -> tuple[bytes, bytes, bytes]:
        """Key and nonce of a block that is about to be sealed, and what stands before its ciphertext."""
        random = os.urandom(_RANDOM_BYTES)
        key, nonce, mask = self._material(self.newest, random)
        return key, nonce, random + _U64.pack(checksum ^ mask)

    def _material(self, key_id: int, random: bytes) -> tuple[bytes, bytes, int]:
        """Key, nonce and mask of a block."""
        keyed = self._keys[key_id].copy()
        keyed.update(random)
        material = keyed.digest()
        return material[:32], material[32:44], int(_U64.unpack_from(material, 44)[0])

    @cached_property
    def _cipher(self) -> "type[AESGCM]":
        try:
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ImportError as error:
            raise ConfigError(
                "sealing keys need the package cryptography: in a checkout of kvtier, pip install '.[seal]'"
            ) from error
        if not hasattr(AESGCM, "encrypt_into"):
            raise ConfigError(
                "sealing keys need a newer cryptography: in a checkout of kvtier, pip install --upgrade '.[seal]'"
            )
        return AESGCM

    @cached_property
    def _stream(self) -> "Callable[[bytes, bytes], Cipher[GCM]]":
        """GCM piece by piece, of a key and a nonce."""
        from cryptography.hazmat.primitives.ciphers import Cipher
        from cryptography.hazmat.primitives.ciphers.algorithms import AES
        from cryptography.hazmat.primitives.ciphers.modes import GCM

        return lambda key, nonce: Cipher(AES(key), GCM(nonce))

    @cached_property
    def _invalid_tag(self) -> type[Exception]:
        from cryptography.exceptions import InvalidTag

        return InvalidTag


def _altered(key_id: int) -> SealedBlockError:
    return SealedBlockError(SealFault.ALTERED, f"not what key {key_id} has sealed for this place")


def room_for(nbytes: int) -> memoryview:
    """Memory for a payload of `nbytes` once it is sealed."""
    return np.empty(nbytes + SEAL_BYTES, np.uint8).data


def parse_keys(text: str) -> dict[int, bytes]:
    """Keys by their ids, from what a file or variable of keys has: `ID:KEY`, the key in 64 hex digits, any number of
    them, white space in between.

    Raises `ConfigError` with the number of the entry that is none; nothing of what a key may be is told.
    """
    keys: dict[int, bytes] = {}
    for place, entry in enumerate(text.split(), start=1):
        number, _, digits = entry.partition(":")
        try:
            key_id, key = int(number), bytes.fromhex(digits)
        except ValueError:
            key_id, key = 0, b""
        if not 1 <= key_id <= MAX_KEY_ID or len(key) != KEY_BYTES:
            raise ConfigError(f"entry {place} is no ID:KEY; an id from 1, and 64 hex digits of: openssl rand -hex 32")
        if key_id in keys:
            raise ConfigError(f"entry {place} has the id of another, {key_id}: give every new key the next number")
        keys[key_id] = key
    if not keys:
        raise ConfigError("no key in it; make one with: echo 1:$(openssl rand -hex 32)")
    return keys
