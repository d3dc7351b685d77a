"""Starts the pool once while its image is built: an image whose pool does not start is never made.

Python leaves the bytecode of what was imported where PYTHONPYCACHEPREFIX says.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

_WAIT_S = 60.0
_HEALTH = Path(__file__).with_name("health.py")


def main() -> None:
    """Ready, healthy, and ended well by SIGTERM, or `SystemExit` with the reason."""
    with tempfile.TemporaryDirectory() as folder:
        flags = {
            "listen": "127.0.0.1:0",
            "grpc-listen": "127.0.0.1:0",
            "http-listen": "127.0.0.1:0",
            "memory-bytes": "16MiB",
            "disk-dir": f"{folder}/disk",
            "tenant": f"build={'0' * 64}",
        }
        command = [sys.executable, "-m", "kvtier.cli.main", "pool", "serve", *(f"--{k}={v}" for k, v in flags.items())]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as pool:
            assert pool.stdout is not None
            line = pool.stdout.readline()
            if not line.startswith("ready "):
                sys.exit(f"the pool did not start: {line!r}, exit code {pool.wait(_WAIT_S)}")
            port = line.rsplit(":", 1)[1].strip()
            health = subprocess.run([sys.executable, _HEALTH, port], timeout=_WAIT_S, check=False)
            pool.terminate()
            code = pool.wait(_WAIT_S)
        if health.returncode or code:
            sys.exit(f"health check exit code {health.returncode}, pool exit code {code}")


if __name__ == "__main__":
    main()
