"""Which code a model brings with it: engines that trust it compute KV by these files beside the weights."""

import hashlib
from pathlib import Path

from kvtier.errors import ConfigError


def code_digests(folder: Path) -> dict[str, str]:
    """Returns the SHA-256 of each Python file in a model's folder and below, by its path within the folder.

    For engines that run such code (`trust_remote_code`). Code that the model's configuration takes from another
    repository is not in its folder, and not here. Reads the files.

    :raises ConfigError: a file cannot be read.
    """
    try:
        return {
            file.relative_to(folder).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest()
            for file in sorted(folder.rglob("*.py"))
        }
    except OSError as error:
        raise ConfigError(f"{folder}: the model's code decides its KV, and cannot be read: {error}") from error
