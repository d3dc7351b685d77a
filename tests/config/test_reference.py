"""The reference of the configuration: words for every key, and a schema that takes what the parser takes."""

import json
import tomllib

import pytest
from pydantic import BaseModel

from kvtier.config import Config
from kvtier.config.reference import json_schema, keys, size_text, texts_of


def test_every_key_has_words_and_a_kind() -> None:
    found = keys()
    assert len(found) > 100
    assert len({key.path for key in found}) == len(found)
    for key in found:
        assert key.text.endswith((".", ".)")), f"{key.path}: no docstring below the field"
        assert key.kind, key.path


def test_every_field_is_in_the_reference() -> None:
    known = {key.path for key in keys()}

    def fields(prefix: str, section: BaseModel) -> set[str]:
        found = set()
        for name in type(section).model_fields:
            value = getattr(section, name)
            below = isinstance(value, BaseModel)
            found |= fields(f"{prefix}{name}.", value) if below else {f"{prefix}{name}"}
        return found

    # Tables of tables have no keys of their own.
    tables = {"tenants", "operators", "observers", "api_keys", "engine.adapters"}
    assert fields("", Config()) - tables <= known


def test_defaults_are_toml_that_means_the_default() -> None:
    empty = Config()
    for key in keys():
        if not key.table or "NAME" in key.table or not key.default or key.default.startswith(("by ", "true on")):
            continue
        data = tomllib.loads(f"[{key.table}]\n{key.name} = {key.default}")
        assert getattr(getattr(Config.model_validate(data), key.table), key.name) == getattr(
            getattr(empty, key.table), key.name
        ), key.path


def test_the_schema_is_json_and_bounds_sizes() -> None:
    schema = json.loads(json.dumps(json_schema()))
    memory = schema["$defs"]["PoolServiceConfig"]["properties"]["memory_bytes"]
    assert {"type": "integer", "minimum": 2**20, "maximum": 2**60} in memory["anyOf"]
    assert memory["description"]
    assert schema["additionalProperties"] is False
    assert schema["$defs"]["PoolServiceConfig"]["additionalProperties"] is False


def test_words_are_those_below_the_field() -> None:
    texts = texts_of(Config)
    assert texts["tenant"].startswith("The tenant of this engine.")
    assert "\n" not in texts["gateway_tenants"]


@pytest.mark.parametrize(
    ("amount", "text"), [(0, "0"), (1023, "1023"), (4096, "4KiB"), (3 << 20, "3MiB"), (10 << 30, "10GiB")]
)
def test_sizes_are_written_as_they_are_read(amount: int, text: str) -> None:
    assert size_text(amount) == text
