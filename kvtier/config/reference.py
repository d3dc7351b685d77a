"""What every key of the configuration means: for people as keys with words, for editors as a JSON schema.

Both are made from the tables themselves: names, kinds and defaults come from pydantic's own schema, words from the
docstrings below the fields, which are read from the source when they are asked for.
"""

import ast
import inspect
import itertools
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from kvtier.config.config import Config
from kvtier.config.credentials import RoleConfig, TokenConfig
from kvtier.config.engine import AdapterConfig, EngineConfig
from kvtier.config.events import EventsConfig
from kvtier.config.gateway import ApiKeyConfig, GatewayConfig, GatewayEngineConfig
from kvtier.config.log import LogConfig
from kvtier.config.pool import PoolConfig
from kvtier.config.pool_service import PoolServiceConfig
from kvtier.config.tenant import RateConfig, RedisShareConfig, ShareConfig, TenantConfig
from kvtier.config.tiers import CacheConfig, DiskConfig, HostConfig
from kvtier.config.tracing import TracingConfig

_SECTIONS: tuple[type[BaseModel], ...] = (
    Config,
    EngineConfig,
    AdapterConfig,
    CacheConfig,
    HostConfig,
    DiskConfig,
    PoolConfig,
    PoolServiceConfig,
    GatewayConfig,
    GatewayEngineConfig,
    LogConfig,
    TracingConfig,
    EventsConfig,
    TenantConfig,
    ShareConfig,
    RedisShareConfig,
    RateConfig,
    RoleConfig,
    ApiKeyConfig,
    TokenConfig,
)
_BY_CORES = "by the number of cores"
_BY_SYSTEM = "true on Linux"
_DEFAULTS_OF_THIS_MACHINE = {"load_threads": _BY_CORES, "io_process": _BY_SYSTEM}
"""Words for defaults that are not the same everywhere."""
_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
_REFERENCE = "#/$defs/"
_NO_BOUND = 2**60
"""A bound that nothing reaches."""


@dataclass(frozen=True, slots=True)
class Key:
    """One key that the file may have."""

    table: str
    """The table that it stands in, such as `pool_service` or `tenants.NAME.memory`; empty at the top of the file."""
    name: str
    kind: str
    """What may stand there, in words."""
    default: str
    """What stands there without it, as TOML or in words; empty where it is nothing."""
    text: str
    """What it does, and what goes wrong at either extreme."""

    @property
    def path(self) -> str:
        """The table and the name, with dots."""
        return f"{self.table}.{self.name}" if self.table else self.name


def json_schema() -> dict[str, Any]:
    """Returns the JSON schema of the file, with words for every key: what editors complete and check TOML with."""
    schema = Config.model_json_schema()
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "kvtier.toml", **schema}
    for section in _SECTIONS:
        of_section = schema if section is Config else schema["$defs"].get(section.__name__)
        if of_section is None:
            continue
        for name, text in texts_of(section).items():
            field = of_section["properties"].get(name)
            if field is not None:
                _with_words(field, name, text)
    return schema


def keys() -> list[Key]:
    """Returns every key, table by table in the order of the source."""
    schema = json_schema()
    return list(_keys_of("", schema, schema["$defs"]))


def texts_of(section: type[BaseModel]) -> Mapping[str, str]:
    """Returns the docstring below each field of a table, without line breaks inside paragraphs."""
    tree = ast.parse(inspect.getsource(sys.modules[section.__module__]))
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == section.__name__)
    texts = {}
    for field, below in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(below, ast.Expr):
            text = below.value.value if isinstance(below.value, ast.Constant) else ""
            texts[field.target.id] = " ".join(str(text).split())
    return texts


def size_text(amount: int) -> str:
    """`amount` bytes in the largest unit that divides it, as the configuration takes it: 64MiB."""
    for unit, size in _UNITS:
        if amount and amount % size == 0:
            return f"{amount // size}{unit}"
    return str(amount)


def _with_words(field: dict[str, Any], name: str, text: str) -> None:
    field["description"] = text
    field.pop("title", None)
    bounds = {"minimum": field.pop("ge", None), "maximum": field.pop("le", None)}
    for branch in field.get("anyOf", ()):
        if branch.get("type") == "integer" and _is_size(field):
            branch.update({bound: value for bound, value in bounds.items() if value is not None})
    if name in _DEFAULTS_OF_THIS_MACHINE:
        field.pop("default", None)


def _keys_of(table: str, section: Mapping[str, Any], known: Mapping[str, Any]) -> Iterator[Key]:
    below = []
    for name, field in section["properties"].items():
        path = f"{table}.{name}" if table else name
        if "$ref" in field:
            below.append((path, _referred(field, known)))
        elif isinstance(field.get("additionalProperties"), Mapping):
            below.append((f"{path}.NAME", _referred(field["additionalProperties"], known)))
        else:
            yield Key(table, name, _kind(field), _default(name, field), field.get("description", ""))
    for path, found in below:
        yield from _keys_of(path, found, known)


def _referred(field: Mapping[str, Any], known: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Mapping[str, Any] = known[field["$ref"].removeprefix(_REFERENCE)]
    return found


def _is_size(field: Mapping[str, Any]) -> bool:
    return any("pattern" in branch for branch in field.get("anyOf", ()))


def _kind(field: Mapping[str, Any]) -> str:
    if _is_size(field):
        return "bytes, such as 4GiB" + _bounds(next(b for b in field["anyOf"] if b.get("type") == "integer"), size_text)
    if "anyOf" in field:
        kinds = [_kind(branch) for branch in field["anyOf"] if branch.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    if "enum" in field or "const" in field:
        return ", ".join(json.dumps(value) for value in field.get("enum", [field.get("const")]))
    if "$ref" in field:
        return "a table"
    if field["type"] == "array":
        items = field["items"]
        if "$ref" in items:
            return "list of texts or tables"
        return f"list of {_kind(items)}s" if items["type"] == "string" else "list"
    words = {"boolean": "true or false", "integer": "whole number", "number": "number", "string": "text"}
    return ("path" if field.get("format") == "path" else words[field["type"]]) + _bounds(field, str)


def _bounds(field: Mapping[str, Any], shown: Any) -> str:
    """The range of a number, in words; empty where it has none."""
    low, above = field.get("minimum"), field.get("exclusiveMinimum")
    high, below = field.get("maximum"), field.get("exclusiveMaximum")
    words = []
    if low:
        words.append(f"{shown(low)} or more")
    if above is not None:
        words.append(f"more than {shown(above)}")
    if high is not None and high < _NO_BOUND:
        words.append(f"at most {shown(high)}")
    if below is not None:
        words.append(f"less than {shown(below)}")
    return ", " + ", ".join(words) if words else ""


def _default(name: str, field: Mapping[str, Any]) -> str:
    if name in _DEFAULTS_OF_THIS_MACHINE:
        return _DEFAULTS_OF_THIS_MACHINE[name]
    value = field.get("default")
    if value is None:
        return ""
    if name.endswith("_mode"):
        return f"{value:#o}"
    return json.dumps(size_text(value)) if _is_size(field) and value else json.dumps(value)
