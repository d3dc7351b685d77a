"""What `kvtier doctor` looks at for a pool: its disk, its Redis, its certificates, and whether it serves."""

import dataclasses
import os
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from kvtier.cli.doctor.certificates import certificate_lines
from kvtier.cli.doctor.clocks import clock_line
from kvtier.cli.doctor.disk import FolderSettings, folder_lines
from kvtier.cli.doctor.lines import Level, Line, Look
from kvtier.codec.sealed_form import NO_SEALS
from kvtier.config import Config
from kvtier.config.findings import size_words
from kvtier.config.tls_files import pool_service_tls
from kvtier.errors import ConfigError, KvtierError, UnauthenticatedError
from kvtier.net.tls import ServerTls
from kvtier_pool.checks import is_of_a_pool
from kvtier_pool.open_tiers import redis_settings
from kvtier_pool.serving_look import runs_with, serving_lines
from kvtier_pool.startable import require_redis_address

_OLDEST_REDIS = (6, 2)
_REDIS_S = 5.0
_WITHOUT = "the pool runs without this tier: nothing is shared with other pools"


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
        yield Look("pool_service.redis_url", lambda: _redis(config))
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


def _redis(config: Config) -> Iterable[Line]:
    from kvtier.tiers.redis.look import look_at  # imported here, as by a pool: without Redis nobody waits for it

    table, key = config.pool_service, "pool_service.redis_url"
    assert table.redis_url is not None
    require_redis_address(config)
    settings = redis_settings(config, NO_SEALS)
    timeout_s = min(settings.call_timeout_s, _REDIS_S)
    settings = dataclasses.replace(settings, call_timeout_s=timeout_s, lookup_timeout_s=timeout_s)
    try:
        servers = look_at(table.redis_url, settings, timeout_s)
    except UnauthenticatedError as error:
        remedy = "set redis_password (and redis_username) to what the server has: requirepass, or ACL LIST"
        yield Line(Level.PROBLEM, "pool_service.redis_password", str(error), _WITHOUT, remedy)
        return
    except ConfigError as error:
        yield Line(Level.PROBLEM, key, str(error))
        return
    except KvtierError as error:
        remedy = "start the Redis, or correct the URL; see bind and protected-mode of its configuration"
        yield Line(Level.PROBLEM, key, str(error), _WITHOUT, remedy)
        return
    is_cluster = "+cluster" in table.redis_url
    for server in servers:
        memory = server.memory
        most = size_words(memory.max_bytes) if memory.max_bytes else "no"
        found = f"{server.software} answers in {server.ping_s * 1e6:,.0f} us; {most} maxmemory, {memory.policy}"
        yield Line(Level.OK, key, f"{found}; {memory.num_keys:,} keys")
        if server.release < _OLDEST_REDIS:
            yield Line(
                Level.PROBLEM, key, f"{server.software} is too old", _WITHOUT, "use Redis 6.2 or Valkey, or later"
            )
        if server.is_of_a_cluster and not is_cluster:
            remedy = "begin the URL with redis+cluster://"
            yield Line(Level.PROBLEM, key, "the server is one of a Cluster", "most blocks are refused there", remedy)
        if warning := memory.warning(ttl=settings.ttl_s > 0):
            yield Line(Level.WARNING, key, f"the Redis {warning}")
        yield clock_line("the Redis", server.time_s - time.time())


def _certificates(config: Config) -> Iterable[Line]:
    files = pool_service_tls(config)
    if files is None:
        return
    ServerTls(files).check()
    named = (("pool_service.tls_certificate", files.certificate), ("pool_service.tls_client_ca", files.ca))
    for key, path in named:
        if path is not None:
            yield from certificate_lines(key, path)
