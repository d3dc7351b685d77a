"""Edits the tokens of tenants in a pool's TOML file, with everything else of the file as it was."""

import fcntl
import os
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import tomlkit
from tomlkit.exceptions import TOMLKitError
from tomlkit.items import Array

from kvtier.config import OVERRIDE_PREFIX, load_config, nearest
from kvtier.config.accepted import token_digest
from kvtier.config.credentials import TokenConfig, token_id
from kvtier.errors import ConfigError
from kvtier_pool.checks import is_of_a_pool


class CredentialFile:
    """A pool's configuration while it is edited. One thread. Nothing is written before `save`."""

    def __init__(self, path: Path) -> None:
        """Raises `ConfigError` when it is no configuration, or none of a pool."""
        self._path = path.resolve()  # a link stays one
        self._config = load_config(self._path, _without_overrides())
        if not is_of_a_pool(self._config):
            raise ConfigError(
                f"{path}: not a pool's file: it has no table [pool_service], and no token_sha256 of a tenant; name the "
                "pool's file, or, if it is this one, add [pool_service] to it"
            )
        try:
            self._text = self._path.read_text()
            self._document = tomlkit.parse(self._text)
        except (OSError, TOMLKitError) as error:
            raise ConfigError(f"{path}: cannot be edited: {error}") from error

    def tokens(self, name: str) -> list[tuple[str, datetime | None]]:
        """The id of each token of a tenant, and when it ends. One from an environment variable that is not set
        here is called by its reference. Raises `ConfigError` where there is no such tenant."""
        return [(self._id(name, entry), entry.expires_at) for entry in self._entries(name)]

    def add_tenant(self, name: str, digest: str) -> None:
        """Adds a tenant with one token. Raises `ConfigError` where there is one of this name."""
        if name in self._config.tenants:
            raise ConfigError(
                f"{self._path}: tenants.{name} is there already; `kvtier tenants rotate` gives it a token"
            )
        table = tomlkit.table()
        table.add("token_sha256", [digest])
        if "tenants" not in self._document:
            self._document.add("tenants", tomlkit.table(is_super_table=True))
        self._document["tenants"][name] = table

    def add_token(self, name: str, digest: str, others_end: datetime) -> list[str]:
        """Adds a token, and lets the tenant's others end then, unless they end before; the ids of those that do."""
        array = self._array(name)
        ending: list[str] = []
        for place, entry in enumerate(self._entries(name)):
            if entry.expires_at is None or entry.expires_at > others_end:
                table = tomlkit.inline_table()
                table.update({"sha256": entry.sha256, "expires_at": others_end.astimezone(UTC).replace(microsecond=0)})
                array[place] = table
                ending.append(self._id(name, entry))
        array.append(digest)
        return ending

    def remove_tokens(self, name: str, wanted: str | None) -> list[str]:
        """Removes the token of this id, or all; which. Raises `ConfigError` where there is none."""
        array, entries = self._array(name), self._entries(name)
        ids = [self._id(name, entry) for entry in entries]
        if wanted is not None and wanted not in ids:
            raise ConfigError(f"{self._path}: tenants.{name} has no token {wanted!r}{nearest(wanted, ids)}")
        for place in reversed(range(len(entries))):
            if wanted in (None, ids[place]):
                del array[place]
        return [each for each in ids if wanted in (None, each)]

    def save(self) -> None:
        """Puts another file in the place of the old one, on disk before it has the name, with its mode and owner.

        Raises `ConfigError`, and leaves the old one, when it would be no configuration or cannot be written, and when
        somebody else has written it since it was read here. Waits for others who save.
        """
        folder = os.open(self._path.parent, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)  # the file's own lock would be one of a file that is being replaced
            self._replace()
            os.fsync(folder)
        finally:
            os.close(folder)

    def _replace(self) -> None:
        new = Path()
        try:
            before = self._path.stat()
            if self._path.read_text() != self._text:
                raise ConfigError(f"{self._path}: somebody else has changed it meanwhile; run this command again")
            descriptor, text = tempfile.mkstemp(prefix=f".{self._path.name}.", dir=self._path.parent)
            new = Path(text)
            with os.fdopen(descriptor, "w") as file:
                file.write(tomlkit.dumps(self._document))
                file.flush()
                os.fchmod(descriptor, before.st_mode & 0o7777)
                if (before.st_uid, before.st_gid) != (os.geteuid(), os.getegid()):
                    os.fchown(descriptor, before.st_uid, before.st_gid)
                os.fsync(descriptor)
            load_config(new, _without_overrides())
            new.replace(self._path)
        except OSError as error:
            new.unlink(missing_ok=True) if new.name else None
            raise ConfigError(f"{self._path}: cannot be written: {error}; run this as the user who owns it") from error
        except ConfigError:
            new.unlink(missing_ok=True) if new.name else None
            raise

    def _entries(self, name: str) -> list[TokenConfig]:
        if name not in self._config.tenants:
            raise ConfigError(f"{self._path}: tenants.{name} is not there{nearest(name, self._config.tenants)}")
        return self._config.tenants[name].token_sha256

    def _id(self, name: str, entry: TokenConfig) -> str:
        try:
            return token_id(token_digest(self._config, f"tenants.{name}.token_sha256", entry))
        except ConfigError:
            return entry.sha256

    def _array(self, name: str) -> Array:
        """The tenant's tokens in the document; made if need be."""
        self._entries(name)
        table: Any = self._document["tenants"]
        of_tenant = table[name]
        if "token_sha256" not in of_tenant:
            of_tenant.add("token_sha256", tomlkit.array())
        array = of_tenant["token_sha256"]
        if not isinstance(array, Array):
            raise ConfigError(
                f"{self._path}: tenants.{name}.token_sha256 is written as tables [[...]]; write it as a list"
            )
        return array


def _without_overrides() -> dict[str, str]:
    """The environment without values that stand in for those of the file: only what the file has can be edited."""
    return {name: value for name, value in os.environ.items() if not name.startswith(OVERRIDE_PREFIX)}
