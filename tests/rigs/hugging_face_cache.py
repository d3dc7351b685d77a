"""A Hugging Face cache with models in it that nobody has downloaded."""

import hashlib
import shutil
from pathlib import Path


def add(cache: Path, name: str, model: Path, *, branch: str = "main") -> Path:
    """Puts the files of a model's folder under a name such as `tiny/llama`, as a commit of its own that the branch now
    points to. Returns the folder of that commit."""
    there = cache / f"models--{name.replace('/', '--')}"
    commit = hashlib.sha1(f"{branch} {sorted(model.iterdir())}".encode(), usedforsecurity=False).hexdigest()
    snapshot = there / "snapshots" / commit
    shutil.copytree(model, snapshot)
    (there / "refs").mkdir(exist_ok=True)
    (there / "refs" / branch).write_text(commit)
    return snapshot
