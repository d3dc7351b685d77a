"""The addresses and files that a service's configuration names: looked at before the service takes any of them."""

import os
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

from kvtier.config.config import Config
from kvtier.net.address import UNIX_PREFIX

_ALL_OF_IPV4 = ("", "0.0.0.0")
"""Hosts that stand for all IPv4 addresses of the machine."""


def require_addresses_apart(config: Config, named: Sequence[tuple[str, str]]) -> None:
    """Raises `ConfigError` where a service could not listen at two of its own addresses.

    :param named: keys with dots, and the address that each names, `host:port`, `:port` or `unix:/path`.
    """
    for (key, text), (other_key, other) in combinations(named, 2):
        if _collide(text, other):
            where = "is there twice" if key == other_key else f"and {key} = {text} cannot both be had"
            remedy = "name it once" if key == other_key else "give each a port of its own"
            raise config.references.error_about(other_key, f"{other} {where}; {remedy}")


def require_writable_file(config: Config, key: str, path: Path, *, is_renamed: bool) -> None:
    """Raises `ConfigError` where this user cannot write a file. Opens and makes nothing.

    :param is_renamed: whether the service renames an earlier file of that name, for which it must write the folder.
    """
    reason: str | None
    if os.path.isdir(path):
        reason = "it is a folder"
    elif os.path.exists(path) and not is_renamed:
        reason = None if os.access(path, os.W_OK) else f"user {os.geteuid()} may not"
    else:
        reason = why_nothing_can_be_made_in(path.parent)
    if reason is not None:
        raise config.references.error_about(
            key, f"{path} cannot be written: {reason}; name a file in a folder that this user may write"
        )


def why_nothing_can_be_made_in(folder: Path) -> str | None:
    """What keeps this user from making a file in a folder; None: nothing does."""
    if os.access(folder, os.W_OK | os.X_OK):
        return None
    return f"user {os.geteuid()} may not write {folder}" if os.path.isdir(folder) else f"there is no folder {folder}"


def _collide(text: str, other: str) -> bool:
    if text.startswith(UNIX_PREFIX) or other.startswith(UNIX_PREFIX):
        return text == other
    (host, port), (other_host, other_port) = _host_and_port(text), _host_and_port(other)
    if port != other_port or port == 0:  # port 0 takes a free one
        return False
    of_all = host in _ALL_OF_IPV4 or other_host in _ALL_OF_IPV4
    return host == other_host or (of_all and ":" not in host + other_host)


def _host_and_port(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host.strip("[]").replace("localhost", "127.0.0.1"), int(port)
