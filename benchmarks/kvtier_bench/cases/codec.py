"""`kvtier bench codec`: what packing bf16 KV saves and costs, and below which link speed it pays."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from kvtier.cli.options import Json, Plot
from kvtier.codec.checksums import checksum
from kvtier.codec.stored_form import Codec, decode_into, encode, parse_stored_header
from kvtier.errors import CorruptBlockError, KvtierError
from kvtier.identity.keys import STORE_KEY_BYTES, StoreKey
from kvtier.memory.malloc import keep_freed_memory
from kvtier.memory.pages import copy_bytes, map_memory
from kvtier.tiers.disk.log.buffers import Buffers
from kvtier.tiers.disk.log.format import PAGE, Entries, Kind, NewerFormatError
from kvtier.tiers.disk.log.scan import Found, SegmentReader
from kvtier.tiers.disk.medium.files import OsFiles
from kvtier.tiers.disk.medium.folder import list_folder, segment_name
from kvtier_bench.measuring.options import Rounds
from kvtier_bench.measuring.report import Case, report
from kvtier_bench.measuring.rounds import NUM_ROUNDS, Spread, Subject, in_turn, timed

NUM_BLOCKS = 64
_KEY = StoreKey(bytes(STORE_KEY_BYTES))
_HEAD_DIM = 64


def bench_codec(
    json: Json = False,
    plot: Plot = None,
    rounds: Rounds = NUM_ROUNDS,
    payload_bytes: Annotated[int, typer.Option(min=4096, help="Bytes per block of the stand-in.")] = 1 << 20,
    disk: Annotated[
        Path | None,
        typer.Option(exists=True, file_okay=False, help="Folder of a disk tier: take blocks from there, real KV."),
    ] = None,
) -> None:
    """Encode and decode 64 blocks in one thread, raw and packed, checksums included, beside a memcpy of the same bytes.

    Without --disk the blocks are a stand-in: bf16 values that differ by channel, which pack about as well as the
    KV of a small model does.
    """
    keep_freed_memory()
    blocks = _Blocks(_from_disk(disk) if disk is not None else [_stand_in(i, payload_bytes) for i in range(NUM_BLOCKS)])
    cases: dict[str, Callable[[], None]] = {"memcpy": blocks.copy}
    for codec in Codec:
        name = codec.label
        cases[f"{name} in"] = lambda codec=codec: blocks.encode(codec)  # type: ignore[misc]
        cases[f"{name} out"] = lambda codec=codec: blocks.decode(codec)  # type: ignore[misc]
    samples = in_turn({name: Subject(timed(run)) for name, run in cases.items()}, rounds=rounds, label="codec")
    rows = []
    for name in list(cases)[1:]:
        codec_name, way = name.split()
        rows.append(
            Case.of(
                name,
                {"in": "encode", "out": "decode"}[way],
                samples[name],
                floor=("memcpy", samples["memcpy"]),
                round_bytes=blocks.nbytes,
                payload_bytes=blocks.nbytes // len(blocks),
                batch=len(blocks),
                unit="batch",
                detail=codec_name,
            )
        )
    seconds = {name: of.rounds_s for name, of in samples.items()}
    report("Codecs", rows, as_json=json, plot=plot, notes=_notes(blocks, seconds))


def _notes(blocks: "_Blocks", seconds: dict[str, list[float]]) -> list[str]:
    """Ratio, and the link speed at which the bytes saved take as long as packing or unpacking does."""
    notes = []
    for codec in Codec:
        name, packed_nbytes = codec.label, blocks.packed_nbytes(codec)
        saved = blocks.nbytes - packed_nbytes
        if codec is Codec.RAW or not saved:
            continue
        speeds = []
        for way in ("in", "out"):
            costs = [packed - raw for packed, raw in zip(seconds[f"{name} {way}"], seconds[f"raw {way}"], strict=True)]
            speeds.append(saved / max(Spread.of(costs).median_s, 1e-9) / 1e9)
        both = 1 / sum(1 / speed for speed in speeds)
        notes.append(
            f"{name} packs {blocks.nbytes / packed_nbytes:.3f} to 1: {saved / blocks.nbytes:.1%} saved. "
            f"Break-even with one thread and nothing overlapped: a link of {speeds[0]:.2f} GB/s for writes, "
            f"{speeds[1]:.2f} GB/s for reads, {both:.2f} GB/s for a block written and read once. Slower links gain."
        )
    return notes


class _Blocks:
    """Blocks, packed and raw, and memory of their own to decode each into."""

    def __init__(self, payloads: list[bytes]) -> None:
        self.nbytes = sum(map(len, payloads))
        self._sources = [_touched(payload) for payload in payloads]
        self._into = [map_memory(len(payload), prefault=True) for payload in payloads]
        self._checksums = [checksum(_KEY, source) for source in self._sources]
        self._encoded = {codec: self._encode(codec) for codec in Codec}

    def packed_nbytes(self, codec: Codec) -> int:
        return sum(len(stored) for _, stored in self._encoded[codec])

    def __len__(self) -> int:
        return len(self._sources)

    def copy(self) -> None:
        """The floor: what moving these bytes costs at the least."""
        for into, source in zip(self._into, self._sources, strict=True):
            copy_bytes(into, source)

    def encode(self, codec: Codec) -> None:
        self._encode(codec)

    def _encode(self, codec: Codec) -> list[tuple[bytes, bytes | bytearray | memoryview]]:
        return [encode(_KEY, *each, codec) for each in zip(self._sources, self._checksums, strict=True)]

    def decode(self, codec: Codec) -> None:
        for (header, stored), into in zip(self._encoded[codec], self._into, strict=True):
            decode_into(header, _KEY, stored, into)


def _touched(payload: bytes) -> memoryview:
    memory = map_memory(len(payload), prefault=True)
    copy_bytes(memory, payload)
    return memory


def _stand_in(seed: int, nbytes: int) -> bytes:
    """bf16: half of it keys, whose channels have a mean, half values, whose channels differ in size only."""
    channels = np.random.default_rng(0)
    mean = np.where(np.arange(2 * _HEAD_DIM) < _HEAD_DIM, channels.normal(0, 1, 2 * _HEAD_DIM), 0)
    size = channels.lognormal(-1, 0.6, 2 * _HEAD_DIM)
    shape = (-(-nbytes // (4 * _HEAD_DIM)), 2 * _HEAD_DIM)
    noise = np.random.default_rng(seed + 1).standard_normal(shape, dtype=np.float32)
    floats = mean.astype(np.float32) + size.astype(np.float32) * noise
    keys, values = np.split((floats.view(np.uint32) >> 16).astype("<u2"), 2, axis=1)
    return (keys.tobytes() + values.tobytes())[:nbytes]


def _from_disk(folder: Path) -> list[bytes]:
    """The first blocks of a disk tier. Its process need not stop; what it removes meanwhile is skipped."""
    reader = SegmentReader(OsFiles(direct=False), Buffers(2))
    payloads: list[bytes] = []
    for number in list_folder(str(folder)).numbers:
        path = folder / segment_name(number)
        with suppress(OSError, NewerFormatError):
            found = reader.inspect(str(path), number, writable=False)
            if isinstance(found, Found):
                payloads += islice(_payloads_in(path, found.entries), NUM_BLOCKS - len(payloads))
        if len(payloads) == NUM_BLOCKS:
            break
    if not payloads:
        raise KvtierError(f"no blocks in {folder}: name the folder of a disk tier that has some")
    return payloads


def _payloads_in(path: Path, entries: Entries) -> Iterator[bytes]:
    """Yields the payloads of the segment's records that are whole."""
    with path.open("rb") as file:
        for entry in entries[entries["kind"] == Kind.RECORD]:
            head = entry["header"].tobytes()
            header = parse_stored_header(head)
            file.seek(int(entry["page"]) * PAGE)
            into = bytearray(header.raw_length)
            with suppress(CorruptBlockError):
                decode_into(head, header.key, file.read(header.stored_length), memoryview(into))
                yield bytes(into)
