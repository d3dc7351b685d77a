"""`make .venv/sglang`: what of SGLang runs without a GPU, in a virtual environment of its own, with this checkout.

python tools/environments/sglang.py [--into .venv/sglang] [--checkout .]

Needs Python 3.11 or newer, a package index, a C++ compiler and OpenSSL's headers. About 0.5 GB of downloads, once.
Repeated calls go on from where the last one got to.
"""

import sys

from venv_steps import TORCH, Checkout, Environment, Step, look, main

RELEASES = ("0.5.23",)
SGLANG = f"sglang=={RELEASES[0]}"
"""Installed without its dependencies: most are for CUDA, and it would replace torch by a build for CUDA too."""
WHEEL = f"a wheel of {SGLANG} for this Python and platform: it is built for Linux with glibc 2.34 or newer"
COMPILER = "a C++ compiler (g++) and OpenSSL's headers (libssl-dev): SGLang compiles its page hash"
IMPORTED = (
    "aiohttp",
    "apache-tvm-ffi==0.1.11",
    "compressed-tensors==0.18.0",
    "dill",
    "gguf",
    "ipython",
    "msgspec",
    "ninja",
    "openai==2.8.0",
    "orjson",
    "packaging",
    "partial-json-parser",
    "pillow",
    "psutil",
    "pybase64",
    "pyzmq",
    "requests",
    "sentencepiece==0.2.1",
    "starlette",
    "tqdm",
    "transformers==5.19.0",
    "triton",
)
"""What SGLang's caches and their controllers use, beside torch and kvtier's packages; ninja builds the page hash."""
TOOLS = ("pytest", "pytest-timeout", "pytest-xdist")
_WORKS = """
import importlib.metadata, os, sys
os.environ["TORCH_EXTENSIONS_DIR"] = os.path.join(sys.prefix, "torch_extensions")
import kvtier
from sglang.srt.mem_cache.utils import get_hash_str
assert len(get_hash_str([1, 2, 3], page_size=1)) == 3
print("SGLang", importlib.metadata.version("sglang"), "and kvtier are importable, and SGLang's page hash is compiled")
"""


def steps(environment: Environment, checkout: Checkout, _release: str) -> list[Step]:
    """Makes the environment in which the connector's tests run, from nothing."""
    required = [*IMPORTED, *checkout.dependencies, *TOOLS]
    return [
        environment.creation(),
        Step("torch", [TORCH], lambda: environment.install(TORCH)),
        # Named again: nothing that is asked for here may replace it.
        Step("what SGLang's caches, kvtier and tests import", required, lambda: environment.install(TORCH, *required)),
        Step("SGLang", [SGLANG], lambda: environment.install("--no-deps", SGLANG), WHEEL),
        checkout.installation(environment),
        look(environment, _WORKS, needs=COMPILER),
    ]


if __name__ == "__main__":
    sys.exit(main("SGLang", ".venv/sglang", steps, RELEASES))
