"""What a pool needs of the places that its file names: each looked at alone, before the pool opens any of them."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from kvtier.config import Config
from kvtier.config.places import require_addresses_apart, require_writable_file, why_nothing_can_be_made_in
from kvtier.errors import ConfigError
from kvtier.net.address import UNIX_PREFIX
from kvtier.tiers.disk.medium.folder import require_usable_folder
from kvtier_pool.admissions import tier_admission
from kvtier_pool.listener import SocketAccess


def place_attempts(config: Config) -> list[Callable[[], object]]:
    """Returns calls that raise `ConfigError`, with key and remedy, for places that this pool cannot have. They take
    and change nothing."""
    table = config.pool_service
    tcp_and_unix = [("pool_service.listen", text) for text in table.listen]
    tcp_and_unix += [("pool_service.grpc_listen", text) for text in table.grpc_listen]
    sockets = [(key, text.removeprefix(UNIX_PREFIX)) for key, text in tcp_and_unix if text.startswith(UNIX_PREFIX)]
    attempts: list[Callable[[], object]] = [
        partial(_require_reachable, config),
        partial(require_addresses_apart, config, [*tcp_and_unix, ("pool_service.http_listen", table.http_listen)]),
    ]
    attempts += [partial(_require_folder, config, key, Path(path)) for key, path in sockets]
    if sockets:
        attempts.append(SocketAccess(table.socket_mode, table.socket_group).require)
    if table.audit_log != "stderr":
        file = config.references.path(table.audit_log)
        attempts.append(partial(require_writable_file, config, "pool_service.audit_log", file, is_renamed=False))
    if table.record_trace is not None:
        file = config.references.path(table.record_trace)
        attempts.append(partial(require_writable_file, config, "pool_service.record_trace", file, is_renamed=True))
    if table.disk_dir is not None:
        attempts.append(partial(require_usable_folder, config.references.path(table.disk_dir)))
    if table.redis_url:
        attempts.append(partial(require_redis_address, config))
        attempts.append(partial(tier_admission, "redis_admission", table.redis_admission, None))
    return attempts


def require_redis_address(config: Config) -> None:
    """Raises `ConfigError` where `redis_url` names no Redis, or files that cannot be used. Asks nobody."""
    from kvtier.tiers.redis.address import RedisAddress  # imported here: a pool without Redis starts sooner

    try:
        RedisAddress.parse(config.pool_service.redis_url or "").require_files()
    except ConfigError as error:
        raise config.references.error_about("pool_service.redis_url", str(error)) from error


def _require_reachable(config: Config) -> None:
    if not config.pool_service.listen and not config.pool_service.grpc_listen:
        raise config.references.error_about(
            "pool_service.listen",
            "no address, and none in pool_service.grpc_listen: no engine could reach the pool; give one of them an "
            'address, such as listen = ["127.0.0.1:7600"]',
        )


def _require_folder(config: Config, key: str, socket: Path) -> None:
    reason = why_nothing_can_be_made_in(socket.parent)
    if reason is not None:
        raise config.references.error_about(
            key, f"unix:{socket}: {reason}; make one that this user may write, or name a socket in another one"
        )
