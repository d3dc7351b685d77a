"""The profile `gateway`: its image, what it refuses, and a client's request that reaches an engine of this machine."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from compose_rig import ROOT, Stack, build_image, inspect, poll, require_small
from free_port import free_port
from gateway_rig import PlayedEngine

IMAGE = "kvtier-gateway:test"
MAX_IMAGE_BYTES = 190_000_000
"""The most bytes of the gateway's image, the base image apart."""
KEY = "a client's key"


@pytest.fixture(scope="module")
def gateway_image(tmp_path_factory: pytest.TempPathFactory) -> str:
    return build_image(tmp_path_factory.mktemp("build"), "gateway", IMAGE)


def test_the_image_is_small_and_has_no_torch(gateway_image: str) -> None:
    require_small(gateway_image, MAX_IMAGE_BYTES)


@pytest.fixture
def engine() -> Iterator[PlayedEngine]:
    with PlayedEngine() as engine:
        yield engine


def test_a_request_goes_through(image: str, gateway_image: str, engine: PlayedEngine, tmp_path: Path) -> None:
    folder, (port, status) = tmp_path / "gateway", (free_port(), free_port())
    folder.mkdir()
    folder.chmod(0o755)
    text = (ROOT / "deploy" / "gateway" / "gateway.toml").read_text()
    file = folder / "gateway.toml"
    file.write_text(text.replace("http://127.0.0.1:8000", engine.url))
    file.chmod(0o644)
    secrets = {"KVTIER_SECRET": "a secret of more than sixteen bytes"}
    variables = {
        "KVTIER_GATEWAY_IMAGE": gateway_image,
        "KVTIER_GATEWAY_FOLDER": str(folder),
        "KVTIER_GATEWAY_PORT": str(port),
        "KVTIER_GATEWAY_STATUS_PORT": str(status),
        "KVTIER_GATEWAY_KEY_SHA256": hashlib.sha256(KEY.encode()).hexdigest(),
    }
    with Stack(image, tmp_path, environ=variables) as stack:
        # Without the engines' half of the secrets it says which one it misses, again and again.
        stack.compose("--profile", "gateway", "up", "-d", "--no-build", "gateway")
        poll(lambda: "KVTIER_SECRET" in stack.compose("logs", "--no-color", "gateway"), "it says what it misses")
        stack.set(secrets | {"KVTIER_TOKEN": stack.token})
        stack.compose("--profile", "gateway", "up", "-d", "--no-build", "gateway")
        stack.wait_until_healthy("gateway")
        container = inspect(stack.container("gateway"))
        host = container["HostConfig"]
        assert (host["ReadonlyRootfs"], host["CapDrop"], host["NetworkMode"]) == (True, ["ALL"], "host")
        url = f"http://127.0.0.1:{port}/v1/completions"
        body = {"prompt": "hello", "max_tokens": 1}
        assert httpx.post(url, json=body, timeout=60).status_code == 401
        answer = httpx.post(url, json=body, headers={"Authorization": f"Bearer {KEY}"}, timeout=60)
        assert (answer.status_code, answer.json()) == (200, {"choices": []})
        assert engine.got[-1][2]["kv_transfer_params"] == {"kvtier": {"tenant": "default"}}
        stack.compose("stop", "gateway")
        assert inspect(stack.container("gateway"))["State"]["ExitCode"] == 0
