"""What a configuration names outside itself: secrets in variables and files, and paths beside its own file."""

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvtier.config.bounded_file import bounded_text
from kvtier.config.fields import NO_REFERENCE, OVERRIDE_PREFIX
from kvtier.errors import ConfigError

_MOST_BYTES = 1 << 20
"""What the file of a secret may have."""


@dataclass(frozen=True, slots=True)
class References:
    """The origin of one configuration, which gives its references a meaning and its errors the place of a mistake."""

    source: str = "configuration"
    """What errors call the configuration."""
    folder: Path = Path()
    """The folder that relative paths are relative to."""
    environ: Mapping[str, str] = field(default_factory=dict)
    """The variables that `env:NAME` refers to, and those that have set keys."""
    file: Path | None = None
    """The file that the configuration was loaded from."""
    options: frozenset[str] = frozenset()
    """Keys that options of the command line have set."""
    _read: dict[str, str] = field(default_factory=dict)
    """Secrets that have been read, by reference: a file is read once, for it may be a pipe."""

    def path(self, path: Path) -> Path:
        """A path of the configuration: relative ones are relative to its folder."""
        return self.folder / path.expanduser()

    def secret(self, key: str, reference: str) -> str:
        """The secret that a `kvtier.config.fields.SecretReference` refers to. Raises `ConfigError`, which names the
        key that it is for."""
        if reference in self._read:
            return self._read[reference]
        scheme, _, name = reference.partition(":")
        if scheme == "env":
            value = self.environ.get(name, "").strip()
            remedy = f"environment variable {name} is missing or empty; export it"
        elif scheme == "file":
            path = self.folder / name
            try:
                value = bounded_text(path, _MOST_BYTES).strip()
            except (OSError, ValueError) as error:
                raise self.error_about(key, f"cannot read {path}: {error}") from error
            remedy = f"file {path} is empty; write the secret into it"
        else:
            raise self.error_about(key, NO_REFERENCE)
        if not value:
            raise self.error_about(key, remedy)
        self._read[reference] = value
        return value

    def newest_secret(self, key: str, reference: str) -> str:
        """The secret, read again where `file:PATH` names a file that can be read; else as `secret` has it."""
        path = self.folder / reference.removeprefix("file:")
        if reference.startswith("file:") and path.is_file():
            with contextlib.suppress(OSError, ValueError):
                if value := path.read_text().strip():
                    self._read[reference] = value
        return self.secret(key, reference)

    def files(self, references: Iterable[str]) -> list[Path]:
        """The configuration's own file, if it has one, and those that the `file:PATH` among `references` name."""
        named = [self.folder / text.removeprefix("file:") for text in references if text.startswith("file:")]
        return [*([self.file] if self.file is not None else []), *named]

    def name_of(self, key: str) -> str:
        """What errors call a key: behind the option or the variable that has set it, or else the file."""
        if key in self.options:
            return f"command line: {key}"
        variable = overridden_keys(self.environ).get(key.partition("[")[0])
        source = self.source if variable is None else f"environment variable {variable}"
        return f"{source}: {key}"

    def error_about(self, key: str, text: str) -> ConfigError:
        """Returns an error about a key, by its name (`name_of`)."""
        return ConfigError(f"{self.name_of(key)}: {text}")


def overriding(environ: Mapping[str, str]) -> list[str]:
    """The variables of the environment that set keys, those of tables before those of keys in them: whatever the order
    of the environment, the same is in force."""
    found = (variable for variable in environ if variable.startswith(OVERRIDE_PREFIX))
    return sorted(found, key=lambda variable: (variable.count("__"), variable))


def overridden_keys(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the keys that variables of the environment set, with dots, and the name of the variable of each, as
    `overriding` has them."""
    return {
        variable.removeprefix(OVERRIDE_PREFIX).lower().replace("__", "."): variable for variable in overriding(environ)
    }
