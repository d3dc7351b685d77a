"""Which releases of SGLang this backend was tried with. Imports nothing of theirs that another release may not have."""

import sglang

from kvtier.errors import ConfigError

SUPPORTED = ("0.5.23",)


def require_version() -> None:
    """Raises `ConfigError` for an SGLang that this backend was not tried with."""
    if sglang.__version__ not in SUPPORTED:
        raise ConfigError(
            f"kvtier works with SGLang {', '.join(SUPPORTED)}, this is {sglang.__version__}: install one of these"
        )
