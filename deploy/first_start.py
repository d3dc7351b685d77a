"""Starts the pool once while its image is built, and the gateway where the image has it: an image whose services do not
start is never made.

Python leaves the bytecode of what was imported where PYTHONPYCACHEPREFIX says.
"""

import importlib.util
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

_WAIT_S = 60.0
_HEALTH = Path(__file__).with_name("health.py")
_ANY_PORT = "127.0.0.1:0"
_WELL, _WITHOUT_ENGINES = 0, 1
"""Exit codes of the health check; the latter of a gateway whose engines are not there."""


def main() -> None:
    """Ready, healthy, and ended well by SIGTERM, or `SystemExit` with the reason."""
    with tempfile.TemporaryDirectory() as folder:
        flags = {
            "listen": _ANY_PORT,
            "grpc-listen": _ANY_PORT,
            "http-listen": _ANY_PORT,
            "memory-bytes": "16MiB",
            "disk-dir": f"{folder}/disk",
            "tenant": f"build={'0' * 64}",
        }
        start(["pool", "serve", *(f"--{k}={v}" for k, v in flags.items())], _WELL)
        if importlib.util.find_spec("aiohttp") is not None:
            config = Path(folder, "gateway.toml")
            config.write_text(
                f'[gateway]\nlisten = "{_ANY_PORT}"\nstatus_listen = "{_ANY_PORT}"\nengines = ["http://127.0.0.1:9"]\n'
                f'[tenants.build]\n[api_keys.build]\ntenant = "build"\nkey_sha256 = ["{"0" * 64}"]\n'
            )
            start(["gateway", "serve", f"--config={config}"], _WITHOUT_ENGINES)


def start(arguments: Sequence[str], expected: int) -> None:
    """
    :param arguments: of `kvtier`.
    :param expected: exit code of the health check.
    """
    name, command = arguments[0], [sys.executable, "-m", "kvtier.cli.main", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as service:
        assert service.stdout is not None
        line = service.stdout.readline()
        if not line.startswith("ready "):
            sys.exit(f"the {name} did not start: {line!r}, exit code {service.wait(_WAIT_S)}")
        port = line.rsplit(":", 1)[1].strip()
        health = subprocess.run([sys.executable, _HEALTH, port], timeout=_WAIT_S, check=False)
        service.terminate()
        code = service.wait(_WAIT_S)
    if health.returncode != expected or code:
        sys.exit(f"health check exit code {health.returncode}, {name} exit code {code}")


if __name__ == "__main__":
    main()
