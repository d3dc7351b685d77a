"""A pool with storage keys of one tenant: memory is as ever, disk and Redis have nothing that can be read or forged."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from configured_pool import running as running_process
from kvtier.config import Config, parse_config
from kvtier.errors import ConfigError
from kvtier.testing.blocks import make_payload, read_blocks, summed
from kvtier.tiers.base import WriteStatus
from kvtier_pool.service import PoolService
from pool_rig import BLOCK_BYTES, BLUE, MIB, TENANTS, connect, items, keys, payloads, until
from redis_rig import RedisServer, module_redis
from seal_rig import KEYS

running = pytest.fixture(scope="module")(module_redis)
LABELS = range(8)


@contextlib.contextmanager
def sealing_pool(folder: Path, *ids: int, redis: str = "", disk: bool = True, **red: object) -> Iterator[str]:
    """A pool whose tenant red has the keys of `ids`; gives its address."""
    free = "127.0.0.1:0"
    table = {
        "listen": free,
        "grpc_listen": free,
        "http_listen": free,
        "min_residency_s": 0.0,
        "memory_bytes": 16 * MIB,
        "disk_reserve_bytes": 0,
        "redis_url": redis,
        **({"disk_dir": str(folder / "disk"), "disk_bytes": 64 * MIB} if disk else {}),
    }
    tenants: dict[str, dict[str, object]] = {name: {"token_sha256": [digest]} for digest, name in TENANTS.items()}
    environ = {"KEYS": " ".join(f"{number}:{KEYS[number].hex()}" for number in ids)}
    if ids:
        tenants["red"] |= {"storage_keys": "env:KEYS", **red}
    service = PoolService(parse_config({"pool_service": table, "tenants": tenants}, source="a test", environ=environ))
    try:
        yield service.start().block[0]
    finally:
        service.stop()


def read(address: str, tenant: str = "red") -> list[bytes | None]:
    with contextlib.closing(connect(address, tenant)) as tier:
        wanted = keys(LABELS, BLUE) if tenant == "blue" else keys(LABELS)
        return read_blocks(tier, wanted, BLOCK_BYTES)


def write(address: str) -> None:
    for tenant, blocks in (("red", items(LABELS)), ("blue", items(LABELS, BLUE))):
        with contextlib.closing(connect(address, tenant)) as tier:
            assert tier.write(blocks) == [WriteStatus.STORED] * len(blocks)


def holders(folder: Path, server: RedisServer) -> list[Callable[[], bytes]]:
    """What is on disk, and what in Redis."""

    def on_disk() -> bytes:
        return b"".join(path.read_bytes() for path in sorted((folder / "disk").iterdir()))

    def in_redis() -> bytes:
        with server.client() as client:
            return b"".join(client.get(name) for name in client.scan_iter())

    return [on_disk, in_redis]


def test_what_goes_below_memory_is_sealed_for_the_tenant_with_keys_only(tmp_path: Path, running: RedisServer) -> None:
    with sealing_pool(tmp_path, 1, redis=running.url) as address:
        write(address)
    on_disk, in_redis = holders(tmp_path, running)
    # Both tenants have the same payloads: each is there once, of the tenant without keys.
    for payload in payloads(LABELS):
        assert on_disk().count(payload[:32]) == in_redis().count(payload[:32]) == 1
    with sealing_pool(tmp_path, 1, 2, redis="") as address:
        assert read(address) == read(address, "blue") == payloads(LABELS), "from disk"
    with sealing_pool(tmp_path, 1, 2, redis=running.url, disk=False) as address:
        assert read(address) == read(address, "blue") == payloads(LABELS), "from Redis"


def test_without_the_key_everything_is_a_miss_and_heals(tmp_path: Path) -> None:
    with sealing_pool(tmp_path, 1) as address:
        write(address)
    for ids in ((2,), ()):
        with sealing_pool(tmp_path, *ids) as address:
            assert read(address) == [None] * len(LABELS)
            assert read(address, "blue") == payloads(LABELS)
            with contextlib.closing(connect(address)) as tier:
                assert tier.write(items(LABELS)) == [WriteStatus.STORED] * len(LABELS)


@pytest.mark.parametrize("reads_plain", [True, False])
def test_a_tenant_turns_sealing_on(tmp_path: Path, reads_plain: bool) -> None:
    with sealing_pool(tmp_path) as address:
        write(address)
    with sealing_pool(tmp_path, 1, storage_reads_plain=reads_plain) as address:
        assert read(address) == (payloads(LABELS) if reads_plain else [None] * len(LABELS))


def test_large_blocks_go_down_and_come_back(tmp_path: Path, running: RedisServer) -> None:
    nbytes = 4 * MIB  # as large as a value in Redis may be, before it is sealed
    with sealing_pool(tmp_path, 1, redis=running.url) as address, contextlib.closing(connect(address)) as tier:
        block = summed(keys(["large"])[0], make_payload("large", nbytes))
        assert tier.write([block]) == [WriteStatus.STORED]
    for disk, url in ((True, ""), (False, running.url)):
        with sealing_pool(tmp_path, 1, redis=url, disk=disk) as address, contextlib.closing(connect(address)) as tier:
            until(lambda tier=tier: read_blocks(tier, keys(["large"]), nbytes) == [block[1]])


@pytest.mark.parametrize(
    ("text", "reason"),
    [("", "KEYS is missing or empty"), ("1:abc", "entry 1 is no ID:KEY"), ("secret", "entry 1 is no ID:KEY")],
)
def test_keys_that_are_none_are_refused_at_the_start(tmp_path: Path, text: str, reason: str) -> None:
    tenants = {"red": {"token_sha256": list(TENANTS)[:1], "storage_keys": "env:KEYS"}}
    table = {"disk_dir": str(tmp_path / "disk"), "http_listen": "127.0.0.1:0"}
    config = parse_config(
        {"pool_service": table, "tenants": tenants}, source="a test", environ={"KEYS": text} if text else {}
    )
    with pytest.raises(ConfigError, match=rf"tenants\.red\.storage_keys: .*{reason}") as error:
        PoolService(config).start()
    assert "secret" not in str(error.value).replace("write the secret into it", "")


def test_a_tenant_that_gets_keys_while_a_pool_runs_is_refused(tmp_path: Path) -> None:
    """Keys are read at the start: the pool would store its blocks as they are, though it is to have them sealed."""
    free = {"listen": "127.0.0.1:0", "grpc_listen": "127.0.0.1:0", "http_listen": "127.0.0.1:0"}
    table = {
        **free,
        "memory_bytes": 16 * MIB,
        "disk_reserve_bytes": 0,
        "disk_dir": str(tmp_path),
        "disk_bytes": 64 * MIB,
    }
    plain: dict[str, dict[str, object]] = {name: {"token_sha256": [digest]} for digest, name in TENANTS.items()}
    keyed = {**plain, "red": {**plain["red"], "storage_keys": "env:KEYS"}}
    environ = {"KEYS": f"1:{KEYS[1].hex()}"}

    def config(tenants: dict[str, dict[str, object]]) -> Config:
        return parse_config({"pool_service": table, "tenants": tenants}, source="a test", environ=environ)

    service = PoolService(config(plain))
    try:
        service.start()
        for tenants in (keyed, {**plain, "new": {"storage_keys": "env:KEYS"}}):
            with pytest.raises(ConfigError, match=r"storage_keys.*restart"):
                service.take(config(tenants))
        service.take(config(plain))
    finally:
        service.stop()


def test_a_new_storage_key_seals_while_the_pool_runs(tmp_path: Path) -> None:
    """The pool looks at the file of its keys; what the old key has sealed is read as long as it stands there, too."""
    key_file = tmp_path / "keys"

    def have(*ids: int) -> None:
        key_file.write_text("\n".join(f"{number}:{KEYS[number].hex()}" for number in ids))

    have(1)
    storage = f'disk_dir = "{tmp_path}/disk"\ndisk_bytes = "64MiB"\ndisk_reserve_bytes = 0\nmin_residency_s = 0.0\n'
    path = tmp_path / "pool.toml"
    path.write_text(
        f'[pool_service]\nlisten = ["127.0.0.1:0"]\ngrpc_listen = ["127.0.0.1:0"]\nhttp_listen = "127.0.0.1:0"\n'
        f'{storage}memory_bytes = "16MiB"\n'
        f'[tenants.red]\ntoken_sha256 = ["{next(iter(TENANTS))}"]\nstorage_keys = "file:keys"\n'
    )
    first, second = range(4), range(4, 8)
    with running_process(path) as pool:
        with contextlib.closing(connect(pool.block)) as tier:
            assert tier.write(items(first)) == [WriteStatus.STORED] * 4
            have(1, 2)
            pool.says("storage key 2 seals from now on")
            assert tier.write(items(second)) == [WriteStatus.STORED] * 4
        key_file.write_text("none")
        pool.says("tenants.red.storage_keys: entry 1 is no ID:KEY")
        have(1, 2)
        pool.says("the configuration has changed: the pool has", times=2)
    for ids, blocks in (((1, 2), [*first, *second]), ((2,), second)):
        with sealing_pool(tmp_path, *ids) as address, contextlib.closing(connect(address)) as tier:
            assert read_blocks(tier, keys(blocks), BLOCK_BYTES) == payloads(blocks)
    with sealing_pool(tmp_path, 2) as address, contextlib.closing(connect(address)) as tier:
        assert read_blocks(tier, keys(first), BLOCK_BYTES) == [None] * 4, "the old key has sealed these"
