"""Which weights a model has: a digest of what is in its safetensors files, whatever they are called.

The format: u64 little endian length of a JSON header, the header, the tensors' bytes. The header gives dtype, shape and
place of each tensor by name. https://github.com/huggingface/safetensors#format
"""

import contextlib
import fcntl
import hashlib
import json
import logging
import mmap
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kvtier.errors import ConfigError
from kvtier.system.atomic_files import write_text_atomically

_log = logging.getLogger(__name__)
_LABEL = b"kvtier.weights.v2"
_MAX_HEADER_BYTES = 100 << 20
"""The largest header that the format allows."""
_WAIT_S, _WAIT_S_PER_GIB = 10.0, 5.0
"""Seconds to wait for another process to hash the same files: several times what it takes. After that, this process
does it, too."""
_POLL_S = 0.05


def weights_digest(files: Sequence[Path], cache_dir: Path) -> bytes:
    """SHA-256 over the tensors' names, dtypes, shapes and bytes in order of names, whatever files hold them.

    Costs one pass over the files, a second per GiB or so; remembered in `cache_dir` under their paths, inodes, sizes
    and times of change. Where several processes ask at a time, e.g. an engine's ranks, one makes that pass and the
    others wait for it. `ConfigError`: a file is no safetensors file, or is cut short.
    """
    known_as = hashlib.sha256(json.dumps(file_identities(files)).encode()).hexdigest()
    memory = cache_dir / "digests" / known_as
    digest = _remembered_digest(memory)
    if digest is not None:
        return digest
    with _alone(memory.with_suffix(".lock"), sum(path.stat().st_size for path in files)):
        digest = _remembered_digest(memory)
        if digest is None:
            digest = _digest_tensors(files)
            try:
                write_text_atomically(memory, digest.hex() + "\n")
            except OSError as error:
                _log.warning("the digest of %s is not remembered, and made again next time: %s", files[0].parent, error)
    return digest


def file_identities(files: Sequence[Path]) -> list[tuple[str | int, ...]]:
    """What changes whenever a file's content does: path, inode, size and times of change. Costs a `stat` per file."""
    return [_identity(path) for path in sorted(files)]


def tensors_outline(files: Sequence[Path]) -> bytes:
    """SHA-256 over the tensors' names, dtypes and shapes, whatever they hold. Reads the files' headers alone.

    `ConfigError`: a file is no safetensors file, or is cut short.
    """
    tensors = sorted((name, entry["dtype"], entry["shape"]) for path in files for name, entry, _ in _tensors_of(path))
    return hashlib.sha256(json.dumps(tensors).encode()).digest()


@contextlib.contextmanager
def _alone(lock: Path, nbytes: int) -> Iterator[None]:
    """Waits while another process is in here for the same file, for a time; then, or where files cannot be locked, goes
    on beside it. The lock ends with its process.

    :param nbytes: to be hashed in here.
    """
    patience_s = _WAIT_S + _WAIT_S_PER_GIB * nbytes / 2**30
    with contextlib.ExitStack() as stack:
        try:
            lock.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            stack.callback(os.close, descriptor)
            if _lock(descriptor, patience_s):
                stack.callback(_remove, lock)  # a process that comes now finds the digest
            else:
                _log.warning("%s: another process hashes the weights for longer than %.0f s", lock, patience_s)
        except OSError as error:
            _log.debug("%s: %s", lock, error)
        yield


def _remove(lock: Path) -> None:
    with contextlib.suppress(OSError):
        lock.unlink()


def _lock(descriptor: int, patience_s: float) -> bool:
    """False: another process has had it for all that time."""
    give_up_at = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= give_up_at:
                return False
        time.sleep(_POLL_S)


def _identity(path: Path) -> tuple[str | int, ...]:
    """Other content has another. Copying tools set size and time of modification alike, but nobody sets a ctime."""
    stat = path.stat()
    times = (stat.st_mtime_ns, stat.st_ctime_ns)
    return (_LABEL.decode(), str(path.resolve()), stat.st_dev, stat.st_ino, stat.st_size, *times)


def _remembered_digest(memory: Path) -> bytes | None:
    """None also when the file is garbled."""
    try:
        digest = bytes.fromhex(memory.read_text("ascii"))
    except (OSError, ValueError):
        return None
    return digest if len(digest) == hashlib.sha256().digest_size else None


def _digest_tensors(files: Sequence[Path]) -> bytes:
    state = hashlib.sha256(_LABEL)
    tensors = [tensor for path in files for tensor in _tensors_of(path)]
    for name, entry, content in sorted(tensors, key=lambda tensor: tensor[0]):
        state.update(json.dumps([name, entry["dtype"], entry["shape"], len(content)]).encode())
        state.update(content)
    return state.digest()


def _tensors_of(path: Path) -> list[tuple[str, dict[str, Any], memoryview]]:
    """Name, header entry and bytes of each tensor; the file stays mapped as long as one of them lives."""
    try:
        with path.open("rb") as file:
            content = memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
        header_bytes = int.from_bytes(content[:8], "little")
        if not 2 <= header_bytes <= min(_MAX_HEADER_BYTES, len(content) - 8):
            raise ValueError(f"a header of {header_bytes} bytes")
        header: dict[str, dict[str, Any]] = json.loads(bytes(content[8 : 8 + header_bytes]))
        header.pop("__metadata__", None)
        body = content[8 + header_bytes :]
        tensors = []
        for name, entry in header.items():
            start, stop = entry["data_offsets"]
            if not 0 <= start <= stop <= len(body):
                raise ValueError(f"tensor {name!r} at {start} to {stop} of {len(body)} bytes")
            tensors.append((name, {"dtype": entry["dtype"], "shape": entry["shape"]}, body[start:stop]))
        return tensors
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path}: not a whole safetensors file: {error}; download it again") from error
