"""Events that a real vLLM has published: the gateway believes of each tenant's prompts what vLLM then found of them."""

from pathlib import Path
from typing import Any

import msgpack
import pytest

from kvtier.config import parse_config
from kvtier_gateway.events.batches import events_in
from kvtier_gateway.events.block_names import VllmNames
from kvtier_gateway.keying.tenants import TenantHashers, short_keys
from kvtier_gateway.routing.kv_index import KvIndex
from kvtier_gateway.routing.values import EngineId
from recorded_vllm import TENANTS, TOKENS_PER_BLOCK, Asked, read

ENGINE = EngineId("vllm")


@pytest.fixture
def hashers(tmp_path: Path) -> TenantHashers:
    data = {"tenants": {name: {"secret": f"env:{name}"} for name in TENANTS}}
    environ = {name: f"the secret of {name}, for tests" for name in TENANTS}
    return TenantHashers(parse_config(data, source="test", folder=tmp_path, environ=environ))


class Site:
    """What a gateway knows of one engine."""

    def __init__(self, hashers: TenantHashers, **bounds: int) -> None:
        self.hashers, self.index = hashers, KvIndex()
        self.names = VllmNames(hashers.of, None, **bounds)

    def hear(self, batch: bytes) -> None:
        for event in events_in(batch, self.names):
            self.index.apply(ENGINE, event)

    def believed(self, asked: Asked, tenant: str) -> int:
        """Tokens of the prompt that the engine would find."""
        hasher = self.hashers.of(tenant, TOKENS_PER_BLOCK)
        assert hasher is not None
        (runs,) = self.index.runs(short_keys(hasher.hash_blocks(asked.prompt)), [ENGINE])
        return min(runs.local, (asked.length - 1) // TOKENS_PER_BLOCK) * TOKENS_PER_BLOCK


def test_it_believes_what_the_engine_finds(hashers: TenantHashers) -> None:
    site, found, salted = Site(hashers), set(), []
    for line in read():
        if isinstance(line, bytes):
            site.hear(line)
        elif line.salt is None and not line.adapter:
            assert site.believed(line, line.tenant) == line.num_cached, line
            found.add(line.num_cached)
        else:
            salted.append(line)
    assert len(found) > 2, found
    assert len(salted) == 2
    assert len(site.names._known) < 100, "what is gone is forgotten"


def test_whose_key_nobody_makes_is_not_known(hashers: TenantHashers) -> None:
    """Blocks with a client's own salt or an adapter, and what follows them."""
    lines, site = read(), Site(hashers)
    for number, line in enumerate(lines):
        if isinstance(line, Asked) and (line.salt or line.adapter):
            for batch in lines[number + 1 :]:
                if isinstance(batch, Asked):
                    break
                site.hear(batch)
            assert not site.names._known
            assert not len(site.index)


def test_no_more_blocks_are_followed_than_there_is_room_for(hashers: TenantHashers) -> None:
    site = Site(hashers, max_blocks=10)
    for line in read():
        if isinstance(line, bytes):
            site.hear(line)
            assert len(site.names._known) <= 10
        elif line.salt is None and not line.adapter:
            assert site.believed(line, line.tenant) <= line.num_cached


STORED = {
    "type": "BlockStored", "block_hashes": [1, 2], "parent_block_hash": None, "token_ids": [5] * 8, "block_size": 4,
    "medium": "GPU", "extra_keys": [["red"], None], "group_idx": 0, "kv_cache_spec_kind": "full_attention",
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "num_known"),
    [
        ({}, 2),
        ({"extra_keys": None}, 0),
        ({"extra_keys": [["green"], None]}, 0),
        ({"extra_keys": [["red/pepper"], None]}, 0),
        ({"extra_keys": [["adapter", "red"], None]}, 0),
        ({"extra_keys": [[["medium", 0]], None]}, 0),
        ({"extra_keys": [["red"], [["medium", 0]]]}, 1),
        ({"parent_block_hash": 77}, 0),
        ({"token_ids": [5] * 4}, 0),
        ({"kv_cache_spec_kind": "sliding_window"}, 0),
        ({"medium": "STORAGE"}, 0),
    ],
)
def test_what_is_known_of_blocks(hashers: TenantHashers, change: dict[str, Any], num_known: int) -> None:
    site = Site(hashers)
    site.hear(msgpack.packb([0.0, [STORED | change]]))
    assert len(site.index) == num_known


def test_blocks_without_a_salt_are_of_the_only_tenant(hashers: TenantHashers) -> None:
    site = Site(hashers)
    site.names = VllmNames(hashers.of, "blue")
    site.hear(msgpack.packb([0.0, [STORED | {"extra_keys": None}]]))
    assert len(site.index) == 2


@pytest.mark.parametrize(
    "change",
    [
        {"token_ids": [-1] * 8}, {"token_ids": [2**40] * 8}, {"token_ids": 8}, {"token_ids": ["a"] * 8},
        {"block_hashes": [[], []]}, {"block_hashes": 2}, {"extra_keys": [7, None]}, {"parent_block_hash": []},
        {"kv_cache_spec_kind": []},
    ],
)  # fmt: skip
def test_what_is_no_event_is_told_as_such(hashers: TenantHashers, change: dict[str, Any]) -> None:
    site = Site(hashers)
    with pytest.raises(ValueError, match="no batch of KV events"):
        site.hear(msgpack.packb([0.0, [STORED | change]]))
