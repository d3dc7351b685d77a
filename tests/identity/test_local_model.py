"""A model is found where an engine reads it: in a folder, or by its name in the Hugging Face cache."""

from pathlib import Path

import pytest

import hugging_face_cache
from kvtier.errors import ConfigError
from kvtier.identity.local_model import local_model_folder

pytest.importorskip("huggingface_hub")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def test_a_folder_is_itself(model: Path) -> None:
    assert local_model_folder(str(model), revision="main", cache_dir=None) == model


def test_a_name_is_what_the_cache_has_of_its_revision(model: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    commits = {branch: hugging_face_cache.add(cache, "tiny/llama", model, branch=branch) for branch in ("main", "next")}
    for revision, folder in [
        (None, commits["main"]),
        ("next", commits["next"]),
        (commits["main"].name, commits["main"]),
    ]:
        assert local_model_folder("tiny/llama", revision=revision, cache_dir=str(cache)) == folder


@pytest.mark.parametrize("name", ["tiny/other", "no name at all", "/not/a/folder"])
def test_what_is_nowhere_is_refused_by_its_name(name: str, model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"^{name} at revision v1 is neither a folder here nor in the Hugging Face"):
        local_model_folder(name, revision="v1", cache_dir=str(tmp_path))
