"""The place of a Redis: the URL of one server, of Sentinels that know it, or of a Cluster.

redis://host:port/db                              one server; port 6379 and db 0 when left out
unix:///path/redis.sock?db=0                      the same, over a Unix socket
redis+sentinel://host:port,host:port/service/db   whichever server the Sentinels call master; port 26379
redis+cluster://host:port,host:port               any nodes of a Cluster; the others are found

`rediss`, `rediss+sentinel` and `rediss+cluster` are the same over TLS, with `?ca=/path` (default: the
system's), `?cert=/path&key=/path` (a client's own) and `?check_hostname=no`; paths are absolute. Credentials are never
part of the URL, because URLs end up in logs.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

from kvtier.errors import ConfigError
from kvtier.net.address import Address
from kvtier.net.certificates import TlsFiles, client_context
from kvtier.net.plain_url import OF_A_REDIS, require_no_credentials

_SCHEMES = "redis, rediss, unix, redis+sentinel, rediss+sentinel, redis+cluster, rediss+cluster"
_TLS_OPTIONS = {"ca", "cert", "key", "check_hostname"}
_YES_NO = {"yes": True, "no": False}


class Kind(enum.Enum):
    """The kind of a Redis: a single server, one that Sentinels know, or a Cluster."""

    SINGLE = "single"
    SENTINEL = "sentinel"
    CLUSTER = "cluster"


@dataclass(frozen=True, slots=True)
class Tls:
    """How to trust the servers, and how they are to trust us."""

    ca: str | None = None
    """File of certificates; None: the system's."""
    cert: str | None = None
    key: str | None = None
    check_hostname: bool = True


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """A parsed URL. Without secrets, so it may be shown."""

    kind: Kind
    seeds: tuple[Address, ...]
    """The server, the Sentinels, or some nodes of the Cluster."""
    db: int = 0
    service: str = ""
    """What the Sentinels call the server."""
    tls: Tls | None = None

    @classmethod
    def parse(cls, url: str) -> "RedisAddress":
        """Raises `ConfigError` that says what is wrong, and never shows credentials."""
        try:
            parts = urlsplit(url)
        except ValueError:  # whose words may have all of it in them
            raise ConfigError(f"the URL of the Redis cannot be read: use one of {_SCHEMES}") from None
        base, _, kind_name = parts.scheme.partition("+")
        if base not in ("redis", "rediss", "unix") or parts.scheme not in _SCHEMES.split(", "):
            raise ConfigError(f"the URL of the Redis begins with {parts.scheme!r}: use one of {_SCHEMES}")
        try:
            require_no_credentials(url, OF_A_REDIS)
        except ConfigError as error:
            raise ConfigError(f"the URL of the Redis: {error}") from None
        options = dict(parse_qsl(parts.query, keep_blank_values=True))
        if base == "unix":
            return cls(
                Kind.SINGLE, (Address.parse(f"unix:{unquote(parts.path)}"),), _db(options.pop("db", ""), options)
            )
        kind = Kind(kind_name or "single")
        tls = _tls(options) if base == "rediss" else None
        _require_none(options)
        path = [unquote(part) for part in parts.path.strip("/").split("/") if part]
        service = path.pop(0) if kind is Kind.SENTINEL and path else ""
        if kind is Kind.SENTINEL and not service:
            raise ConfigError("the URL of the Sentinels lacks the service's name: redis+sentinel://host:26379/mymaster")
        if len(path) > 1 or (kind is Kind.CLUSTER and path):
            raise ConfigError("the URL of the Redis has a path, which has no meaning here")
        port = 26379 if kind is Kind.SENTINEL else 6379
        seeds = tuple(_seed(text, port) for text in parts.netloc.split(","))
        if kind is Kind.SINGLE and len(seeds) > 1:
            raise ConfigError("several servers in the URL of one Redis: use redis+sentinel or redis+cluster")
        return cls(kind, seeds, _db(path[0] if path else "", {}), service, tls)

    def require_files(self) -> None:
        """Raises `ConfigError` when a file that the URL names cannot be used."""
        if self.tls is None:
            return
        named = [("cert", self.tls.cert), ("key", self.tls.key), ("ca", self.tls.ca)]
        for name, text in named:
            if text is not None and not text.startswith("/"):
                raise ConfigError(f"{name}={text} in the URL of the Redis: write an absolute path")
        certificate, key, ca = (None if text is None else Path(text) for _, text in named)
        client_context(TlsFiles(certificate=certificate, key=key, ca=ca, names=("cert", "key", "ca")))

    def __str__(self) -> str:
        seeds = ",".join(map(str, self.seeds))
        return {
            Kind.SINGLE: seeds,
            Kind.SENTINEL: f"{seeds} (Sentinels of {self.service})",
            Kind.CLUSTER: f"{seeds} (Cluster)",
        }[self.kind]


def _seed(text: str, default_port: int) -> Address:
    if not text:
        raise ConfigError("the URL of the Redis lacks a host: redis://host:port/db")
    has_port = text.rpartition("]")[2].count(":") == 1
    return Address.parse(text if has_port else f"{text}:{default_port}")


def _db(text: str, rest: Mapping[str, str]) -> int:
    _require_none(rest)
    if text and not (text.isascii() and text.isdigit()):
        raise ConfigError("the database in the URL of the Redis: use a number")
    return int(text or 0)


def _tls(options: dict[str, str]) -> Tls:
    """Takes what it knows out of `options`."""
    own = {name: options.pop(name) for name in _TLS_OPTIONS & options.keys()}
    check = own.pop("check_hostname", "yes")
    if check not in _YES_NO:
        raise ConfigError(f"check_hostname={check} in the URL of the Redis: use yes or no")
    if ("cert" in own) != ("key" in own):
        raise ConfigError("`cert` and `key` in the URL of the Redis belong together")
    return Tls(own.get("ca"), own.get("cert"), own.get("key"), _YES_NO[check])


def _require_none(options: Mapping[str, str]) -> None:
    if options:
        known = "ca, cert, key and check_hostname with rediss, db with unix"
        raise ConfigError(f"unknown option {min(options)!r} in the URL of the Redis: there are {known}")
