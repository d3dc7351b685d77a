"""What one tier writes, packed by its codec, and counted by what that saves."""

from kvtier.codec.stored_form import Codec, encode
from kvtier.identity.keys import StoreKey
from kvtier.memory.buffers import ReadableBuffer
from kvtier.metrics import Metrics


class BlockPacker:
    """Packs blocks for a medium. Any thread; does no I/O."""

    def __init__(self, codec: Codec, *, tier: str, metrics: Metrics) -> None:
        """
        :param codec: what blocks are packed with, where it gains.
        :param tier: by whose name `Metrics.codec_bytes` counts.
        """
        self._codec = codec
        self._bytes = {
            form: (
                metrics.codec_bytes.labels(tier, form.label, "raw"),
                metrics.codec_bytes.labels(tier, form.label, "stored"),
            )
            for form in {Codec.RAW, codec}
        }

    def encode(self, key: StoreKey, payload: ReadableBuffer, checksum: int) -> tuple[bytes, ReadableBuffer]:
        """`kvtier.codec.stored_form.encode` with this tier's codec."""
        header, stored = encode(key, payload, checksum, self._codec)
        raw_bytes, stored_bytes = self._bytes[Codec.RAW if stored is payload else self._codec]
        raw_bytes.inc(len(payload))
        stored_bytes.inc(len(stored))
        return header, stored
