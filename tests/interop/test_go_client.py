"""A client in Go, written from docs/ alone, beside kvtier's own: one reads what the other wrote, over every path."""

import base64
import json
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from document_rig import examples
from golden_keys import NAMESPACE, SECRET
from kvtier.codec.checksums import checksum
from kvtier.identity.keys import split_store_key
from kvtier.tiers.base import Status, WriteStatus
from pool_rig import TOKENS, connect, keys, pool_process
from tls_rig import Site

SOURCE = Path(__file__).parent / "client"
BUILD_S = 300  # an unloaded machine needs a second, or half a minute where Go comes without compiled packages


class Client:
    """The Go client's process; each call is one operation of its main.go."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def __call__(self, op: str, **arguments: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"op": op, **arguments}, default=_base64) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


def _base64(value: bytes) -> str:
    return base64.b64encode(value).decode()


def _bytes(text: str | None) -> bytes | None:
    return None if text is None else base64.b64decode(text)


@pytest.fixture(scope="module")
def binary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    go = shutil.which("go")
    if go is None:
        if os.environ.get("KVTIER_TEST_GO"):
            pytest.fail("KVTIER_TEST_GO is set, and there is no Go")
        pytest.skip("needs Go: apt-get install golang-go")
    folder = tmp_path_factory.mktemp("go")
    environ = os.environ | {"GOCACHE": str(folder / "cache"), "GOPATH": str(folder / "path"), "GOENV": "off"}
    environ |= {"GOTOOLCHAIN": "local", "GOPROXY": "off", "GOFLAGS": "", "GOWORK": "off"}
    command = [go, "build", "-buildvcs=false", "-o", str(folder / "client"), "."]
    subprocess.run(command, cwd=SOURCE, env=environ, check=True, timeout=BUILD_S)
    return folder / "client"


@pytest.fixture
def client(binary: Path) -> Iterator[Client]:
    process = subprocess.Popen([binary], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield Client(process)
    finally:
        process.kill()
        process.communicate()


def test_keys_and_header_are_the_documented_ones(client: Client) -> None:
    page = examples("stored-form.md")
    sizes = {"tp_size": 1, "pp_size": 1, "layout_version": 1, "num_layers": 30, "num_kv_heads": 3, "head_dim": 64}
    namespace: dict[str, Any] = {"weights_digest": bytes(range(32)), "dtype": "bfloat16", "kv_dtype": "bfloat16"}
    namespace |= {"physical_layout": "L2NHD", "backend": "torch-cpu", **sizes}
    extras = {"1": [{"kind": "lora", "data": b"adapter-7", "offset": 0}]}
    chain = {"secret": SECRET, "salt": "red", "tokens_per_block": 4, "tokens": list(range(1, 13)), "extras": extras}
    found = client("keys", keys={"tenant": "red", "namespace": namespace, "digest": b"digest", **chain})
    assert _bytes(found["root"]) == page["root"]
    assert _bytes(found["store_keys"][0]) == page["store key"]
    assert _bytes(found["store_keys"][1]) == page["store key"][:32] + page["chain hash 1"]
    assert _bytes(found["external_key"]) == page["external key of digest"]
    header = _bytes(client("header", bytes=page["store key"], payloads=[b"golden payload"]))
    assert header == page["version 1, raw"][:96]
    assert page["namespace id"] == NAMESPACE.id


@pytest.mark.parametrize("nbytes", [1, 40, 41, 152, 153, 936, 937, 5000])
def test_checksums_of_every_formula(client: Client, nbytes: int) -> None:
    (key,) = keys(["a"])
    payload = bytes(i % 251 for i in range(nbytes))
    header = _bytes(client("header", bytes=key, payloads=[payload]))
    assert header is not None
    assert struct.unpack("<Q", header[88:]) == (checksum(key, payload),)


def exchange_blocks(client: Client, address: str, **target: str) -> None:
    """Each writes a block that the other reads, and misses what nobody wrote."""
    ours, theirs, nobodys = keys(["ours", "theirs", "nobody's"])
    _, namespace, _ = split_store_key(ours)
    hashes = [split_store_key(key)[2] for key in (ours, theirs, nobodys)]
    group = {"namespace": namespace, "hashes": hashes, "payload_bytes": 5000}
    assert _bytes(client("open", target={"address": address, "token": TOKENS["red"], **target})) == ours[:16]
    written = client("write", namespace=namespace, hashes=[hashes[1]], payloads=[b"t" * 5000])
    assert _bytes(written) == bytes([WriteStatus.STORED])
    tier = connect(address)
    try:
        assert tier.write([(ours, b"o" * 5000, checksum(ours, b"o" * 5000))]) == [WriteStatus.STORED]
        buffers = [memoryview(bytearray(5000)) for _ in range(2)]
        assert tier.read([theirs, nobodys], buffers) == [Status.HIT, Status.MISS]
        assert buffers[0] == b"t" * 5000
    finally:
        tier.close()
    read = [_bytes(payload) for payload in client("read", groups=[group])]
    assert read == [b"o" * 5000, b"t" * 5000, None]
    assert _bytes(client("lookup", groups=[group])) == b"\1\1\0"
    assert client("usage")[0]["num_blocks"] == 2
    assert client("discard", groups=[group]) == 2


@pytest.mark.parametrize("unix", [False, True], ids=["tcp", "unix"])
def test_blocks_of_one_are_read_by_the_other(client: Client, tmp_path: Path, unix: bool) -> None:
    with pool_process(listen=f"unix:{tmp_path}/s" if unix else "") as pool:
        exchange_blocks(client, pool.block)


def test_over_tls(client: Client, tmp_path: Path) -> None:
    site = Site.build(tmp_path)
    with site.pool() as addresses:
        ca = str(site.ca.certificate)
        assert _bytes(client("open", target={"address": addresses.block[0], "token": TOKENS["red"], "ca": ca}))
        assert _bytes(client("write", namespace=bytes(16), hashes=[bytes(32)], payloads=[b"p" * 9])) == b"\0"


def test_what_a_pool_refuses(client: Client) -> None:
    with pool_process() as pool:
        target = {"address": pool.block, "token": "a-wrong-token-of-tests"}
        assert client("open", target=target)["error"] == "unauthenticated"
        client("open", target=target | {"token": TOKENS["red"]})
        too_large = client("write", namespace=bytes(16), hashes=[bytes(32)], payloads=[bytes(65 << 20)])
        assert _bytes(too_large) == bytes([WriteStatus.FULL])
        hello = examples("wire-examples.md")["hello request"]
        for torn in (hello[:7], hello[:40]):
            assert client("exchange", target=target, bytes=torn) == []
        assert client("exchange", target=target, bytes=b"KVTF" + bytes(12))[0]["result"] == "invalid"
        assert _bytes(client("lookup", groups=[{"namespace": bytes(16), "hashes": [bytes(32)]}])) == b"\0"
