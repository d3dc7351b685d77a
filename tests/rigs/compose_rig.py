"""What the container tests share: a compose project of its own name, ports and volumes."""

import datetime
import hashlib
import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from subprocess import CompletedProcess
from types import TracebackType
from typing import Any

from kvtier.tiers.pool.tier import PoolTier
from pool_rig import connect

ROOT = Path(__file__).parents[2]
IMAGE = "kvtier-pool:test"
BASE_IMAGE = "python:3.11-slim-bookworm"
WAIT_S = 60.0
"""Bound on everything that is waited for; never reached when the code works."""
COMMAND_S = 240.0
REDIS_SOCKET = "/run/redis/redis.sock"


def docker(*arguments: str) -> str:
    """Standard output. A failure shows both outputs."""
    return _run(["docker", *arguments]).stdout.strip()


def inspect(name: str) -> Any:
    """What the engine says of a container, or of an image."""
    return json.loads(docker("inspect", name))[0]


def compose(variables: Mapping[str, str], *arguments: str, folder: Path, check: bool = True) -> CompletedProcess[str]:
    """A compose command with these variables in its `.env`, and none of those that whoever works here has set.

    `docker-compose` 1.29, or the plug-in that followed it.
    """
    file = folder / ".env"
    file.write_text("".join(f"{name}={value}\n" for name, value in variables.items()))
    command = ["docker-compose"] if shutil.which("docker-compose") else ["docker", "compose"]
    return _run([*command, "--env-file", str(file), *arguments], check=check)


def build_image(folder: Path, service: str = "pool", image: str = IMAGE) -> str:
    """Builds the image of a service under this name, which it returns."""
    variables = {"KVTIER_TOKEN_SHA256": "-", "KVTIER_IMAGE": image, "KVTIER_GATEWAY_IMAGE": image}
    compose(variables, "--profile", "gateway", "build", service, folder=folder)
    return image


def poll(condition: Callable[[], bool], what: str) -> None:
    """Until `condition` holds."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"in vain: {what}"
        time.sleep(0.05)


def sha256(data: str | bytes) -> str:
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).hexdigest()


class Stack:
    """A running compose project.

    A context manager: leaving it takes containers, networks and volumes away. Their log stays in `folder`.
    """

    def __init__(
        self, image: str, folder: Path, *, override: str = "", environ: Mapping[str, str] | None = None
    ) -> None:
        """
        :param folder: for the files of this project.
        :param override: a docker-compose.override.yml; empty: none.
        :param environ: more variables.
        """
        self.project = f"kvtier-test-{secrets.token_hex(4)}"
        self.token = secrets.token_hex(32)
        self.folder = folder
        ports = _free_ports(3)
        self.block, self.grpc, self.http = (f"127.0.0.1:{port}" for port in ports)
        self._variables = {
            "KVTIER_IMAGE": image,
            "KVTIER_TOKEN_SHA256": sha256(self.token),
            "KVTIER_POOL_MEMORY": "64MiB",
            "KVTIER_POOL_DISK": "1GiB",
            "KVTIER_REDIS_MEMORY": "128mb",
            **{f"KVTIER_{name}_PORT": str(port) for name, port in zip(("BLOCK", "GRPC", "HTTP"), ports, strict=True)},
            **(environ or {}),
        }
        self._files = ["-f", str(ROOT / "docker-compose.yml")]
        if override:
            path = folder / "docker-compose.override.yml"
            path.write_text(override)
            self._files += ["-f", str(path)]

    def __enter__(self) -> "Stack":
        try:
            self.up()
        except BaseException:
            self.down()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        (self.folder / "compose.log").write_text(self.compose("logs", "--no-color"))
        self.down()

    def compose(self, *arguments: str) -> str:
        command = ["-p", self.project, *self._files, *arguments]
        return compose(self._variables, *command, folder=self.folder).stdout

    def set(self, variables: Mapping[str, str]) -> None:
        """Variables for what is started from now on."""
        self._variables |= variables

    def runs(self) -> bool:
        """Whether both containers do."""
        return all(inspect(self.container(service))["State"]["Running"] for service in ("pool", "redis"))

    def up(self) -> None:
        """Starts what does not run. Returns when both are healthy."""
        self.compose("up", "-d", "--no-build")
        self.wait_until_healthy("pool", "redis")

    def down(self) -> None:
        self.compose("down", "-v", "--remove-orphans", "-t", "5")

    def container(self, service: str) -> str:
        return self.compose("ps", "-q", service).strip()

    def wait_until_healthy(self, *services: str) -> None:
        for service in services:
            poll(partial(_is_healthy, self.container(service)), f"{service} healthy")

    def kill(self, service: str) -> None:
        docker("kill", "-s", "KILL", self.container(service))

    def start(self, service: str) -> None:
        """Starts a killed or stopped container again; returns when it is healthy."""
        docker("start", self.container(service))
        if service == "pool":
            poll(self.serves, "the pool answers")
        else:
            poll(lambda: self.redis("ping", check=False) == "PONG", "Redis answers")

    def serves(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://{self.http}/healthz", timeout=5) as answer:
                return bool(answer.status == 200)
        except (OSError, urllib.error.URLError):
            return False

    def redis(self, *command: str, check: bool = True) -> str:
        """What redis-cli in Redis's own container says."""
        name = self.container("redis")
        return _run(["docker", "exec", name, "redis-cli", "-s", REDIS_SOCKET, *command], check=check).stdout.strip()

    def metric(self, name: str, **labels: str) -> float:
        """Sum of the samples of the pool's `name` that have `labels`."""
        with urllib.request.urlopen(f"http://{self.http}/metrics", timeout=10) as response:
            lines = response.read().decode().splitlines()
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        samples = [line for line in lines if re.match(rf"{name}[ {{]", line) and all(text in line for text in wanted)]
        return sum(float(line.rsplit(" ", 1)[1]) for line in samples)

    def tier(self, address: str | None = None) -> PoolTier:
        """The pool as an engine on this machine sees it; the block protocol's port by default."""
        return connect(address or self.block, "default", token=self.token)

    def seconds_to_ready(self) -> float:
        """From the start of the pool's container to its line `ready`."""
        name = self.container("pool")
        started = inspect(name)["State"]["StartedAt"]
        lines = docker("logs", "--timestamps", "--since", started, name).splitlines()
        ready = next(line.split()[0] for line in lines if " ready " in line)
        return (_moment(ready) - _moment(started)).total_seconds()


def _run(command: Sequence[str], *, check: bool = True) -> CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("KVTIER_")}
    done = subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True, timeout=COMMAND_S)
    if check and done.returncode:
        raise AssertionError(f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done


def _is_healthy(name: str) -> bool:
    return bool(inspect(name)["State"]["Health"]["Status"] == "healthy")


def _moment(text: str) -> datetime.datetime:
    """RFC 3339 with nanoseconds, of which datetime takes six digits."""
    return datetime.datetime.fromisoformat(re.sub(r"(\.\d{1,6})\d*Z$", r"\1+00:00", text))


def _free_ports(count: int) -> list[int]:
    """Held all at once, so that no two are the same."""
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [listener.getsockname()[1] for listener in listeners]
    for listener in listeners:
        listener.close()
    return ports


def require_small(image: str, most_bytes: int) -> None:
    """Fails where an image has more bytes than these beside its base, or packages that only engines and tests need."""
    own = inspect(image)["Size"] - inspect(BASE_IMAGE)["Size"]
    print(f"image without its base: {own / 1e6:.1f} MB")
    assert own <= most_bytes
    script = "import importlib.util as u; print([n for n in ('torch', 'triton', 'pip', 'pytest') if u.find_spec(n)])"
    assert docker("run", "--rm", "--network=none", "--entrypoint=python", image, "-c", script) == "[]"
