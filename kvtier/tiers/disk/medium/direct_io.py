"""Whether a disk tier goes past the page cache: as it was told, and as the file system can."""

import enum
import logging
import os

from kvtier.errors import ConfigError
from kvtier.tiers.disk.medium.files import OsFiles, supports_direct
from kvtier.tiers.disk.medium.folder import MARKER
from kvtier.tiers.disk.medium.health import NOT_ALLOWED_ERRNOS

_log = logging.getLogger(__name__)


class DirectIo(enum.Enum):
    """Whether payloads go past the page cache (O_DIRECT)."""

    AUTO = "auto"
    """Direct I/O is used if the file system has it."""
    ON = "on"
    OFF = "off"


def goes_direct(folder: str, wanted: DirectIo) -> bool:
    """What a tier in this folder, which it owns, is to do. Logs it.

    Raises `ConfigError` when it must be direct and cannot, `OSError` when the folder may not be written.
    """
    if wanted is DirectIo.OFF:
        return False
    can = _allowed(folder)
    if wanted is DirectIo.ON and not can:
        raise ConfigError(f"disk tier folder {folder}: its file system has no O_DIRECT; set direct_io to auto or off")
    _log.info("disk tier folder %s: %s the page cache (O_DIRECT)", folder, "past" if can else "cannot go past")
    return can


def _allowed(folder: str) -> bool:
    try:
        return supports_direct(folder)
    except OSError as error:
        if error.errno in NOT_ALLOWED_ERRNOS:
            raise
    try:  # a disk that takes nothing is read all the same
        os.close(OsFiles(direct=True).open(os.path.join(folder, MARKER)))
    except OSError:
        return False
    return True
