"""Ranks of an engine start at a time: one hashes the weights, the others wait for it, and nothing keeps them.

Later starts are told what it has found, unless the files or the note of it have changed.
"""

import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from safetensors.torch import save, save_file

from kvtier.errors import ConfigError
from kvtier.identity import weights_digest as module
from kvtier.identity.weights_digest import file_identities, tensors_outline, weights_digest

WAIT_S = 60.0
_hash = module._digest_tensors


@dataclass
class Hashing:
    """In the place of the pass over the files: says how often it was made, and lasts as long as the test likes."""

    has_begun: threading.Event = field(default_factory=threading.Event)
    may_end: threading.Event = field(default_factory=threading.Event)
    num_passes: int = 0

    def __call__(self, files: Sequence[Path]) -> bytes:
        self.num_passes += 1
        self.has_begun.set()
        assert self.may_end.wait(WAIT_S)
        return _hash(files)


@pytest.fixture
def hashing(monkeypatch: pytest.MonkeyPatch) -> Hashing:
    hashing = Hashing()
    monkeypatch.setattr(module, "_digest_tensors", hashing)
    return hashing


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.arange(10.0)}, path)
    return path


def test_one_hashes_and_the_others_wait(tmp_path: Path, file: Path, hashing: Hashing) -> None:
    """Locks are of open files, so that threads stand for processes here."""
    cache = tmp_path / "cache"
    with ThreadPoolExecutor(4) as executor:
        digests = [executor.submit(weights_digest, [file], cache) for _ in range(4)]
        assert hashing.has_begun.wait(WAIT_S)
        assert not any(digest.done() for digest in digests)
        hashing.may_end.set()
        assert {digest.result(WAIT_S) for digest in digests} == {_hash([file])}
    assert hashing.num_passes == 1
    assert len(list((cache / "digests").iterdir())) == 1, "no lock stays"


def test_who_waits_in_vain_hashes_too(
    tmp_path: Path, file: Path, hashing: Hashing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_WAIT_S", 0.1)
    cache = tmp_path / "cache"
    with ThreadPoolExecutor(1) as executor:
        stuck = executor.submit(weights_digest, [file], cache)
        try:
            assert hashing.has_begun.wait(WAIT_S)
            monkeypatch.setattr(module, "_digest_tensors", _hash)
            assert weights_digest([file], cache) == _hash([file])
            assert not stuck.done()
        finally:
            hashing.may_end.set()
        assert stuck.result(WAIT_S) == _hash([file])


def test_a_folder_that_cannot_be_written_costs_no_more_than_the_pass(tmp_path: Path, file: Path) -> None:
    (tmp_path / "cache").write_text("no folder")
    assert weights_digest([file], tmp_path / "cache") == _hash([file])


def test_files_that_cannot_be_hashed_keep_nobody(tmp_path: Path, file: Path) -> None:
    file.write_bytes(b"cut short")
    for _ in range(2):
        with pytest.raises(ConfigError):
            weights_digest([file], tmp_path / "cache")
    assert list((tmp_path / "cache" / "digests").iterdir()) == []


@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "another file"])
def test_weights_replaced_behind_the_same_size_and_time_are_others(tmp_path: Path, file: Path, in_place: bool) -> None:
    """As rsync -t, tar -x and images with a fixed date leave them."""
    cache = tmp_path / "cache"
    os.utime(file, (0, 0))
    first = weights_digest([file], cache)
    before = file.stat()
    time.sleep(0.05)  # the clock of file systems ticks every 1 to 10 ms
    if not in_place:
        file.rename(tmp_path / "old")
    file.write_bytes(save({"a": torch.ones(10)}))
    os.utime(file, (0, 0))
    after = file.stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert (after.st_ino == before.st_ino) == in_place
    assert weights_digest([file], cache) != first


@pytest.mark.parametrize("garbage", [b"z" * 64, b"", b"ab" * 31, b"\xff" * 64, b"0" * 65])
def test_a_garbled_digest_is_computed_again(tmp_path: Path, file: Path, garbage: bytes) -> None:
    cache = tmp_path / "cache"
    digest = weights_digest([file], cache)
    (memory,) = (cache / "digests").iterdir()
    memory.write_bytes(garbage)
    assert weights_digest([file], cache) == digest
    assert memory.read_text() == digest.hex() + "\n"


def test_an_outline_is_of_names_dtypes_and_shapes(tmp_path: Path) -> None:
    def outline(**tensors: torch.Tensor) -> bytes:
        save_file(tensors, tmp_path / "other.safetensors")
        return tensors_outline([tmp_path / "other.safetensors"])

    outlines = [
        outline(a=torch.zeros(4)),
        outline(b=torch.zeros(4)),
        outline(a=torch.zeros(2, 2)),
        outline(a=torch.zeros(4, dtype=torch.float16)),
        outline(a=torch.zeros(4), b=torch.zeros(4)),
    ]
    assert len(set(outlines)) == len(outlines)
    assert outline(a=torch.ones(4)) == outlines[0]


def test_a_file_that_is_written_again_is_another_one(file: Path) -> None:
    before, stat = file_identities([file]), file.stat()
    file.write_bytes(file.read_bytes())
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert file_identities([file]) != before
