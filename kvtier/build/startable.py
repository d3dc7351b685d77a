"""Refuses what an engine's configuration cannot start with, before the engine loads a model: which may take minutes."""

from kvtier.build.tiers import has_io_process
from kvtier.config import Config
from kvtier.config.engine_attempts import engine_attempts
from kvtier.policies.admission_text import parse_admission
from kvtier.tiers.disk.medium.folder import require_usable_folder


def require_startable(config: Config, device_type: str) -> None:
    """Raises the first `ConfigError` that starting an engine with this configuration would raise later.

    Reads the files of secrets and certificates, and looks at the disk folder without taking or making it. What depends
    on the model stays for later: whether host memory has room for enough blocks. So does whether somebody else uses the
    folder by then.

    :param device_type: of the engine's KV, `cuda` or `cpu`.
    """
    for attempt in engine_attempts(config, device_type):
        attempt()
    has_io_process(config)
    disk = config.disk
    if disk.directory is not None:
        require_usable_folder(config.references.path(disk.directory))
        if disk.admission is not None:
            parse_admission(disk.admission, int(disk.capacity_bytes))
