"""Makes a `Config` from TOML and the environment, or errors that name file, key and remedy."""

import difflib
import hashlib
import math
import os
import re
import tomllib
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import (
    BaseModel,
    ValidationError,
)

from kvtier.config.bounded_file import bounded_text
from kvtier.config.config import Config
from kvtier.config.credentials import RoleConfig, TokenConfig
from kvtier.config.fields import OVERRIDE_PREFIX
from kvtier.config.gateway import ApiKeyConfig, GatewayEngineConfig
from kvtier.config.references import References, overridden_keys, overriding
from kvtier.config.tenant import TenantConfig
from kvtier.errors import ConfigError, InvalidInputError, printable
from kvtier.identity.keys import tenant_id

_BYTE_ORDER_MARK = "\ufeff"
"""Put before the text by editors of Windows."""
_MOST_BYTES = 16_000_000
"""What a configuration may have: the tables of tens of thousands of tenants."""
_REMEDIES = {
    "less_than": "; lower it",
    "less_than_equal": "; lower it",
    "greater_than": "; raise it",
    "greater_than_equal": "; raise it",
    "missing": "; set it",
}
"""What to do about pydantic's kinds of errors, where their words do not say so."""
_NAMED_TABLES: Mapping[str, type[BaseModel]] = {
    "tenants": TenantConfig,
    "operators": RoleConfig,
    "observers": RoleConfig,
    "api_keys": ApiKeyConfig,
}
"""Tables of tables, each by a name that the file chooses."""


def load_config(path: Path, environ: Mapping[str, str] | None = None) -> Config:
    """Parses a TOML file. Raises `ConfigError` naming file, key and remedy."""
    try:
        text = bounded_text(path, _MOST_BYTES).removeprefix(_BYTE_ORDER_MARK)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot read the configuration: {error}") from error
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    except ValueError:  # Python converts no number of more than some thousand digits
        raise ConfigError(f"{path}: not valid TOML: a number has too many digits") from None
    except RecursionError:
        raise ConfigError(f"{path}: not valid TOML: arrays or tables are nested too deeply") from None
    return _parsed(data, References(str(path), path.parent, _environment(environ), path))


def parse_config(
    data: dict[str, Any], *, source: str, folder: Path = Path(), environ: Mapping[str, str] | None = None
) -> Config:
    """Checks parsed TOML.

    :param source: what errors call it.
    :param folder: what relative paths, `file:` references included, are relative to.
    :param environ: overrides and `env:` secrets; the process's environment when None.
    """
    return _parsed(data, References(source, folder, _environment(environ)))


def _environment(environ: Mapping[str, str] | None) -> dict[str, str]:
    return dict(os.environ if environ is None else environ)


def _parsed(data: dict[str, Any], references: References) -> Config:
    try:
        config = Config.model_validate(_overridden(data, references.environ))
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(references, data, e) for e in error.errors())) from error
    config._references = references
    if problems := [*_bad_names(config), *_unknown_tenants(config)]:
        raise ConfigError("\n".join(f"{_place(references, data, where)}: {problem}" for where, problem in problems))
    return config


def _bad_names(config: Config) -> Iterable[tuple[list[str], str]]:
    for table in _NAMED_TABLES:
        for name in getattr(config, table):
            try:
                tenant_id(name)
            except InvalidInputError as error:
                yield [table, name], str(error)


def _unknown_tenants(config: Config) -> Iterable[tuple[list[str], str]]:
    named = [(["gateway_tenants"], name) for name in config.gateway_tenants]
    named += [(["api_keys", key, "tenant"], table.tenant) for key, table in config.api_keys.items()]
    for engine in config.gateway.engines:
        named += [(["gateway", "engines", "tenants"], name) for name in engine.tenants or []]
    if config.tenant is not None:
        named.append((["tenant"], config.tenant))
    for location, name in named:
        if name not in config.tenants:
            yield location, f"{name!r} has no table{nearest(name, config.tenants)}"


def merge_tables(data: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`data` with what stands in `over` put in its place: tables key by key, everything else as a whole."""
    merged = dict(data)
    for name, value in over.items():
        known = merged.get(name)
        both = isinstance(known, Mapping) and isinstance(value, Mapping)
        merged[name] = merge_tables(known, value) if both else value  # type: ignore[arg-type]
    return merged


def nearest(name: str, valid: Collection[str]) -> str:
    """What an error about an unknown name ends with: the valid one that was perhaps meant, or all of them."""
    close = difflib.get_close_matches(name, valid, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; valid: {', '.join(sorted(valid)) or 'none'}"


def token_sha256(token: str) -> str:
    """What the pool's `token_sha256` must be for this token."""
    return hashlib.sha256(token.encode()).hexdigest()


def _overridden(data: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    """A copy of `data` with `KVTIER__A__B=value` put at data["a"]["b"]."""
    merged: dict[str, Any] = {k: dict(v) if isinstance(v, dict) else v for k, v in data.items()}
    for variable in overriding(environ):
        *path, last = variable.removeprefix(OVERRIDE_PREFIX).lower().split("__")
        if not all((*path, last)):
            example = f"{OVERRIDE_PREFIX}HOST__CAPACITY_BYTES"
            name = printable(variable)
            raise ConfigError(
                f"environment variable {name}: names no key; name one as in {example}, or remove the variable"
            )
        table = merged
        for part in path:
            below = table.get(part, {})
            table[part] = dict(below) if isinstance(below, dict) else {}
            table = table[part]
        table[last] = _toml_value(environ[variable])
    return merged


def _toml_value(text: str) -> Any:
    """`text` as a TOML value, or as it stands when it is none: numbers and lists work, plain text needs no quotes."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text


def _explain(references: References, data: Mapping[str, Any], error: Any) -> str:
    """Returns a line about one error of pydantic's.

    :param data: what stands in the file.
    """
    location = [str(part) for part in error["loc"]]
    place = _place(references, data, location)
    if error["type"] == "extra_forbidden":
        return f"{place}: unknown key{nearest(location[-1], _fields_beside(location))}"
    if error["type"] in ("model_type", "dict_type"):
        return f"{place}: a table, and no value: set its keys (kvtier config keys)"
    if error["type"].startswith("byte_size"):
        return f"{place}: not a size; use a number of bytes, or a size such as 4GiB"
    if error["type"] in _REMEDIES and _is_nan(error["input"]):
        return f"{place}: nan, which is no number; set one"
    message = error["msg"].removeprefix("Value error, ")  # pydantic's, before words of ours
    if isinstance(error["input"], str):
        message = message.replace(error["input"], without_credentials(error["input"]))
        if "@" in error["input"]:  # there may be a part of it
            message = re.sub(r"[^\s'\"/]+@", "...@", message)
    message = message.replace("Input should", "it should").replace("Input is", "it is")
    return f"{place}: {printable(message)}{_REMEDIES.get(error['type'], '')}"


def _is_nan(value: Any) -> bool:
    try:
        return math.isnan(float(value))
    except (TypeError, ValueError, OverflowError):
        return False


def _place(references: References, data: Mapping[str, Any], location: list[str]) -> str:
    """What an error about a key begins with: the variable of the environment or else the file, and the key."""
    variable = _to_blame(location, data, overridden_keys(references.environ))
    source = references.source if variable is None else f"environment variable {printable(variable)}"
    return f"{source}: {printable('.'.join(location))}"


def without_credentials(text: str) -> str:
    """A URL or an address without what may be a password in it: all before an `@`, and all after a `?`."""
    scheme, separator, rest = text.rpartition("://") if "://" in text else ("", "", text)
    rest = re.sub(r"\?.*", "?...", re.sub(".*@", "...@", rest, flags=re.DOTALL), flags=re.DOTALL)
    return f"{scheme}{separator}{rest}"


def _to_blame(location: list[str], data: Mapping[str, Any], variables: Mapping[str, str]) -> str | None:
    """Returns the variable of the environment to which a key is due that is wrong; None: it is due to the file.

    :param variables: key -> the variable that has set it.
    """
    above = [".".join(location[: depth + 1]) for depth in range(len(location))]
    for key in reversed(above):  # a key's own variable before one of its table
        if key in variables:
            return variables[key]
    there: Any = data
    for name, key in zip(location, above, strict=True):
        below = next((variable for known, variable in variables.items() if known.startswith(f"{key}.")), None)
        there = there.get(name) if isinstance(there, Mapping) else None
        if not isinstance(there, Mapping) and (below is not None or there is None):
            return below  # it has made a table of nothing, or of the file's value
    return None


def _fields_beside(location: list[str]) -> list[str]:
    """Valid keys of the table that holds the key at `location`."""
    section: type[BaseModel] = Config
    tables = location[:-1]
    if tables[:1] and tables[0] in _NAMED_TABLES:
        section, tables = _NAMED_TABLES[tables[0]], tables[2:]
    if tables[:1] in (["token_sha256"], ["key_sha256"]):
        section, tables = TokenConfig, []
    if tables[:2] == ["gateway", "engines"]:
        section, tables = GatewayEngineConfig, []
    for part in tables:
        annotation = section.model_fields[part].annotation
        assert isinstance(annotation, type)
        section = annotation
    return list(section.model_fields)
