"""What one tier writes and reads: packed by its codec, sealed for tenants with keys, and counted."""

import logging

from prometheus_client import Counter

from kvtier.codec.sealed_form import NO_SEALS, StorageSeals, open_into, seal
from kvtier.codec.sealing import SEAL_BYTES
from kvtier.codec.stored_form import Codec, Header, encode, parse_stored_header, unpack, verify
from kvtier.errors import SealedBlockError, SealFault
from kvtier.identity.keys import StoreKey
from kvtier.memory.buffers import ReadableBuffer
from kvtier.metrics import Metrics
from kvtier.system.quiet_log import QuietLog

_log = logging.getLogger(__name__)


def counted_forms(codec: Codec, tier: str, metrics: Metrics) -> dict[Codec, tuple[Counter, Counter]]:
    """Payload bytes of a tier before and behind the codec, by the form that blocks get: packed, or as they are."""
    return {
        form: (
            metrics.codec_bytes.labels(tier, form.label, "raw"),
            metrics.codec_bytes.labels(tier, form.label, "stored"),
        )
        for form in {Codec.RAW, codec}
    }


class BlockPacker:
    """Blocks in the form that they have on a medium. Any thread; does no I/O."""

    def __init__(self, codec: Codec, *, tier: str, metrics: Metrics, seals: StorageSeals = NO_SEALS) -> None:
        """
        :param codec: what blocks are packed with, where it gains. Blocks of any codec are read.
        :param tier: the name by which `Metrics.codec_bytes` and `unopened_blocks` count.
        :param seals: the tenants whose blocks are sealed.
        """
        self._codec = codec
        self._seals = seals
        self._tier = tier
        self._unopened = metrics.unopened_blocks
        self._logs = {fault: QuietLog(_log) for fault in SealFault}
        self._bytes = counted_forms(codec, tier, metrics)

    def encode(self, key: StoreKey, payload: ReadableBuffer, checksum: int) -> tuple[bytes, ReadableBuffer]:
        """Header and payload as stored: `kvtier.codec.stored_form.encode` with this tier's codec, or
        `kvtier.codec.sealed_form.seal` where the key's tenant has keys."""
        sealed = self._seals.of(key)
        stored: ReadableBuffer
        if sealed is None:
            header, stored = encode(key, payload, checksum, self._codec)
            form = Codec.RAW if stored is payload else self._codec
        else:
            header, stored = seal(key, payload, checksum, self._codec, sealed.keys)
            form = parse_stored_header(header).codec
        raw_bytes, stored_bytes = self._bytes[form]
        raw_bytes.inc(len(payload))
        stored_bytes.inc(len(stored))
        return header, stored

    def most_stored_bytes(self, key: StoreKey, nbytes: int) -> int:
        """The most bytes that a payload of `nbytes` may have as stored."""
        return nbytes + (SEAL_BYTES if self._seals.of(key) is not None else 0)

    def decode_into(self, header: Header, key: StoreKey, stored: ReadableBuffer, into: memoryview) -> None:
        """Fills `into` with the block of `key`, or raises `CorruptBlockError`; then `into` holds anything.

        A block that cannot be opened, or that is not sealed where only sealed ones are taken, is counted and logged
        here besides, and its error is a `SealedBlockError`.

        :param into: as many bytes as the block has unpacked. It may be `stored` itself for a raw block that is not
            sealed.
        """
        try:
            self._decode_into(header, key, stored, into)
        except SealedBlockError as error:
            self._unopened.labels(self._tier, error.fault.value).inc()
            self._logs[error.fault].warning(f"tier {self._tier}: a block cannot be opened, and is missed: {error}")
            raise

    def _decode_into(self, header: Header, key: StoreKey, stored: ReadableBuffer, into: memoryview) -> None:
        sealed = self._seals.of(key)
        if header.key_id and sealed is not None:
            open_into(header, key, stored, into, sealed.keys)
            return
        if sealed is not None and not sealed.reads_plain:
            raise SealedBlockError(SealFault.PLAIN, "not sealed, and storage_reads_plain of its tenant is false")
        verify(header, key, stored)
        if header.key_id:
            raise SealedBlockError(SealFault.UNKNOWN_KEY, f"sealed with key {header.key_id}, and its tenant has none")
        if stored is not into:
            unpack(header, stored, into)
