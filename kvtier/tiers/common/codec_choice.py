"""Which codec a tier writes with: a fixed one, or whichever costs least here, as measured.

What a block costs is the time that its stored bytes take on the medium and the time that its codec takes:

    writing: stored bytes / write rate + encoding        reading: stored bytes / read rate + decoding

each per byte before the codec, and weighted by how much of the tier's traffic is writing and how much reading. All of
it is measured on the tier's own blocks: the medium whenever it is used; the codecs on the first blocks written, each
packed and unpacked by all of them, and on a few blocks again every minute. So a medium as fast as memory keeps `raw`,
a slow drive or network gets what saves it most, and another place or load gets another answer.

Times are those of one thread, medium and codec alike: threads that share a medium see less of it each, and rightly so.
"""

import logging
import threading
import time
from dataclasses import dataclass, field

from kvtier.clock import MONOTONIC, Clock
from kvtier.codec.stored_form import Codec, encode, parse_stored_header, unpack, verify
from kvtier.identity.keys import StoreKey
from kvtier.memory.buffers import ReadableBuffer
from kvtier.metrics import Metrics

AUTO = "auto"
"""What configurations call the choice by measurement."""

_FIRST_BLOCKS = 8
"""Tried with every codec before the first choice. Each costs about 5 ms per MiB."""
_LATER_BLOCKS = 4
"""Likewise, every `_EVERY_S`."""
_EVERY_S = 60.0
_LEAST_BYTES = 64 << 10
"""Stored bytes of a transfer that says something of the medium's rate: less is mostly latency, which no codec saves."""
_ENOUGH_BYTES = 4 << 20
"""Before which the medium's rate is not known."""
_FADE = 0.99
"""What is left of earlier transfers' weight with each new one; of earlier samples, likewise."""
_GAIN = 0.9
"""Another codec must cost less than this share of what the present one does: near a tie, nobody gains by changes."""

_log = logging.getLogger(__name__)


def parse_codec(label: str) -> Codec | None:
    """From a configuration: a codec's label, or None for `auto`. Raises `InvalidInputError`."""
    return None if label == AUTO else Codec.parse(label)


@dataclass(slots=True)
class _Rate:
    """Bytes over time, recent ones counting for more."""

    nbytes: float = 0.0
    seconds: float = 0.0
    measured_bytes: float = 0.0
    """Without fading."""

    def note(self, nbytes: float, seconds: float) -> None:
        self.nbytes = self.nbytes * _FADE + nbytes
        self.seconds = self.seconds * _FADE + seconds
        self.measured_bytes += nbytes

    @property
    def seconds_per_byte(self) -> float | None:
        """None: not known."""
        return self.seconds / self.nbytes if self.measured_bytes >= _ENOUGH_BYTES else None


@dataclass(slots=True)
class _Sampled:
    """What a codec made of the blocks it was tried on. Sums, recent blocks counting for more."""

    raw_bytes: float = 0.0
    stored_bytes: float = 0.0
    encode_s: float = 0.0
    decode_s: float = 0.0

    def note(self, raw_bytes: int, stored_bytes: int, encode_s: float, decode_s: float) -> None:
        self.raw_bytes = self.raw_bytes * _FADE + raw_bytes
        self.stored_bytes = self.stored_bytes * _FADE + stored_bytes
        self.encode_s = self.encode_s * _FADE + encode_s
        self.decode_s = self.decode_s * _FADE + decode_s


@dataclass(slots=True)
class _Measured:
    """Guarded by the choice's lock."""

    write: _Rate = field(default_factory=_Rate)
    read: _Rate = field(default_factory=_Rate)
    written_bytes: float = 0.0
    """As stored; what was written and read lately, both fading with every transfer of either kind."""
    read_bytes: float = 0.0
    codecs: dict[Codec, _Sampled] = field(default_factory=lambda: {codec: _Sampled() for codec in Codec})

    def note_traffic(self, *, written_bytes: int = 0, read_bytes: int = 0) -> None:
        self.written_bytes = self.written_bytes * _FADE + written_bytes
        self.read_bytes = self.read_bytes * _FADE + read_bytes

    def cost_s(self, codec: Codec) -> float | None:
        """Seconds per byte before the codec, of the tier's mixture of writing and reading; None: not known."""
        sampled, write, read = self.codecs[codec], self.write.seconds_per_byte, self.read.seconds_per_byte
        if write is None or not sampled.raw_bytes:
            return None
        share = sampled.stored_bytes / sampled.raw_bytes
        writing = share * write + sampled.encode_s / sampled.raw_bytes
        if read is None:  # nobody has read enough to tell
            return writing
        reading = share * read + sampled.decode_s / sampled.raw_bytes
        return (writing * self.written_bytes + reading * self.read_bytes) / (self.written_bytes + self.read_bytes)


class CodecChoice:
    """Packs what one tier writes. Any thread; does no I/O."""

    def __init__(
        self,
        codec: Codec | None,
        *,
        tier: str,
        metrics: Metrics,
        clock: Clock = MONOTONIC,
        processor_clock: Clock = time.thread_time,
    ) -> None:
        """
        :param codec: the one to use; None: by measurement, and `RAW` until there is one.
        :param processor_clock: by which codecs are measured: on a busy machine a few blocks that had to wait for the
            processor in the middle would make any codec look slow.
        """
        self._tier = tier
        self._clock, self._processor_clock = clock, processor_clock
        self._fixed = codec is not None
        self._bytes = {
            codec: (
                metrics.codec_bytes.labels(tier, codec.label, "raw"),
                metrics.codec_bytes.labels(tier, codec.label, "stored"),
            )
            for codec in Codec
        }
        self._choices = metrics.codec_choices
        self._lock = threading.Lock()
        self._codec = codec if codec is not None else Codec.RAW
        """Written under _lock, like all below; read by anybody."""
        self._measured = _Measured()
        self._to_sample = 0 if self._fixed else _FIRST_BLOCKS
        """Blocks that are still to be tried with every codec before the next choice."""
        self._num_sampling = 0
        """Of the blocks taken from `_to_sample`, those whose figures have not come."""
        self._chosen_at: float | None = None

    @property
    def codec(self) -> Codec:
        """What blocks are packed with at this moment, where it gains."""
        return self._codec

    def encode(self, key: StoreKey, payload: ReadableBuffer) -> tuple[bytes, ReadableBuffer]:
        """`kvtier.codec.stored_form.encode` with this tier's codec. Some blocks are tried with all codecs meanwhile."""
        if self._is_sample():
            try:
                self._sample(key, payload)
            finally:
                with self._lock:
                    self._num_sampling -= 1
        codec = self._codec  # another thread may change it
        header, stored = encode(key, payload, codec)
        raw_bytes, stored_bytes = self._bytes[Codec.RAW if stored is payload else codec]
        raw_bytes.inc(len(payload))
        stored_bytes.inc(len(stored))
        return header, stored

    def wrote(self, stored_bytes: int, seconds: float) -> None:
        """The medium took so many bytes in that time, codec not included."""
        if not self._fixed and stored_bytes >= _LEAST_BYTES:
            with self._lock:
                self._measured.write.note(stored_bytes, seconds)
                self._measured.note_traffic(written_bytes=stored_bytes)
                self._choose()

    def read(self, stored_bytes: int, seconds: float) -> None:
        """The medium gave so many bytes in that time, codec not included."""
        if not self._fixed and stored_bytes >= _LEAST_BYTES:
            with self._lock:
                self._measured.read.note(stored_bytes, seconds)
                self._measured.note_traffic(read_bytes=stored_bytes)

    def _is_sample(self) -> bool:
        """Whether to try this block with all codecs."""
        if self._fixed:
            return False
        with self._lock:
            if self._chosen_at is not None and self._clock() - self._chosen_at >= _EVERY_S:
                self._to_sample, self._chosen_at = _LATER_BLOCKS, None
            if not self._to_sample:
                return False
            self._to_sample -= 1
            self._num_sampling += 1
            return True

    def _sample(self, key: StoreKey, payload: ReadableBuffer) -> None:
        payload = bytes(payload)  # whoever else can write to it meanwhile
        into = memoryview(bytearray(payload))  # touched: fresh memory would cost more than some codecs
        for codec in Codec:
            if not self._measured.codecs[codec].raw_bytes:
                encode(key, payload, codec)  # the first use of a codec imports its library
            times = [self._processor_clock()]
            head, stored = encode(key, payload, codec)
            times.append(self._processor_clock())
            header = parse_stored_header(head)
            verify(header, key, stored)
            if header.codec is not Codec.RAW:  # raw blocks are read to where they belong
                unpack(header, stored, into)
            times.append(self._processor_clock())
            with self._lock:
                self._measured.codecs[codec].note(len(payload), len(stored), times[1] - times[0], times[2] - times[1])

    def _choose(self) -> None:
        """When all is measured that is to be, once. Caller holds _lock."""
        if self._to_sample or self._num_sampling or self._chosen_at is not None:
            return
        costs = {codec: cost for codec in Codec if (cost := self._measured.cost_s(codec)) is not None}
        if not costs:
            return
        self._chosen_at = self._clock()
        best = min(costs, key=costs.__getitem__)
        if costs[best] < _GAIN * costs[self._codec]:
            self._codec = best
            figures = ", ".join(f"{codec.label} {cost * 1e9:.2f}" for codec, cost in costs.items())
            _log.info("tier %s: codec %s from now on; seconds per GB: %s", self._tier, best.label, figures)
        self._choices.labels(self._tier, self._codec.label).inc()
