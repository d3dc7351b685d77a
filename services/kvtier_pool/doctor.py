"""What `kvtier doctor` looks at for a pool: its disk, its Redis, its certificates, and whether it serves."""

import importlib
import os
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from kvtier.cli.doctor.certificates import certificate_lines
from kvtier.cli.doctor.disk import FolderSettings, folder_lines
from kvtier.cli.doctor.lines import Level, Line, Look
from kvtier.config import Config
from kvtier.config.tls_files import pool_service_tls
from kvtier.net.tls import ServerTls
from kvtier_pool.checks import is_of_a_pool
from kvtier_pool.redis_lines import redis_lines
from kvtier_pool.serving_look import runs_with, serving_lines


def pool_looks(config: Config, file: Path | None) -> Iterable[Look]:
    """Looks for a file of a pool. See `kvtier.cli.doctor.lines.Looks`."""
    table = config.pool_service
    if not is_of_a_pool(config):
        return
    if table.disk_dir is not None:
        folder = config.references.path(table.disk_dir)
        settings = FolderSettings(
            "pool_service.disk_dir",
            folder,
            "pool_service.disk_bytes",
            int(table.disk_bytes),
            int(table.disk_reserve_bytes),
            table.disk_direct_io,
        )
        yield Look(settings.key, partial(_folder, settings, file))
    if table.redis_url:
        # Looks run side by side, and threads that import modules which import each other can stop each other.
        importlib.import_module("kvtier.tiers.redis.look")
        yield Look("pool_service.redis_url", partial(redis_lines, config))
    yield Look("pool_service.tls_certificate", lambda: _certificates(config))
    yield Look("pool_service.listen", lambda: serving_lines(config, file))


def _folder(settings: FolderSettings, file: Path | None) -> Iterable[Line]:
    if not os.path.lexists(settings.folder) and os.access(settings.folder.parent, os.X_OK) and runs_with(file):
        return [
            Line(
                Level.PROBLEM,
                settings.key,
                f"{settings.folder} was removed under the pool that runs with this file",
                "no more blocks get to disk, and a restart finds none",
                "restart the pool, which makes the folder anew",
            )
        ]
    return folder_lines(settings, file)


def _certificates(config: Config) -> Iterable[Line]:
    files = pool_service_tls(config)
    if files is None:
        return
    ServerTls(files).check()
    named = (("pool_service.tls_certificate", files.certificate), ("pool_service.tls_client_ca", files.ca))
    for key, path in named:
        if path is not None:
            yield from certificate_lines(key, path)
