"""Ranks of an engine start at a time: one hashes the weights, the others wait for it, and nothing keeps them."""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kvtier import weights_digest as module
from kvtier.errors import ConfigError
from kvtier.weights_digest import weights_digest

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
