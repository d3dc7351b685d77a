"""`kvtier config` as people call it, in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

SECRETS = {
    "KVTIER_SECRET": "0123456789abcdef0123",
    "KVTIER_TOKEN": "fedcba9876543210fedc",
    "KVTIER_TOKEN_SHA256": "ab" * 32,
    "ALICE_KEY_SHA256": "cd" * 32,
}


def run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("KVTIER")}
    return subprocess.run(
        [sys.executable, "-m", "kvtier.cli.main", "config", *arguments],
        capture_output=True,
        text=True,
        env=clean | environ,
        timeout=60,
        check=False,
    )


def findings(file: Path, **environ: str) -> tuple[int, list[dict[str, str]]]:
    done = run("check", str(file), "--json", **environ)
    answer = json.loads(done.stdout)
    assert answer["ok"] is (done.returncode == 0), done.stderr
    return done.returncode, answer["findings"]
