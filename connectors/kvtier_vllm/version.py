"""Which releases of vLLM this connector was tried with. Imports nothing of theirs that another release may not have."""

import vllm

from kvtier.errors import ConfigError

SUPPORTED = ("0.32.", "0.33.")


def require_version() -> None:
    """Raises `ConfigError` for a vLLM that this connector was not tried with."""
    if not vllm.__version__.startswith(SUPPORTED):
        known = ", ".join(f"{prefix}x" for prefix in SUPPORTED)
        raise ConfigError(f"kvtier works with vLLM {known}, this is {vllm.__version__}: install one of these")
