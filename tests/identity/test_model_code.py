"""A model's code is told by its content and its place in the folder, wherever that lies."""

import shutil
from pathlib import Path

import pytest

from kvtier.errors import ConfigError
from kvtier.identity.model_code import code_digests


def test_every_file_of_code_counts_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    (folder / "layers").mkdir(parents=True)
    (folder / "modeling.py").write_text("a = 1")
    (folder / "layers" / "attention.py").write_text("b = 1")
    (folder / "config.json").write_text("{}")
    known = code_digests(folder)
    assert list(known) == ["layers/attention.py", "modeling.py"]
    shutil.copytree(folder, tmp_path / "copy")
    assert code_digests(tmp_path / "copy") == known
    (tmp_path / "copy" / "layers" / "attention.py").write_text("b = 2")
    assert code_digests(tmp_path / "copy") != known
    (folder / "layers" / "attention.py").rename(folder / "attention.py")
    assert code_digests(folder) != known


def test_code_that_cannot_be_read_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "gone.py").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"gone\.py"):
        code_digests(tmp_path)
