"""URLs of a configuration, which end up in logs: none may have a password in it."""

from urllib.parse import unquote, urlsplit

from kvtier.errors import ConfigError

OF_A_REDIS = "set redis_username and redis_password"
"""What to do with the credentials of a Redis."""


def require_no_credentials(url: str, instead: str) -> None:
    """Raises `ConfigError` for a URL with credentials in it, or with what may be a part of them, and shows none of it:
    an `@`, also as `%40`, a `#`, or no number where the port stands. A path of a Unix socket may have them.

    :param instead: what to do with credentials, for the error.
    """
    try:
        hosts = urlsplit(url).netloc
    except ValueError:  # whose words may have all of it in them
        raise ConfigError("it cannot be read: write scheme://host:port") from None
    looked_at = hosts if url.startswith("unix://") else unquote(url.partition("?")[0])
    if "@" in looked_at or "#" in looked_at:
        raise ConfigError(f"there are credentials in it: {instead} instead")
    if "://" not in url:
        raise ConfigError(f"no URL: write scheme://host:port; for credentials, {instead}")
    for host in hosts.split(","):
        _, colon, port = host.rpartition("]")[2].rpartition(":")
        if colon and not (port.isascii() and port.isdigit()):
            raise ConfigError(f"no number stands where its port belongs: write host:port; for credentials, {instead}")
